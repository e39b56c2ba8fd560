"""The scheduler under random use: each request gets the tokens that its own prompt dictates."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.mock_runner import (
    END,
    NOT_FINITE_TOKEN,
    VOCAB_SIZE,
    MockRunner,
    expected,
    hidden_state,
    logprob,
)

from weft.errors import RequestError
from weft.models.interface import FINITE, Int32, StepInput, StepOutput
from weft.models.spec.pooling import PoolingKind
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, TokenOutput
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.counters import Counters
from weft.serving.engine.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 40
T = TypeVar("T")


def make_add(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int,
    priority: int = 0,
    pooling: PoolingKind | None = None,
    *,
    block_size: int | None = 4,
    **params: Any,
) -> Add:
    return Add(
        request_id=request_id,
        prompt=pack_prompt(prompt, block_size),
        params=SamplingParams(**({"seed": 0} | params), max_tokens=max_tokens),
        end_token_ids=(END,),
        priority=priority,
        pooling=pooling,
    )


def prompt_of(add: Add) -> list[int]:
    return np.frombuffer(add.prompt.tokens, np.int32).tolist()


def embedding(prompt: Sequence[int], pooling: PoolingKind) -> list[float]:
    """What a request with that prompt must get."""
    states = [hidden_state(prompt[: i + 1]) for i in range(len(prompt))]
    wanted = np.mean(states, axis=0) if pooling == "mean" else states[-1]
    return wanted.astype(np.float32).tolist()


class Script:
    """A matcher for which only these tokens follow each other."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = deque(tokens)

    def fill_next_token_bitmask(self, mask: Int32) -> None:
        allowed = np.zeros(VOCAB_SIZE, np.uint8)
        allowed[self._tokens[0]] = 1
        mask[0] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept_token(self, token: int) -> bool:
        return token == self._tokens.popleft()


