"""AsyncEngine: requests and their answers, with the core in a thread and in a process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.engine import (
    FAST,
    PROMPT,
    SLOW,
    collect,
    idle,
    params,
    started,
    text,
    tokens,
)
from support.mock_runner import (
    END,
    NOT_FINITE_TOKEN,
    VOCAB_SIZE,
    MockRunner,
    expected,
    logprob,
)

from weft.errors import RequestError
from weft.models.interface import StepInput, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.sampling_params import SamplingParams


@pytest.fixture
async def local(config: EngineConfig) -> AsyncIterator[AsyncEngine]:
    async with started(config, in_process=True, runner_factory=FAST) as engine:
        yield engine


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
    stream = engine.generate(engine.validate(PROMPT, params(max_tokens=400, stop_token_ids=())))
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
        assert allowed.acquire(timeout=60)
        return step(runner, batch)

    monkeypatch.setattr(MockRunner, "step", when_allowed)
    async with started(config, in_process=True, runner_factory=FAST) as engine:
        stream = engine.generate(engine.validate(PROMPT, params(max_tokens=400, stop_token_ids=())))
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
    stream = local.generate(local.validate(PROMPT, params(max_tokens=200, stop_token_ids=())))
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
    request = local.validate(np.array(PROMPT), SamplingParams(n=2))
    assert request.prompt_token_ids == PROMPT
    assert type(request.prompt_token_ids[0]) is int
    assert (request.params.max_tokens, request.params.n) == (512 - len(PROMPT), 1)
    assert request.params.seed is not None
    assert local.validate(PROMPT, request.params) == request
    assert local.validate(PROMPT, SamplingParams()).params.seed != request.params.seed


async def test_each_answer_has_its_own_seed(local: AsyncEngine) -> None:
    request = local.validate(PROMPT, params(seed=5))
    assert [request.answer(i).params.seed for i in range(3)] == [5, 6, 7]


async def test_an_embedding_takes_no_seed(local: AsyncEngine) -> None:
    before = local._seeds.getstate()
    local.validate(PROMPT, local.pooling)
    assert local._seeds.getstate() == before


async def test_a_request_that_the_kv_cache_cannot_hold_is_refused(config: EngineConfig) -> None:
    small = replace(config, kv_cache_memory=4 * 1024)  # 4 blocks of 8 tokens
    async with started(small, in_process=True, runner_factory=FAST) as engine:
        assert engine.validate(PROMPT, SamplingParams()).params.max_tokens == 33 - len(PROMPT)
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
