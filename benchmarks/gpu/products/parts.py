"""Overlapped products and collectives: the parts, and their scales."""

from __future__ import annotations

from parts import Part

from products.correct import correct
from products.scale import TINY, full
from products.speed import few_rows, overlap, product, quantized, waiting

__all__ = ["PARTS", "TINY", "full"]

PARTS: dict[str, Part] = {
    "correct": correct,
    "product": product,
    "few_rows": few_rows,
    "quantized": quantized,
    "waiting": waiting,
    "overlap": overlap,
}
