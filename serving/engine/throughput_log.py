"""A log line with the engine's throughput every ten seconds, while there is work."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

PERIOD = 10.0  # seconds

logger = logging.getLogger(__name__)


class ThroughputLog:
    """Logs means over the last period; call `tick` more often than once a period."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stats = engine.stats
        self._time = time.monotonic()

    def tick(self) -> None:
        """Log a line if a period has passed and the engine had work."""
        now = time.monotonic()
        if now - self._time < PERIOD:
            return
        last, stats, seconds = self._stats, self._engine.stats, now - self._time
        self._stats, self._time = stats, now
        prompt = stats.prompt_tokens - last.prompt_tokens
        output = stats.generation_tokens - last.generation_tokens
        if not (prompt or output or stats.running or stats.waiting):
            return
        looked_up = stats.prefix_queries - last.prefix_queries
        found = stats.prefix_hits - last.prefix_hits
        logger.info(
            "%.1f prompt and %.1f output tokens/s; %d running, %d waiting; "
            "KV cache %.0f%% in use, prefix cache hit rate %.0f%%",
            *(prompt / seconds, output / seconds, stats.running, stats.waiting),
            *(100 * stats.kv_blocks_used / max(1, stats.kv_blocks_total),),
            *(100 * found / max(1, looked_up),),
        )
