"""Data-parallel attention: each instance has its own requests, and all run at the same time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mock_runner import END, MockRunner, expected

from weft.errors import RequestError
from weft.models.interface import Step
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, TokenOutput
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.dp_attention import DpAttentionScheduler
from weft.serving.engine.scheduler.scheduler import Scheduler

MAX_MODEL_LEN, BLOCK_SIZE, BUDGET = 40, 4, 9


def prompt_of(add: Add) -> list[int]:
    return np.frombuffer(add.prompt.tokens, np.int32).tolist()


class Engine:
    """Attention groups with a mock runner each, and up to two steps in flight."""

    def __init__(self, instances: int, num_blocks: int = 20, max_num_seqs: int = 3) -> None:
        self.caches = [
            BlockManager(num_blocks, BLOCK_SIZE, max_num_seqs, MAX_MODEL_LEN)
            for _ in range(instances)
        ]
        self.schedulers = [
            Scheduler(kv, max_num_batched_tokens=BUDGET, max_model_len=MAX_MODEL_LEN)
            for kv in self.caches
        ]
        self.scheduler = DpAttentionScheduler(self.schedulers)
        self.runners = [MockRunner(BLOCK_SIZE, seconds=0.0) for _ in range(instances)]
        for runner in self.runners:
            runner.allocate_kv_cache(num_blocks)
        self.under_way: deque[Step] = deque()
        self.adds: dict[str, Add] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}

    def add(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Add a request; returns the number of its attention group."""
        name = f"r{len(self.adds)}"
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        self.adds[name] = add = Add(name, pack_prompt(prompt, BLOCK_SIZE), params, (END,))
        self.outputs[name] = []
        self.scheduler.add(add)
        (instance,) = (i for i, scheduler in enumerate(self.schedulers) if scheduler.has(name))
        return instance

    def step(self) -> None:
        """Submit what can be, and take the oldest step in."""
        while len(self.under_way) < 2 and (step := self.scheduler.schedule()) is not None:
            self.under_way.append(step)
        if self.under_way:
            batches = zip(self.runners, self.under_way.popleft(), strict=True)
            result = tuple(batch and runner.step(batch) for runner, batch in batches)
            self.take(self.scheduler.finish(result))

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            seen = self.outputs[output.request_id]
            assert not seen or seen[-1].finish_reason is None, "an output after the last"
            seen.append(output)

    def run(self) -> None:
        while self.scheduler.live or self.under_way:
            self.step()

    def check(self) -> None:
        """Every request has ended, once and with what its prompt dictates."""
        for name, add in self.adds.items():
            got = [token for output in self.outputs[name] for token in output.token_ids]
            want = expected(prompt_of(add), add.params.max_tokens or 0)
            reason = self.outputs[name][-1].finish_reason
            assert reason in ("stop", "length", "abort")
            assert got == (want[: len(got)] if reason == "abort" else want), name
        for kv in self.caches:
            kv.check()
            assert kv.available == kv.total


prompts = st.lists(st.integers(1, 3), min_size=1, max_size=16)
requests = st.tuples(prompts, st.integers(1, 16))
actions = st.one_of(requests, st.integers(0, 30), st.just("step"))


@given(instances=st.integers(1, 3), script=st.lists(actions, max_size=30))
@settings(max_examples=60)
def test_every_request_ends_once_on_the_copy_with_the_fewest(
    instances: int, script: list[tuple[list[int], int] | int | str]
) -> None:
    engine = Engine(instances)
    for action in script:
        match action:
            case (prompt, max_tokens):
                before = [scheduler.count for scheduler in engine.schedulers]
                assert before[engine.add(prompt, max_tokens)] == min(before)
            case int():
                engine.take(engine.scheduler.abort([f"r{action}", "unknown"]))
            case _:
                engine.step()
        stats = engine.scheduler.stats()
        assert stats.running + stats.waiting == len(engine.scheduler.live)
        used = sum(kv.total - kv.available for kv in engine.caches)
        assert (stats.kv_blocks_used, stats.kv_blocks_total) == (used, 20 * instances)
    engine.run()
    engine.check()


def test_all_copies_work_at_one_time() -> None:
    engine = Engine(2)
    assert [engine.add([1 + i, 2, 3], 12) for i in range(6)] == [0, 1, 0, 1, 0, 1]
    engine.run()
    engine.check()
    alone = Engine(1, num_blocks=40, max_num_seqs=6)
    for i in range(6):
        alone.add([1 + i, 2, 3], 12)
    alone.run()
    computed = [runner.tokens_computed for runner in engine.runners]
    assert sum(computed) == alone.runners[0].tokens_computed
    assert max(computed) <= 0.6 * sum(computed)
    assert engine.scheduler.stats().steps == max(runner.steps for runner in engine.runners)


def test_a_copy_without_requests_has_nothing_to_do() -> None:
    engine = Engine(3)
    assert engine.scheduler.schedule() is None
    engine.add([1, 2, 3], 4)
    step = engine.scheduler.schedule()
    assert step is not None
    assert [batch is None for batch in step] == [False, True, True]


def test_a_prompt_goes_to_the_copy_that_has_its_beginning() -> None:
    engine = Engine(2)
    prompt = list(range(1, 13))
    assert engine.add([7] * 9, 2) == 0
    assert engine.add(prompt, 2) == 1
    engine.run()
    assert engine.add(prompt, 2) == 1
    engine.run()
    assert engine.outputs["r2"][0].cached_tokens == 8
    assert engine.scheduler.stats().prefix_hits == 8
    assert engine.add([9] * 9, 2) == 0, "the other one has computed more"
    assert engine.add(prompt, 2) == 1
    assert engine.add(prompt, 2) == 1, "nobody has fewer"
    assert engine.add(prompt, 2) == 0, "instance 1 has more to do"


def test_what_cannot_run_and_what_is_there_is_refused() -> None:
    engine = Engine(2)
    engine.add([1, 2, 3], 4)
    with pytest.raises(RequestError, match="at most 40"):
        engine.scheduler.add(
            Add("long", pack_prompt([1] * 40, None), SamplingParams(seed=0, max_tokens=1), ())
        )
    with pytest.raises(RequestError, match="'r0' is in use"):
        engine.scheduler.add(engine.adds["r0"])
    assert engine.scheduler.live == ("r0",)
