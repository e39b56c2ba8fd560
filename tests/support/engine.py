"""AsyncEngine on a mock model: what its tests have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.mock_runner import END
from support.tokenizers import write_byte_level
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine, Delta
from weft.serving.engine.sampling_params import SamplingParams

FAST = "support.mock_runner:load"
SLOW = "support.mock_runner:load_slowly"
PROMPT = [1, 2, 3, 4, 5]


def mock_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of an engine on the mock, whose process imports that from the tests."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent))
    write_byte_level(folder)
    return EngineConfig(model=str(folder), block_size=8, max_num_seqs=8, max_num_batched_tokens=64)


@asynccontextmanager
async def started(config: EngineConfig, **options: Any) -> AsyncIterator[AsyncEngine]:
    engine = await AsyncEngine.start(config, **options)
    try:
        yield engine
    finally:
        await engine.shutdown(drain=False)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 0, "stop_token_ids": (END,), "max_tokens": 20} | settings))


async def collect(
    engine: AsyncEngine, prompt: list[int], wish: SamplingParams, **options: Any
) -> list[Delta]:
    return [delta async for delta in engine.generate(engine.validate(prompt, wish), **options)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def cores() -> list[psutil.Process]:
    """The engine processes of this one, whose children may also be other tests' servers."""
    children = psutil.Process().children()
    return [child for child in children if "weft.serving.engine.core" in child.cmdline()]


async def idle(engine: AsyncEngine) -> None:
    """Wait until the core has nothing left."""
    async with asyncio.timeout(60):
        while engine.stats.running or engine.stats.waiting or engine.stats.kv_blocks_used:
            await asyncio.sleep(0.01)
