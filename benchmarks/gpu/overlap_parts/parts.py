"""The parts of overlap.py, in their order."""

from __future__ import annotations

from harness.command import Parts

from overlap_parts.correct import correct
from overlap_parts.speed import overlap, product, waiting

PARTS: Parts = {
    "correct": correct,
    "product": product,
    "waiting": waiting,
    "overlap": overlap,
}
