"""AsyncEngine on a mock model: the core in a thread, and as a real process that gets killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import pytest
from support.mock_runner import (
    CRASH_TOKEN,
    END,
    HANG_TOKEN,
    NOT_FINITE_TOKEN,
    VOCAB_SIZE,
    MockRunner,
    expected,
    logprob,
)
from support.tokenizers import write_byte_level

from weft.errors import ConfigError, EngineError, ModelError, RequestError
from weft.models.interface import StepInput, StepOutput
from weft.serving.config import EngineConfig
from weft.serving.engine import AsyncEngine, Delta
from weft.serving.sampling_params import SamplingParams

TESTS = Path(__file__).parent.parent
FAST = "support.mock_runner:load"
SLOW = "support.mock_runner:load_slowly"
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine process imports the mock from the tests."""
    monkeypatch.setenv("PYTHONPATH", str(TESTS))


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_byte_level(tmp_path)
    return EngineConfig(
        model=str(tmp_path), block_size=8, max_num_seqs=8, max_num_batched_tokens=64
    )


@pytest.fixture(params=[True, False], ids=["thread", "process"])
async def engine(
    request: pytest.FixtureRequest, config: EngineConfig
) -> AsyncIterator[AsyncEngine]:
    async with started(config, in_process=request.param, runner_factory=SLOW) as engine:
        yield engine


@pytest.fixture
async def local(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    async with started(config, in_process=True, runner_factory=FAST) as engine:
        yield engine


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
    engine: AsyncEngine, prompt: list[int] | str, wish: SamplingParams, **options: Any
) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt, wish, **options)]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def cores() -> list[psutil.Process]:
    """The engine processes of this one, whose children may also be other tests' servers."""
    children = psutil.Process().children()
    return [child for child in children if "weft.serving.engine_core" in child.cmdline()]


async def idle(engine: AsyncEngine) -> None:
    """Wait until the core has nothing left."""
    async with asyncio.timeout(10):
        while engine.stats.running or engine.stats.waiting or engine.stats.kv_blocks_used:
            await asyncio.sleep(0.01)


async def test_many_requests_at_once_get_their_own_answers(engine: AsyncEngine) -> None:
    prompts = [[1 + i % 9] * (1 + i * 3 % 50) for i in range(40)]
    answers = await asyncio.gather(*(collect(engine, p, params()) for p in prompts))
    for prompt, deltas in zip(prompts, answers, strict=True):
        want = expected(prompt, 20)
        assert tokens(deltas) == want
        assert deltas[-1].finish_reason == ("stop" if want[-1] == END else "length")
        assert deltas[-1].stop_reason == (END if want[-1] == END else None)
        kept = [t for t in want if t != END]
        assert text(deltas) == engine.tokenizer.decode(kept)
    await idle(engine)


async def test_text_prompts_are_encoded(local: AsyncEngine) -> None:
    prompt = "ABC" * 2000
    ids = local.tokenizer.encode(prompt)
    with pytest.raises(RequestError, match=f"{len(ids)} tokens; the context is 512"):
        await collect(local, prompt, params())
    deltas = await collect(local, "ABC", params())
    assert tokens(deltas) == expected(local.tokenizer.encode("ABC"), 20)


async def test_a_stop_string_ends_the_answer(engine: AsyncEngine) -> None:
    want = expected(PROMPT, 200, ends=())
    whole = engine.tokenizer.decode(want)
    stop = whole[50:53]
    wish = params(stop=(stop,), stop_token_ids=(), max_tokens=200)
    deltas = await collect(engine, PROMPT, wish)
    assert text(deltas) == whole[: whole.index(stop)]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert tokens(deltas) == want[: whole.index(stop) + 3]
    await idle(engine)
    assert engine.stats.generation_tokens < 200


