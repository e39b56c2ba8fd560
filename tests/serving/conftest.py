"""An engine on a mock model, which several files here test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.engine import SLOW, mock_config, started

from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """Of an engine on the mock."""
    return mock_config(tmp_path, monkeypatch)


@pytest.fixture(params=[True, False], ids=["thread", "process"])
async def engine(
    request: pytest.FixtureRequest, config: EngineConfig
) -> AsyncIterator[AsyncEngine]:
    """With its core in a thread, and in a process."""
    async with started(config, in_process=request.param, runner_factory=SLOW) as engine:
        yield engine