class Engine:
    """A scheduler and a mock runner, with up to `depth` steps under way."""

    def __init__(
        self,
        *,
        num_blocks: int = 12,
        block_size: int = 4,
        max_num_seqs: int = 4,
        budget: int = 9,
        depth: int = 2,
        prefix_caching: bool = True,
        worth_waiting: int = 512,
        stages: int = 1,
    ) -> None:
        self.kv = BlockManager(num_blocks, block_size, max_num_seqs, MAX_MODEL_LEN)
        self.scheduler = Scheduler(
            self.kv,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            prefix_caching=prefix_caching,
            worth_waiting=worth_waiting,
            stages=stages,
        )
        self.runner = MockRunner(block_size)
        self.runner.allocate_kv_cache(num_blocks)
        self.budget = budget
        self.depth = depth
        self.stages = stages
        self.under_way: deque[StepInput] = deque()
        self.adds: dict[str, Add] = {}
        self.outputs: dict[str, list[TokenOutput]] = {}

    def add(self, add: Add, *, constrained: bool = False) -> None:
        matcher = None
        if constrained:
            seed = add.params.seed or 0
            script = Script(expected(prompt_of(add), MAX_MODEL_LEN, seed=seed))
            matcher = GrammarMatcher(script, VOCAB_SIZE, add.end_token_ids)
        self.scheduler.add(add, matcher)
        self.adds[add.request_id] = add
        self.outputs[add.request_id] = []

    def abort(self, *request_ids: str) -> None:
        self._take(self.scheduler.abort(request_ids))

    def submit(self) -> bool:
        if len(self.under_way) == self.depth:
            return False
        batch = self.scheduler.schedule()
        if batch is None:
            return False
        assert 0 < len(batch.token_ids) <= self.budget
        names = set((-1 - batch.token_ids[batch.token_ids < 0]).tolist())
        for step in list(self.under_way)[1 - self.stages :] if self.stages > 1 else ():
            assert names.isdisjoint(step.sample_slot.tolist()), "a stage would wait for a token"
        self.under_way.append(batch)
        return True

    def finish(self) -> None:
        batch = self.under_way.popleft()
        result = self.runner.step(batch)
        for row, mask in zip(batch.masked.tolist(), batch.token_mask, strict=True):
            if result.status[row] == FINITE:
                bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
                assert np.flatnonzero(bits).tolist() == [result.token_ids[row]], "another's mask"
        self._take(self.scheduler.finish(result))

    def step(self) -> None:
        while self.submit():
            pass
        if self.under_way:
            self.finish()

    def run(self, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.live and not self.under_way:
                return
            self.step()
        pytest.fail(f"{self.scheduler.live} did not finish in {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs[request_id] for t in output.token_ids]

    def _take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            seen = self.outputs[output.request_id]
            assert not seen or seen[-1].finish_reason is None, "an output after the last"
            seen.append(output)
            if output.finish_reason is not None:
                self.check_answer(output.request_id)

    def check_answer(self, request_id: str) -> None:
        add, outputs = self.adds[request_id], self.outputs[request_id]
        assert add.params.max_tokens is not None
        prompt, got = prompt_of(add), self.tokens(request_id)
        room = MAX_MODEL_LEN - len(prompt)
        want = expected(prompt, min(add.params.max_tokens, room), seed=add.params.seed or 0)
        last = outputs[-1]
        if NOT_FINITE_TOKEN in prompt:
            assert (last.finish_reason, got) in (("error", []), ("abort", []))
            return
        if add.pooling is not None:
            assert not got
            if last.finish_reason != "abort":
                assert last.finish_reason == "stop"
                assert last.embedding is not None
                vector = np.frombuffer(last.embedding, np.float32).tolist()
                assert vector == embedding(prompt, add.pooling)
            return
        if last.finish_reason == "abort":
            assert got == want[: len(got)]
            return
        assert got == want
        assert last.finish_reason == ("stop" if got[-1] == END else "length")
        assert last.stop_token_id == (END if got[-1] == END else None)
        self._check_logprobs(add, outputs, got)

    def _check_logprobs(self, add: Add, outputs: list[TokenOutput], got: list[int]) -> None:
        text = prompt_of(add) + got
        chosen = [x for output in outputs for x in output.logprobs or []]
        if add.params.logprobs is None:
            assert not chosen
        else:
            begin = len(prompt_of(add))
            assert [x.token_id for x in chosen] == got
            for i, entry in enumerate(chosen, start=begin):
                assert entry.logprob == pytest.approx(logprob(text[:i], text[i]))
                assert len(entry.top) == add.params.logprobs
        if add.params.prompt_logprobs is not None:
            scored = outputs[0].prompt_logprobs
            assert scored is not None
            assert [x.token_id for x in scored] == prompt_of(add)[1:]
            for i, entry in enumerate(scored, start=1):
                assert entry.logprob == pytest.approx(logprob(text[:i], text[i]))
                assert len(entry.top) == add.params.prompt_logprobs
        assert all(output.prompt_logprobs is None for output in outputs[1:])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        depth=st.integers(1, 3),
        stages=st.integers(1, 3),
        budget=st.sampled_from([2, 5, 9, 64]),
        num_blocks=st.sampled_from([10, 12, 20]),
        prefix_caching=st.booleans(),
        worth_waiting=st.sampled_from([4, 8, 512]),
    )
    def start(self, **settings: Any) -> None:
        self.engine = Engine(**settings)
        self.count = 0

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=20),
        shared=st.integers(0, 12),
        max_tokens=st.integers(1, 30),
        priority=st.integers(0, 1),
        logprobs=st.sampled_from([None, None, 0, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        seed=st.integers(0, 1),
        bad=st.sampled_from([False] * 9 + [True]),
        constrained=st.sampled_from([False, False, True]),
        pooling=st.sampled_from([None, None, "mean", "last"]),
    )
    def add(
        self,
        prompt: list[int],
        shared: int,
        max_tokens: int,
        priority: int,
        bad: bool,
        constrained: bool,
        pooling: PoolingKind | None,
        **params: Any,
    ) -> None:
        self.count += 1
        tokens = [1] * shared + prompt + ([NOT_FINITE_TOKEN] if bad else [])
        if pooling is not None:
            constrained, params = False, {}
        add = make_add(f"r{self.count}", tokens, max_tokens, priority, pooling, **params)
        self.engine.add(add, constrained=constrained)

    @precondition(lambda self: self.engine.outputs)
    @rule(data=st.data(), more=st.lists(st.integers(1, 2), min_size=1, max_size=3))
    def follow_up(self, data: st.DataObject, more: list[int]) -> None:
        """A prompt that goes on from what another request has so far."""
        name = data.draw(st.sampled_from(sorted(self.engine.outputs)))
        tokens = prompt_of(self.engine.adds[name]) + self.engine.tokens(name) + more
        if len(tokens) < MAX_MODEL_LEN:
            self.count += 1
            self.engine.add(make_add(f"r{self.count}", tokens, 4))

    @precondition(lambda self: self.engine.scheduler.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.engine.scheduler.live)), "unknown")

    @rule()
    def submit(self) -> None:
        self.engine.submit()

    @precondition(lambda self: self.engine.under_way)
    @rule()
    def finish(self) -> None:
        self.engine.finish()

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @invariant()
    def intact(self) -> None:
        if not hasattr(self, "engine"):
            return
        kv = self.engine.kv
        kv.check()
        held = {b for row, n in zip(kv.table, kv.num_blocks, strict=True) for b in row[:n].tolist()}
        for batch in self.engine.under_way:
            for row, length in zip(batch.block_table, batch.context_len.tolist(), strict=True):
                assert held.issuperset(row[: kv.blocks_for(length)].tolist()), "freed under way"

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert self.engine.kv.available == self.engine.kv.total
        stats = self.engine.scheduler.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        self.engine.kv.check()
        super().teardown()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(TestScheduler.settings, max_examples=60, stateful_step_count=40)


