"""Scheduler, KV cache and batching: a step with 256 running requests, in microseconds.

A step is `schedule` and `finish`, two under way as in the engine core, and the
mock runner's microsecond between them. Where requests come and go, adding and
ending them is part of it, but making their random prompts is not. Where some have
a grammar, filling their masks is part of it. They decode in every other step; the
steps between decode the others alone.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from engine_parts.measure import Case
from engine_parts.mock import NUM_BLOCKS, VOCAB_SIZE, MockRunner
from weft.models.interface import StepInput
from weft.serving.engine.core import DEPTH
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.prefix_keys import Prompt, pack_prompt
from weft.serving.engine.protocol import Add
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.executor.child_process import settle_garbage_collector

if TYPE_CHECKING:
    import xgrammar

RUNNING = 256
BLOCK_SIZE = 16
BUDGET = 2048
MAX_MODEL_LEN = 32768
PROMPT = 512  # tokens of the requests that decode all the time
STEPS = 256  # measured in one go, so that these have 512 to some 850 tokens
WITH_GRAMMAR = 8
GOAL = 200.0


class Loop:
    """The engine core's loop, without its sockets.

    Attributes:
        untimed: seconds spent so far to make prompts, which the API process does in a server.

    Args:
        decoding: requests that decode all the time.
        next_prompt: makes the prompts of requests that come and go beside them, as many as there
            are steps in flight; each of them samples one token.
        matchers: grammar matchers of the first requests that decode all the time.
    """

    def __init__(
        self,
        decoding: int,
        next_prompt: Callable[[], Prompt] | None = None,
        matchers: Sequence[GrammarMatcher] = (),
    ) -> None:
        kv = BlockManager(NUM_BLOCKS, BLOCK_SIZE, RUNNING, MAX_MODEL_LEN)
        self._scheduler = Scheduler(kv, max_num_batched_tokens=BUDGET, max_model_len=MAX_MODEL_LEN)
        self._runner = MockRunner()
        self._next_prompt = next_prompt
        self._under_way: deque[StepInput] = deque()
        self._count = 0
        self.untimed = 0.0
        for matcher in (*matchers, *(None,) * (decoding - len(matchers))):
            self._add(random_prompt(PROMPT), MAX_MODEL_LEN - PROMPT, matcher)
        while self._scheduler.stats().waiting:
            self.step()
        for _ in range(2 * DEPTH):  # and the last prompt's first token
            self.step()
        if next_prompt is not None:
            for _ in range(RUNNING - decoding):
                self._add(next_prompt(), max_tokens=1)
            for _ in range(4 * DEPTH):
                self.step()
        stats = self._scheduler.stats()
        assert stats.running + stats.waiting == RUNNING, stats

    def step(self) -> None:
        """One turn of the loop."""
        while len(self._under_way) < DEPTH and (batch := self._scheduler.schedule()) is not None:
            self._under_way.append(batch)
        outputs = self._scheduler.finish(self._runner.step(self._under_way.popleft()))
        for output in outputs:
            if output.finish_reason is not None and self._next_prompt is not None:
                begin = time.perf_counter()
                prompt = self._next_prompt()
                self.untimed += time.perf_counter() - begin
                self._add(prompt, max_tokens=1)

    def _add(self, prompt: Prompt, max_tokens: int, matcher: GrammarMatcher | None = None) -> None:
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0)
        self._scheduler.add(Add(str(self._count), prompt, params, end_token_ids=()), matcher)


_random = np.random.default_rng(0)


def random_tokens(length: int) -> list[int]:
    """Return tokens that no other prompt begins with."""
    tokens: list[int] = _random.integers(0, VOCAB_SIZE, length).tolist()
    return tokens


def random_prompt(length: int) -> Prompt:
    """Return a prompt that begins like no other."""
    return pack_prompt(random_tokens(length), BLOCK_SIZE)


@contextmanager
def _collector_of_the_engine() -> Iterator[None]:
    """Within, garbage is collected as in the engine's process."""
    threshold = gc.get_threshold()
    settle_garbage_collector()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)


def _us_per_step(make_loop: Callable[[], Loop]) -> Callable[[float], float]:
    def run(seconds: float) -> float:
        steps, taken = 0, 0.0
        while taken < seconds:
            loop = make_loop()
            with _collector_of_the_engine():
                untimed = loop.untimed
                begin = time.perf_counter()
                for _ in range(STEPS):
                    loop.step()
                taken += time.perf_counter() - begin - (loop.untimed - untimed)
            steps += STEPS
        return taken / steps * 1e6

    return run


def _decodes() -> Loop:
    return Loop(RUNNING)


def _chunked_prefill() -> Loop:
    return Loop(RUNNING - DEPTH, lambda: random_prompt(4096))


def _prefix_hits() -> Loop:
    prefix = random_tokens(1024)

    def prompt() -> Prompt:
        return pack_prompt(prefix + random_tokens(BLOCK_SIZE), BLOCK_SIZE)

    return Loop(RUNNING - DEPTH, prompt)


@cache
def _grammar() -> xgrammar.CompiledGrammar:
    """Of texts as between the quotes of JSON."""
    import xgrammar

    words = [f"{'' if i % 2 else ' '}{i:x}".encode() for i in range(VOCAB_SIZE)]
    info = xgrammar.TokenizerInfo(words, xgrammar.VocabType.RAW, stop_token_ids=[0])
    return xgrammar.GrammarCompiler(info).compile_regex('[^"\\x00-\\x1f]*')


def _with_grammar() -> Loop:
    import xgrammar

    inner = [xgrammar.GrammarMatcher(_grammar()) for _ in range(WITH_GRAMMAR)]
    return Loop(RUNNING, matchers=[GrammarMatcher(matcher, VOCAB_SIZE, ()) for matcher in inner])


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    yield [
        Case(name, "us/step", _us_per_step(make_loop), at_most=GOAL)
        for name, make_loop in (
            ("256 decodes", _decodes),
            (f"256 decodes, {WITH_GRAMMAR} of them with a grammar", _with_grammar),
            ("254 decodes, chunks of 4,096-token prompts", _chunked_prefill),
            ("254 decodes, one new request, 1,024 of its 1,056 tokens cached", _prefix_hits),
        )
    ]
