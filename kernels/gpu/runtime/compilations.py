"""Counts Triton's compilations: while a server serves, each delays a step by seconds."""

from __future__ import annotations

import logging
from typing import Any

import triton

logger = logging.getLogger(__name__)


class Compilations:
    """Counts Triton's compilations in this process from now on.

    Kernels from Triton's cache on disk take milliseconds, and do not count.

    Args:
        quiet: log nothing, because no step waits.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._kernels: list[str] = []  # threads may append
        self._quiet = quiet
        self._taken = 0
        self._before = triton.knobs.compilation.listener
        triton.knobs.compilation.listener = self._listen

    @property
    def count(self) -> int:
        """Number of kernels."""
        return len(self._kernels)

    def _listen(self, *, src: Any, cache_hit: bool, **details: Any) -> None:
        if self._before is not None:
            self._before(src=src, cache_hit=cache_hit, **details)
        if not cache_hit:
            self._kernels.append(src.name)
            if not self._quiet:
                logger.warning(
                    "Triton compiled %s after warm-up; a step has waited for it", src.name
                )

    def take(self) -> int:
        """Return the number since the last call."""
        before, self._taken = self._taken, self.count
        return self._taken - before

    def close(self) -> None:
        """Stop counting."""
        triton.knobs.compilation.listener = self._before