def test_a_shared_prefix_is_computed_once() -> None:
    engine = Engine(num_blocks=40, budget=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add(make_add("a", prompt, 4))
    engine.run()
    before = engine.runner.tokens_computed
    engine.add(make_add("b", prompt, 4))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 8
    assert engine.outputs["a"][0].cached_tokens == 0
    assert engine.runner.tokens_computed - before <= 1 + 4
    assert engine.tokens("a") == engine.tokens("b")
    assert engine.scheduler.stats().prefix_hits == 8


@pytest.mark.parametrize(("stages", "users"), [(2, 2), (2, 7), (4, 5), (4, 16), (3, 2), (4, 1)])
def test_decodes_take_turns_so_that_no_stage_idles(stages: int, users: int) -> None:
    """As many steps as can be are under way, of equal size, and nobody waits for long."""
    engine = Engine(num_blocks=160, max_num_seqs=16, budget=64, stages=stages, depth=stages + 1)
    prompts = ([i, 2, 3] for i in range(1, 61))
    for prompt in islice((p for p in prompts if END not in expected(p, 36)), users):
        engine.add(make_add(f"r{prompt[0]}", prompt, 36))
        engine.step()
    for _ in range(2 * stages):
        engine.step()
    steps = []
    for _ in range(6 * stages):
        engine.step()
        while engine.submit():
            pass
        steps.append(set(engine.under_way[-1].slot.tolist()))
        assert len(engine.under_way) == (stages + 1 if users >= stages else users)
    if users >= stages:
        assert {len(step) for step in steps} <= {users // stages, -(-users // stages)}
        for i in range(len(steps) - stages):
            assert set().union(*steps[i : i + stages]) == set(range(users))
    engine.run()


def test_nobody_is_passed_over_where_each_step_is_back_before_the_next() -> None:
    engine = Engine(num_blocks=160, max_num_seqs=16, budget=64, stages=3, depth=1)
    prompts = ([i, 2, 3] for i in range(1, 61))
    for prompt in islice((p for p in prompts if END not in expected(p, 36)), 9):
        engine.add(make_add(f"r{prompt[0]}", prompt, 36))
    for _ in range(12):
        engine.step()
        counts = [len(engine.tokens(name)) for name in engine.adds]
        assert max(counts) - min(counts) <= 1
    assert min(counts) >= 4


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    engine = Engine(num_blocks=40, budget=4, stages=3, depth=4)
    engine.add(make_add("a", range(1, 17), 4))
    assert [engine.submit() for _ in range(5)] == [True] * 4 + [False]
    engine.finish()
    assert not engine.submit(), "its first token is under way"
    engine.run()
    assert engine.tokens("a") == expected(range(1, 17), 4)


def test_a_request_whose_turn_it_is_but_finds_no_block_lets_others_on() -> None:
    engine = Engine(num_blocks=10, max_num_seqs=2, budget=32, stages=2, depth=3)
    engine.add(make_add("a", [1, 2, 3], 30))
    engine.add(make_add("b", [4, 5, 6], 30))
    engine.run()
    assert engine.scheduler.stats().preemptions <= 1


def test_prompts_that_come_together_and_start_alike_are_computed_once() -> None:
    prompt = list(range(1, 31))
    for worth_waiting, computed in ((28, 30 + 3 * 2), (32, 4 * 30)):
        engine = Engine(num_blocks=40, budget=64, worth_waiting=worth_waiting)
        for i in range(4):
            engine.add(make_add(f"r{i}", prompt, 1, seed=i))
        engine.run()
        assert engine.runner.tokens_computed == computed


def test_nobody_waits_for_a_prompt_that_will_not_come() -> None:
    engine = Engine(num_blocks=40, budget=8, worth_waiting=8)
    for name in ("a", "b"):
        engine.add(make_add(name, [1] * 30, 1))
    engine.submit()
    engine.abort("a")
    engine.run()
    assert engine.tokens("b") == expected([1] * 30, 1)


def test_an_answer_is_shared_but_for_its_last_token_which_is_never_computed() -> None:
    engine = Engine(num_blocks=40, budget=64)
    prompt = [1, 2, 3, 4, 5]
    engine.add(make_add("a", prompt, 7))
    engine.run()
    turn = prompt + engine.tokens("a")
    assert len(turn) == 12
    engine.add(make_add("b", [*turn, 1, 2], 4))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 8


def test_a_slot_forgets_the_request_before() -> None:
    engine = Engine(num_blocks=40, budget=64, max_num_seqs=1)
    for name, prompt in (("long", [1] * 30), ("short", [2] * 9), ("again", [2] * 9)):
        engine.add(make_add(name, prompt, 1))
        engine.run()
    assert engine.outputs["again"][0].cached_tokens == 8


def test_the_last_prompt_token_is_always_computed() -> None:
    engine = Engine(num_blocks=40, budget=64)
    for name in ("a", "b"):
        engine.add(make_add(name, [1, 2, 3, 4, 5, 6, 7, 8], 1))
        engine.run()
    assert engine.outputs["b"][0].cached_tokens == 4


@pytest.mark.features("prompt_logprobs", "prefix_cache")
def test_prompt_logprobs_skip_the_prefix_cache() -> None:
    engine = Engine(num_blocks=40, budget=64)
    engine.add(make_add("a", [1, 2, 3, 4, 5, 6], 1))
    engine.run()
    engine.add(make_add("b", [1, 2, 3, 4, 5, 6], 1, prompt_logprobs=1))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 0


@pytest.mark.features("embeddings", "prefix_cache")
@pytest.mark.parametrize(("pooling", "cached"), [("mean", 0), ("last", 8)])
def test_an_embedding_takes_from_the_prefix_cache_what_it_does_not_need(
    pooling: PoolingKind, cached: int
) -> None:
    engine = Engine(num_blocks=40, budget=64)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    engine.add(make_add("a", prompt, 1))
    engine.run()
    engine.add(make_add("b", prompt, 1, pooling=pooling))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == cached


def test_an_embedding_fills_the_context_in_chunks_and_others_find_its_blocks() -> None:
    engine = Engine(num_blocks=20, budget=7)
    prompt = [1 + i % 5 for i in range(MAX_MODEL_LEN)]
    engine.add(make_add("a", prompt, 1, pooling="mean"))
    engine.run()
    engine.add(make_add("b", prompt[:20], 4))
    engine.run()
    assert engine.outputs["b"][0].cached_tokens == 16
    with pytest.raises(RequestError, match="the prompt has 41 tokens"):
        engine.add(make_add("c", [*prompt, 1], 1, pooling="mean"))


@pytest.mark.features("embeddings", "preemption")
def test_hidden_states_are_summed_once_even_if_preempted_half_way() -> None:
    engine = Engine(num_blocks=10, budget=2)
    engine.add(make_add("a", [1, 2, 3], 30))
    engine.add(make_add("b", range(1, 21), 1, pooling="mean"))
    while not engine.scheduler.stats().preemptions:
        engine.step()
    engine.run()  # which checks the answers
    assert engine.scheduler.stats().preemptions > 0


@pytest.mark.features("prompt_logprobs", "preemption")
def test_prompt_tokens_are_scored_once_even_if_preempted_half_way() -> None:
    engine = Engine(num_blocks=10, budget=2)
    engine.add(make_add("a", [1, 2, 3], 30))
    engine.add(make_add("b", range(1, 21), 4, prompt_logprobs=1))
    while not engine.scheduler.stats().preemptions:
        assert not engine.tokens("b"), "still in its prompt"
        engine.step()
    engine.run()
    scored = engine.outputs["b"][0].prompt_logprobs
    assert scored is not None
    assert len(scored) == 19


@pytest.mark.parametrize("budget", [64, 4])
def test_what_a_failed_request_wrote_is_not_shared(budget: int) -> None:
    engine = Engine(num_blocks=40, budget=budget)
    for name in ("a", "b"):
        engine.add(make_add(name, [1, 2, 3, 4, NOT_FINITE_TOKEN, 6, 7, 8, 9], 4))
        engine.run()
        assert engine.outputs[name][0].error == "the model's output is not finite"
        assert engine.outputs[name][0].cached_tokens == 0


def test_preempted_requests_finish_and_the_first_is_never_preempted() -> None:
    engine = Engine(num_blocks=10, max_num_seqs=8, budget=32, depth=2)
    for i in range(8):
        engine.add(make_add(f"r{i}", [1 + i, 2, 3], 30))
    order = []
    moves = []
    while engine.scheduler.live:
        live = engine.scheduler.live
        engine.step()
        moves += engine.scheduler.take_moves()
        order += [name for name in live if name not in engine.scheduler.live]
    stats = engine.scheduler.stats()
    for name in engine.adds:
        running = [move.running for move in moves if move.request_id == name]
        assert running[0]
        assert all(a != b for a, b in pairwise(running))
    assert sum(not move.running for move in moves) == stats.preemptions
    assert 0 < stats.preemptions <= 12, "17 when nothing is kept to spare at admission"
    full = [name for name in order if len(engine.tokens(name)) == 30]
    assert full == sorted(full), "first come, first served"


def test_lower_priority_numbers_come_first() -> None:
    engine = Engine(max_num_seqs=1)
    for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
        engine.add(make_add(name, [1, 2], 3, priority))
    first = []
    while engine.scheduler.live:
        live = engine.scheduler.live
        engine.step()
        first += [name for name in live if name not in engine.scheduler.live]
    assert first == ["high", "middle", "low"]


def test_a_long_prompt_does_not_hold_up_decodes() -> None:
    engine = Engine(num_blocks=40, budget=4, depth=1)
    engine.add(make_add("short", [1], 20))
    engine.step()
    engine.add(make_add("long", range(1, 31), 1))
    for _ in range(6):
        before = len(engine.tokens("short"))
        engine.step()
        assert len(engine.tokens("short")) == before + 1


def test_no_row_is_wasted_when_the_length_ends_a_request() -> None:
    engine = Engine(num_blocks=40, budget=64, depth=3)
    engine.add(make_add("a", [1, 2, 3], 5))
    engine.run()
    assert engine.tokens("a") == expected([1, 2, 3], 5)
    assert engine.runner.tokens_computed == 3 + 4


def test_only_requests_with_a_grammar_wait_for_their_token() -> None:
    engine = Engine(num_blocks=40, budget=64, depth=2)
    engine.add(make_add("free", [1, 2, 3], 20))
    engine.add(make_add("constrained", [4, 5, 6], 20), constrained=True)
    rows = []
    for _ in range(6):
        while engine.submit():
            rows.append(len(engine.under_way[-1].slot))
        engine.finish()
    assert rows == [2, 1, 2, 1, 2, 1, 2]
    engine.run()


def test_what_its_grammar_does_not_allow_ends_a_request_alone() -> None:
    engine = Engine(num_blocks=40, budget=64, depth=2)
    engine.add(make_add("good", [1, 2, 3], 8), constrained=True)
    engine.add(make_add("bad", [4, 5, 6], 8))
    wrong = [token + 1 for token in expected([4, 5, 6], 8)]
    engine.scheduler._live["bad"].matcher = GrammarMatcher(Script(wrong), VOCAB_SIZE, [END])
    batch = engine.scheduler.schedule()
    assert batch is not None
    outputs = engine.scheduler.finish(engine.runner.step(batch))
    engine._take(output for output in outputs if output.request_id == "good")
    (failed,) = [output for output in outputs if output.finish_reason == "error"]
    assert failed.request_id == "bad"
    assert failed.error is not None
    assert "does not follow in the grammar" in failed.error
    assert [output.request_id for output in outputs if not output.error] == ["good"]
    while "good" in engine.scheduler.live:
        engine.step()
    assert engine.kv.available == engine.kv.total


def test_an_aborted_request_frees_its_blocks_once_its_steps_are_back() -> None:
    engine = Engine(num_blocks=40, budget=64, depth=2)
    engine.add(make_add("a", range(1, 20), 20))
    engine.submit()
    engine.submit()
    engine.abort("a")
    assert engine.outputs["a"][-1].finish_reason == "abort"
    assert engine.kv.available < engine.kv.total
    engine.finish()
    engine.finish()
    assert engine.kv.available == engine.kv.total


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "at least 1"),
        (range(MAX_MODEL_LEN), 1, "at most 40"),
        ([1], 39, "10 blocks of the KV cache, which has 8"),
    ],
)
def test_what_can_never_run_is_refused(
    prompt: Sequence[int], max_tokens: int, message: str
) -> None:
    engine = Engine(num_blocks=8)
    with pytest.raises(RequestError, match=message):
        engine.add(make_add("a", prompt, max_tokens))
    assert engine.scheduler.live == ()


