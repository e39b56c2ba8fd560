"""AsyncEngine: several cores, and cores that are started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
from support.engine import (
    FAST,
    PROMPT,
    SLOW,
    collect,
    cores,
    idle,
    params,
    started,
    tokens,
)
from support.mock_runner import (
    CRASH_TOKEN,
    HANG_TOKEN,
    expected,
)

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine

TOLD = "support.mock_runner:load_as_told"
LONG = {"max_tokens": 400, "stop_token_ids": ()}


def how(config: EngineConfig, told: str) -> None:
    """What a core does when it is loaded from now on; see `load_as_told`."""
    (Path(config.model) / "how").write_text(told)


async def serving(engine: AsyncEngine, count: int = 1) -> None:
    async with asyncio.timeout(60):
        while engine.serving < count:
            await asyncio.sleep(0.01)


@pytest.fixture
async def two(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    """An engine of two cores, which are started again."""
    async with started(replace(config, dp=2), runner_factory=TOLD, restart=True) as engine:
        yield engine


def shares(engine: AsyncEngine) -> list[int]:
    return [core.live for core in engine._supervisor.cores]


async def test_cores_share_the_requests(two: AsyncEngine) -> None:
    assert len(cores()) == two.serving == 2
    assert two.places == 2 * 8 + 1024
    readers = [asyncio.create_task(collect(two, [1 + i], params())) for i in range(12)]
    await asyncio.sleep(0)
    assert shares(two) == [6, 6]
    for i, reader in enumerate(readers):
        assert tokens(await reader) == expected([1 + i], 20)
    await idle(two)
    assert two.stats.kv_blocks_total == 2 * 4096
    assert two.stats.prompt_tokens == 12


async def test_a_request_goes_where_there_are_fewest_and_else_in_turn(two: AsyncEngine) -> None:
    long = two.generate(two.validate(PROMPT, params(**LONG)))
    await anext(long)
    assert shares(two) == [1, 0]
    for _ in range(3):
        short = asyncio.create_task(collect(two, PROMPT, params()))
        await asyncio.sleep(0)
        assert shares(two) == [1, 1]
        await short
    await long.aclose()
    for first, second in ((1, 0), (0, 1), (1, 0)):
        short = asyncio.create_task(collect(two, PROMPT, params()))
        await asyncio.sleep(0)
        assert shares(two) == [first, second]
        await short


async def test_a_killed_core_is_started_again(config: EngineConfig) -> None:
    async with started(config, runner_factory=TOLD, restart=True) as engine:
        await collect(engine, PROMPT, params())
        await idle(engine)
        stream = engine.generate(engine.validate(PROMPT, params(**LONG)))
        await anext(stream)
        (core,) = cores()
        how(config, "wait")
        core.kill()
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="was killed by SIGKILL"):
                async for _ in stream:
                    pass
        assert (engine.status, engine.live, engine.stats.running) == ("restarting", 0, 0)
        assert engine.stats.prompt_tokens >= len(PROMPT)
        counted = engine.stats.prompt_tokens
        with pytest.raises(EngineError, match="being started again") as caught:
            await collect(engine, PROMPT, params())
        assert caught.value.retry_after is not None
        how(config, "go")
        await serving(engine)
        assert tokens(await collect(engine, PROMPT, params())) == expected(PROMPT, 20)
        assert (engine.status, engine.failure, engine.restarts) == ("ready", None, 1)
        assert engine.stats.prompt_tokens == counted + len(PROMPT)
        assert cores() != [core]


@pytest.mark.parametrize("token", [CRASH_TOKEN, HANG_TOKEN])
async def test_a_core_that_fails_or_is_stuck_is_started_again(
    config: EngineConfig, token: int
) -> None:
    config = replace(config, stall_timeout=2.0)
    async with started(config, runner_factory=SLOW, restart=True) as engine:
        with pytest.raises(EngineError):
            await collect(engine, [token], params())
        async with asyncio.timeout(60):
            while not engine.restarts:
                await asyncio.sleep(0.01)
        await serving(engine)
        assert tokens(await collect(engine, PROMPT, params())) == expected(PROMPT, 20)
        assert len(cores()) == 1


async def test_the_loss_of_one_core_is_that_of_its_requests_alone(
    config: EngineConfig, two: AsyncEngine
) -> None:
    streams = [two.generate(two.validate(PROMPT, params(**LONG))) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    how(config, "wait")
    lost = next(core for core in two._supervisor.cores if core.live and core.latest == 0)
    psutil.Process(lost._core.pid).kill()  # type: ignore[union-attr]
    with pytest.raises(EngineError, match=f"{lost.name} was killed by SIGKILL"):
        async for _ in streams[0]:
            pass
    assert (two.status, two.serving) == ("ready", 1)
    assert tokens(await collect(two, PROMPT, params())) == expected(PROMPT, 20)
    rest = [token async for delta in streams[1] for token in delta.token_ids]
    assert rest == expected(PROMPT, 400, ends=())[-len(rest) :]
    how(config, "go")
    await serving(two, 2)
    assert two.restarts == 1


async def test_without_restart_the_loss_of_one_core_is_that_of_all(config: EngineConfig) -> None:
    async with started(replace(config, dp=2), runner_factory=SLOW) as engine:
        streams = [engine.generate(engine.validate(PROMPT, params(**LONG))) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        cores()[0].kill()
        for stream in streams:
            with pytest.raises(EngineError, match=r"engine core . was killed by SIGKILL"):
                async for _ in stream:
                    pass
        assert engine.status == "dead"
        assert "was killed by SIGKILL" in str(engine.failure)
        with pytest.raises(EngineError, match="dead"):
            await collect(engine, PROMPT, params())
    assert not cores()


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ("miss", "the engine cannot be started again: no weights"),
        ("leave", "exited with status 7 while it was loading; it was started 3 times in vain"),
    ],
)
async def test_a_core_that_cannot_be_loaded_again_is_the_end(
    config: EngineConfig, told: str, why: str
) -> None:
    async with started(config, runner_factory=TOLD, restart=True) as engine:
        how(config, told)
        cores()[0].kill()
        async with asyncio.timeout(60):
            while engine.failure is None:
                await asyncio.sleep(0.01)
        assert why in str(engine.failure)
        assert engine.status == "dead"
    assert not cores()


@pytest.mark.parametrize(
    "error", [OSError(11, "no more processes"), ConfigError("there is no memory for it")]
)
async def test_what_a_core_lacks_may_be_there_later(
    error: Exception, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But not for ever."""
    async with started(config, runner_factory=FAST, restart=True) as engine:
        start = mock.AsyncMock(side_effect=error)
        monkeypatch.setattr("weft.serving.engine.core_client.CoreProcess.start", start)
        cores()[0].kill()
        async with asyncio.timeout(60):
            while engine.failure is None:
                await asyncio.sleep(0.01)
        assert str(error) in str(engine.failure)
        assert "it was started 3 times in vain" in str(engine.failure)
        assert start.await_count == 3
        assert engine.status == "dead"
    assert not cores()