async def test_stop_strings_wait_for_min_tokens(local: AsyncEngine) -> None:
    want = expected(PROMPT, 200, ends=())
    whole = local.tokenizer.decode(want)
    stop = whole[10]
    again = whole.index(stop, 30)
    wish = params(stop=(stop,), stop_token_ids=(), max_tokens=200, min_tokens=30)
    deltas = await collect(local, PROMPT, wish)
    assert text(deltas) == whole[:again]
    assert deltas[-1].stop_reason == stop


async def test_logprobs_come_with_their_tokens(local: AsyncEngine) -> None:
    deltas = await collect(local, PROMPT, params(logprobs=2, prompt_logprobs=1))
    answer = tokens(deltas)
    sequence = PROMPT + answer
    prompt = [x for d in deltas for x in d.prompt_logprobs or ()]
    output = [x for d in deltas for x in d.logprobs or ()]
    assert [x.token_id for x in prompt + output] == sequence[1:]
    for i, entry in enumerate(prompt + output, start=1):
        assert entry.logprob == pytest.approx(logprob(sequence[:i], sequence[i]))


async def test_a_prefix_hit_does_not_change_the_answer(local: AsyncEngine) -> None:
    prompt = [1 + i % 7 for i in range(100)]
    first = await collect(local, prompt, params())
    second = await collect(local, prompt, params())
    assert tokens(first) == tokens(second) == expected(prompt, 20)
    assert (first[-1].cached_tokens, second[-1].cached_tokens) == (0, 96)


async def test_closing_the_stream_frees_everything(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, params(max_tokens=400, stop_token_ids=()))
    async for _ in stream:
        break
    assert engine.stats.kv_blocks_used
    await stream.aclose()
    await idle(engine)
    assert engine.stats.generation_tokens < 400


