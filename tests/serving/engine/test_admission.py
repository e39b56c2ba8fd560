"""The window over a long list: its width, its order, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from weft.errors import EngineError
from weft.serving.engine.admission import for_each


async def test_for_each_draws_items_as_they_are_needed() -> None:
    drawn = done = furthest = 0

    def items() -> Iterator[int]:
        nonlocal drawn
        for i in range(100):
            drawn += 1
            yield i

    async def work(item: int) -> None:
        nonlocal done, furthest
        furthest = max(furthest, drawn - done)
        await asyncio.sleep(0)
        done += 1

    await for_each(items(), work, workers=7)
    assert done == 100
    assert furthest == 7


async def test_for_each_ends_with_the_first_error_and_cancels_the_rest() -> None:
    cancelled = 0

    async def work(item: int) -> None:
        nonlocal cancelled
        if item == 3:
            raise EngineError("gone")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled += 1
            raise

    with pytest.raises(EngineError, match="gone"):
        await for_each(range(10), work, workers=4)
    assert cancelled == 3