async def test_a_core_that_does_not_get_ready_again_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.engine.supervisor.SLOW_RELOAD", 0.0)
    config = replace(config, stall_timeout=0.5)
    async with started(config, runner_factory=TOLD, restart=True) as engine:
        how(config, "hang")
        cores()[0].kill()
        async with asyncio.timeout(60):
            while engine.failure is None:
                await asyncio.sleep(0.01)
        assert "did not load within 1 s" in str(engine.failure)
    assert not cores()


async def test_an_answer_makes_a_core_one_that_works(config: EngineConfig) -> None:
    """However often it is killed afterwards."""
    async with started(config, runner_factory=TOLD, restart=True) as engine:
        for kills in range(1, 6):
            assert tokens(await collect(engine, PROMPT, params())) == expected(PROMPT, 20)
            cores()[0].kill()
            async with asyncio.timeout(60):
                while engine.restarts < kills:
                    await asyncio.sleep(0.01)
            await serving(engine)


async def test_shutdown_while_a_core_is_started_again(config: EngineConfig) -> None:
    async with started(config, runner_factory=TOLD, restart=True) as engine:
        how(config, "wait")
        cores()[0].kill()
        async with asyncio.timeout(60):
            while not engine.restarts:
                await asyncio.sleep(0.01)
        await engine.shutdown()
        assert (engine.status, engine.failure) == ("dead", None)
        assert not cores()
