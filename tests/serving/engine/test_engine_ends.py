"""AsyncEngine: how it starts, shuts down and fails, with the core in a thread and in a process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import psutil
import pytest
from support.clock import Clock
from support.engine import (
    FAST,
    PROMPT,
    SLOW,
    collect,
    cores,
    params,
    started,
    tokens,
)
from support.mock_runner import (
    CRASH_TOKEN,
    HANG_TOKEN,
    expected,
)

from weft.errors import ConfigError, EngineError, ModelError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine import core_client
from weft.serving.engine.engine import AsyncEngine


async def test_shutdown_drains(engine: AsyncEngine) -> None:
    readers = [asyncio.create_task(collect(engine, [1 + i], params())) for i in range(12)]
    while not engine.stats.running:
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(engine.shutdown(timeout=60))
    await asyncio.sleep(0)
    assert engine.status == "draining"
    with pytest.raises(EngineError, match="shutting down"):
        await collect(engine, PROMPT, params())
    for i, reader in enumerate(readers):
        assert tokens(await reader) == expected([1 + i], 20)
    await ending
    assert engine.status == "dead"


async def test_a_second_shutdown_does_not_wait_for_the_first(engine: AsyncEngine) -> None:
    wish = params(max_tokens=500, stop_token_ids=())
    reader = asyncio.create_task(collect(engine, PROMPT, wish))
    while not engine.stats.running:
        await asyncio.sleep(0.01)
    first = asyncio.create_task(engine.shutdown(timeout=60))
    while engine.status != "draining":
        await asyncio.sleep(0)
    await engine.shutdown(drain=False, timeout=60)
    await first
    assert (await reader)[-1].finish_reason == "abort"


async def test_shutdown_without_drain_aborts(engine: AsyncEngine) -> None:
    wish = params(max_tokens=400, stop_token_ids=())
    reader = asyncio.create_task(collect(engine, PROMPT, wish))
    while not engine.stats.running:
        await asyncio.sleep(0.01)
    await engine.shutdown(drain=False)
    assert (await reader)[-1].finish_reason == "abort"


@pytest.mark.parametrize("in_process", [True, False])
async def test_when_the_runner_raises_all_requests_end(
    config: EngineConfig, in_process: bool
) -> None:
    async with started(config, in_process=in_process, runner_factory=SLOW) as engine:
        wish = params(max_tokens=400, stop_token_ids=())
        reader = asyncio.create_task(collect(engine, PROMPT, wish))
        while not engine.stats.running:
            await asyncio.sleep(0.01)
        why = "the model runner failed: AssertionError: the runner crashed"
        with pytest.raises(EngineError, match=why):
            await collect(engine, [CRASH_TOKEN], wish)
        with pytest.raises(EngineError, match=why):
            await reader
        async with asyncio.timeout(60):
            while engine.status != "dead":
                await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="dead"):
            await collect(engine, PROMPT, wish)


async def test_when_the_core_is_killed_all_streams_end(config: EngineConfig) -> None:
    async with started(config, runner_factory=SLOW) as engine:
        wish = params(max_tokens=400, stop_token_ids=())
        stream = engine.generate(engine.validate(PROMPT, wish))
        await anext(stream)
        (core,) = cores()
        core.kill()
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="was killed by SIGKILL"):
                async for _ in stream:
                    pass
        assert engine.status == "dead"


async def test_a_stuck_core_is_noticed_and_ended(
    config: EngineConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    async with started(replace(config, stall_timeout=2.0), runner_factory=FAST) as engine:
        (core,) = cores()
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match=r"no step in 2 s"):
                await collect(engine, [HANG_TOKEN], params())
            assert engine.status == "stalled"
            await engine.shutdown()
        assert not core.is_running()
        assert "mock_runner.py" in capfd.readouterr().err, "the stacks name where it was stuck"


async def test_interrupts_are_the_parents_business(config: EngineConfig) -> None:
    async with started(config, runner_factory=SLOW) as engine:
        (core,) = cores()
        core.send_signal(signal.SIGINT)
        core.send_signal(signal.SIGTERM)
        assert tokens(await collect(engine, PROMPT, params())) == expected(PROMPT, 20)


def test_no_orphan_is_left_when_the_parent_is_killed(config: EngineConfig) -> None:
    code = f"""
        import asyncio
        from weft.serving.config.settings import EngineConfig
        from weft.serving.engine.engine import AsyncEngine

        async def main():
            config = EngineConfig(model={config.model!r})
            engine = await AsyncEngine.start(config, runner_factory={SLOW!r})
            print("ready", flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (core,) = psutil.Process(parent.pid).children()
        os.kill(parent.pid, signal.SIGKILL)
        core.wait(timeout=60)


async def test_a_pause_of_the_machine_is_no_stall(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither process ran, so that no step was done says nothing."""
    clock = Clock()
    monkeypatch.setattr(core_client, "time", clock)
    async with started(replace(config, stall_timeout=300.0), runner_factory=SLOW) as engine:
        (core,), (process,) = engine._supervisor.cores, cores()
        process.suspend()
        before = core._last_progress
        clock.paused = 1000.0
        async with asyncio.timeout(60):
            while core._last_progress < before + clock.paused / 2:
                await asyncio.sleep(0.01)
        assert engine.status == "ready"
        process.resume()
        assert tokens(await collect(engine, PROMPT, params())) == expected(PROMPT, 20)


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        ("support.mock_runner:refuse", ConfigError, "--max-model-len is"),
        ("support.mock_runner:miss", ModelError, "no weights"),
    ],
)
async def test_start_raises_what_loading_raises(
    config: EngineConfig, in_process: bool, factory: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        await AsyncEngine.start(config, in_process=in_process, runner_factory=factory)
    assert not cores()


async def test_start_says_how_the_core_ended(config: EngineConfig) -> None:
    with pytest.raises(EngineError, match="exited with status 7 while it was loading"):
        await AsyncEngine.start(config, runner_factory="support.mock_runner:leave")


async def test_a_cancelled_start_leaves_no_process(config: EngineConfig) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await AsyncEngine.start(config, runner_factory="support.mock_runner:hang")
    assert not cores()
