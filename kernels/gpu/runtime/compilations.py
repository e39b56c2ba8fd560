"""Counts Triton's compilations: while a server serves, each delays a step by seconds."""

from __future__ import annotations

import logging
from typing import Any

import triton

logger = logging.getLogger(__name__)


class Compilations:
    """Counts Triton's compilations in this process from now on.

    Kernels from Triton's cache on disk take milliseconds, and do not count.

    Attributes:
        count: number of kernels.
    """

    def __init__(self) -> None:
        self.count = 0
        self._taken = 0
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, cache_hit: bool, **details: Any) -> None:
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **details)
        if not cache_hit:
            self.count += 1
            logger.warning("Triton compiled %s after warm-up; a step has waited for it", src.name)

    def take(self) -> int:
        """Return the number since the last call."""
        new, self._taken = self.count - self._taken, self.count
        return new

    def close(self) -> None:
        """Stop counting."""
        triton.knobs.compilation.listener = self._before