async def test_after_the_stream_is_closed_no_more_than_one_step_counts(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner takes three steps, and waits in the next until the stream has been closed."""
    allowed = threading.Semaphore(3)
    step = MockRunner.step

    def when_allowed(runner: MockRunner, batch: StepInput) -> StepOutput:
        assert allowed.acquire(timeout=30)
        return step(runner, batch)

    monkeypatch.setattr(MockRunner, "step", when_allowed)
    async with started(config, in_process=True, runner_factory=FAST) as engine:
        stream = engine.generate(PROMPT, params(max_tokens=400, stop_token_ids=()))
        await anext(stream)
        await stream.aclose()
        allowed.release(1000)
        await idle(engine)
        assert engine.stats.generation_tokens <= 3 + 1


async def test_cancelling_the_reader_frees_everything(engine: AsyncEngine) -> None:
    wish = params(max_tokens=400, stop_token_ids=())
    reader = asyncio.create_task(collect(engine, PROMPT, wish))
    while not engine.stats.generation_tokens:
        await asyncio.sleep(0.01)
    reader.cancel()
    await asyncio.wait((reader,))
    await idle(engine)


async def test_wrong_types_are_refused_and_hurt_nobody(local: AsyncEngine) -> None:
    other = asyncio.create_task(collect(local, PROMPT, params(max_tokens=100, stop_token_ids=())))
    wrong: list[dict[str, Any]] = [
        {"stop": "END"},
        {"max_tokens": 10.0},
        {"seed": 1.0},
        {"temperature": True},
        {"logit_bias": {"1": 2.0}},
    ]
    for settings in wrong:
        with pytest.raises(RequestError, match="wrong type"):
            await collect(local, PROMPT, params(**settings))
    assert tokens(await other) == expected(PROMPT, 100, ends=())
    numpy_ids: Any = np.array(PROMPT)
    assert tokens(await collect(local, numpy_ids, params())) == expected(PROMPT, 20)


async def test_a_slow_reader_gets_all_in_one_delta(local: AsyncEngine) -> None:
    stream = local.generate(PROMPT, params(max_tokens=200, stop_token_ids=()))
    deltas = [await anext(stream)]
    await idle(local)
    deltas += [delta async for delta in stream]
    assert len(deltas) == 2
    assert tokens(deltas) == expected(PROMPT, 200, ends=())


async def test_when_the_core_is_ahead_tokens_arrive_merged(
    local: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front that does not get to run must not hand on one by one what has piled up."""
    made = threading.Event()
    step = MockRunner.step

    def stepping(self: MockRunner, batch: StepInput) -> StepOutput:
        if batch.output_index[0] == 19:
            made.set()
        return step(self, batch)

    monkeypatch.setattr(MockRunner, "step", stepping)
    reader = asyncio.create_task(collect(local, PROMPT, params(stop_token_ids=(), ignore_eos=True)))
    await asyncio.sleep(0)
    assert made.wait(60)  # the event loop stands still
    deltas = await reader
    assert [t for delta in deltas for t in delta.token_ids] == expected(PROMPT, 20, ends=())
    assert len(deltas) <= 5


async def test_one_bad_row_does_not_hurt_the_others(engine: AsyncEngine) -> None:
    prompts = [PROMPT, [1, NOT_FINITE_TOKEN, 2], [5, 4, 3]]
    good, bad, other = await asyncio.gather(*(collect(engine, p, params()) for p in prompts))
    assert (bad[-1].finish_reason, tokens(bad)) == ("error", [])
    assert bad[-1].error == "the model's output is not finite"
    assert tokens(good) == expected(prompts[0], 20)
    assert tokens(other) == expected(prompts[2], 20)


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, VOCAB_SIZE], {}, f"token {VOCAB_SIZE}"),
        ([-1], {}, "token -1"),
        ([2**70], {}, "token ids"),
        ([1.5], {}, "token ids"),
        ([1] * 512, {}, "the prompt has 512 tokens; the context is 512"),
        (PROMPT, {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias has token"),
        (PROMPT, {"stop_token_ids": (-1,)}, "stop_token_ids has token"),
        (PROMPT, {"min_tokens": 508, "max_tokens": None}, "room for 507"),
    ],
)
async def test_what_cannot_be_served_is_refused(
    local: AsyncEngine, prompt: list[int], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        local.validate(prompt, params(**settings))


async def test_validate_fills_in_what_is_missing(local: AsyncEngine) -> None:
    wish = local.validate(PROMPT, SamplingParams())
    assert wish.max_tokens == 512 - len(PROMPT)
    assert wish.seed is not None
    assert local.validate(PROMPT, wish) == wish
    assert local.validate(PROMPT, SamplingParams()).seed != wish.seed


async def test_a_request_that_the_kv_cache_cannot_hold_is_refused(config: EngineConfig) -> None:
    small = replace(config, kv_cache_memory=4 * 1024)  # 4 blocks of 8 tokens
    async with started(small, in_process=True, runner_factory=FAST) as engine:
        assert engine.validate(PROMPT, SamplingParams()).max_tokens == 33 - len(PROMPT)
        with pytest.raises(RequestError, match="KV cache holds 33"):
            engine.validate(PROMPT, params(max_tokens=29))
        deltas = await collect(engine, PROMPT, params(max_tokens=28, stop_token_ids=()))
        assert len(tokens(deltas)) == 28


async def test_a_full_queue_is_429(config: EngineConfig) -> None:
    small = replace(config, max_num_seqs=1, max_queue=2)
    async with started(small, in_process=True, runner_factory=SLOW) as engine:
        readers = [asyncio.create_task(collect(engine, PROMPT, params())) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await collect(engine, PROMPT, params())
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert all(tokens(deltas) for deltas in await asyncio.gather(*readers))
        assert await collect(engine, PROMPT, params())


async def test_shutdown_drains(engine: AsyncEngine) -> None:
    readers = [asyncio.create_task(collect(engine, [1 + i], params())) for i in range(12)]
    while not engine.stats.running:
        await asyncio.sleep(0.01)
    ending = asyncio.create_task(engine.shutdown(timeout=20))
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
    await asyncio.sleep(0.05)
    await engine.shutdown(drain=False, timeout=10)
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
        last = (await collect(engine, [CRASH_TOKEN], wish))[-1]
        assert last.finish_reason == "error"
        assert last.error == "the model runner failed: AssertionError: the runner crashed"
        assert (await reader)[-1].finish_reason == "error"
        async with asyncio.timeout(10):
            while engine.status != "dead":
                await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="dead"):
            await collect(engine, PROMPT, wish)


async def test_when_the_core_is_killed_all_streams_end(config: EngineConfig) -> None:
    async with started(config, runner_factory=SLOW) as engine:
        wish = params(max_tokens=400, stop_token_ids=())
        stream = engine.generate(PROMPT, wish)
        await anext(stream)
        (core,) = cores()
        core.kill()
        async with asyncio.timeout(10):
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
            with pytest.raises(EngineError, match="no step in 2 s"):
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
        from weft.serving.config import EngineConfig
        from weft.serving.engine import AsyncEngine

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
        core.wait(timeout=10)


def test_a_pause_of_the_machine_is_no_stall(config: EngineConfig) -> None:
    """Neither process ran, so that no step was done says nothing."""
    code = f"""
        import asyncio, sys
        from weft.serving.config import EngineConfig
        from weft.serving.engine import AsyncEngine
        from weft.serving.sampling_params import SamplingParams

        async def main():
            config = EngineConfig(model={config.model!r}, stall_timeout=2.0)
            engine = await AsyncEngine.start(config, runner_factory={SLOW!r})
            print("ready", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            params = SamplingParams(seed=0, max_tokens=20)
            tokens = [t async for d in engine.generate({PROMPT}, params) for t in d.token_ids]
            print(engine.status, len(tokens), flush=True)
            await engine.shutdown()

        asyncio.run(main())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as front:  # type: ignore[call-overload]
        assert front.stdout.readline() == "ready\n"
        (core,) = psutil.Process(front.pid).children()
        core.suspend()
        time.sleep(0.5)  # the front takes what the core has said
        psutil.Process(front.pid).suspend()
        time.sleep(2.5)  # the pause itself, longer than stall_timeout
        psutil.Process(front.pid).resume()
        time.sleep(0.5)  # the front finds that the core has said nothing for long
        core.resume()
        answer, _ = front.communicate("go\n", timeout=60)
        assert answer == f"ready {len(expected(PROMPT, 20))}\n"


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
    return [core.live for core in engine._cores]


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
    long = two.generate(PROMPT, params(**LONG))
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
        stream = engine.generate(PROMPT, params(**LONG))
        await anext(stream)
        (core,) = cores()
        how(config, "wait")
        core.kill()
        async with asyncio.timeout(10):
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
    config = replace(config, stall_timeout=1.0)
    async with started(config, runner_factory=SLOW, restart=True) as engine:
        with pytest.raises(EngineError) if token == HANG_TOKEN else nullcontext():
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
    streams = [two.generate(PROMPT, params(**LONG)) for _ in range(2)]
    for stream in streams:
        await anext(stream)
    how(config, "wait")
    lost = next(core for core in two._cores if core.live and core.latest == 0)
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
        streams = [engine.generate(PROMPT, params(**LONG)) for _ in range(2)]
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
        monkeypatch.setattr("weft.serving.core_client.CoreProcess.start", start)
        cores()[0].kill()
        async with asyncio.timeout(60):
            while engine.failure is None:
                await asyncio.sleep(0.01)
        assert str(error) in str(engine.failure)
        assert "it was started 3 times in vain" in str(engine.failure)
        assert start.await_count == 3
        assert engine.status == "dead"
    assert not cores()


async def test_machines_that_could_not_join_again_are_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--node-token is not given; with --restart it must be"):
        await AsyncEngine.start(replace(config, tp=2, nodes=2), restart=True)


async def test_a_core_that_does_not_get_ready_again_is_given_up(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.engine.SLOW_RELOAD", 0.0)
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
