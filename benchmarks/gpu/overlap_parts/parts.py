"""The parts of overlap.py, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from overlap_parts.correct import correct
from overlap_parts.report import Case
from overlap_parts.scale import Scale
from overlap_parts.speed import overlap, product, waiting

PARTS: dict[str, Callable[[Scale, int], Iterator[Case]]] = {
    "correct": correct,
    "product": product,
    "waiting": waiting,
    "overlap": overlap,
}
