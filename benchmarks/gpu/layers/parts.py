"""Attention, experts and row-wise kernels: the parts, and their scales."""

from __future__ import annotations

from parts import Part

from layers.attention import decode, latents, prefill, sequence
from layers.exchange import exchange, nccl
from layers.experts import experts
from layers.rows import rows
from layers.scale import TINY, full

__all__ = ["PARTS", "TINY", "full"]

PARTS: dict[str, Part] = {
    "decode": decode,
    "prefill": prefill,
    "latents": latents,
    "sequence": sequence,
    "experts": experts,
    "exchange": exchange,
    "rows": rows,
    "nccl": nccl,
}