def decode_step_bytecodes(running: int) -> tuple[int, int]:
    """Bytecodes that scheduling and finishing one step of decodes take."""
    kv = BlockManager(running * 2, 32, running, 64)
    scheduler = Scheduler(kv, max_num_batched_tokens=8192, max_model_len=64)
    for i in range(running):
        scheduler.add(make_add(str(i), range(1, 9), 20, block_size=None))
    while scheduler.stats().waiting or scheduler.stats().steps < 3:
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.finish(_answer(batch))
    batch, scheduling = _bytecodes(scheduler.schedule)
    assert batch is not None
    assert len(batch.token_ids) == len(batch.sample_slot) == running
    outputs, finishing = _bytecodes(lambda: scheduler.finish(_answer(batch)))
    assert len(outputs) == running
    return scheduling, finishing


def _answer(batch: StepInput) -> StepOutput:
    count = len(batch.sample_slot)
    return StepOutput(batch.step, np.ones(count, np.int32), np.full(count, FINITE, np.int32))


def _bytecodes(call: Callable[[], T]) -> tuple[T, int]:
    """A call's result, and how many bytecodes it took, in all that it calls."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for one before it traces any
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
    return result, count


def test_a_step_of_decodes_takes_no_python_per_request_to_schedule() -> None:
    few, more, many = (decode_step_bytecodes(running) for running in (16, 64, 256))
    assert few[0] == more[0] == many[0] > 0
    assert (many[1] - more[1]) / (256 - 64) == (more[1] - few[1]) / (64 - 16)


def test_rows_for_experts_are_summed_over_steps_and_engines() -> None:
    counters = Counters()
    for rows in ((3.0, 2.0), (0.0, 0.0), (5.0, 4.5)):
        counters.finish(StepOutput(0, expert_rows=rows))
    stats = counters.stats(running=0, waiting=0, blocks_used=0, blocks=1)
    both = stats + stats.counted()
    assert (both.busiest_expert_rows, both.mean_expert_rows) == (16.0, 13.0)
