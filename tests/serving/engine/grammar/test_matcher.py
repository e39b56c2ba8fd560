"""A request's place in its grammar: what may come next, and when it may, must or cannot end."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar import matcher as matcher_module
from weft.serving.engine.grammar.matcher import (
    MAX_SECONDS,
    SECONDS_A_TOKEN,
    GrammarMatcher,
    GrammarMatchers,
)
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, Compiled
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.tokenizer import load_tokenizer

END, OTHER_END, SIZE = 40, 41, 42


class Matcher:
    """Allows given tokens, step by step; the last ones for ever."""

    def __init__(self, *steps: Sequence[int], completed: bool = True) -> None:
        self._steps = list(steps)
        self._completed = completed

    def fill_next_token_bitmask(self, mask: Int32) -> bool:
        allowed = np.zeros(mask.shape[1] * 32, np.uint8)
        allowed[list(self._steps[0])] = 1
        mask[0] = np.packbits(allowed, bitorder="little").view(np.int32)
        return True

    def accept_token(self, token: int) -> bool:
        follows = token in self._steps[0]
        if len(self._steps) > 1:
            del self._steps[0]
        return follows

    def is_completed(self) -> bool:
        return self._completed


class FaultyMatcher(Matcher):
    def accept_token(self, token: int) -> bool:
        raise RuntimeError("out of order")


def allowed(matcher: GrammarMatcher) -> list[int]:
    assert matcher.mask.dtype == np.int32
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


def test_each_token_changes_what_may_follow() -> None:
    matcher = GrammarMatcher(Matcher([3, 31, 32], [5, END]), SIZE, [END])
    first = matcher.mask
    assert allowed(matcher) == [3, 31, 32]
    assert matcher.advance(31) is None
    assert allowed(matcher) == [5, END]
    assert first is not matcher.mask, "a step under way may hold it"


def test_what_does_not_follow_is_an_error() -> None:
    matcher = GrammarMatcher(Matcher([3], [5]), SIZE, [END])
    error = matcher.advance(4)
    assert error is not None
    assert "token 4 does not follow" in error


def test_no_end_before_min_tokens_unless_nothing_else_can_come() -> None:
    matcher = GrammarMatcher(
        Matcher([3, END], [3, END], [END]), SIZE, [END, OTHER_END], min_tokens=9
    )
    assert allowed(matcher) == [3]
    matcher.advance(3)
    assert allowed(matcher) == [3]
    matcher.advance(3)
    assert allowed(matcher) == [END]


def test_with_ignore_eos_the_user_s_own_end_tokens_stay() -> None:
    steps = [3, END, OTHER_END], [END]
    matcher = GrammarMatcher(Matcher(*steps), SIZE, [END, OTHER_END], unwanted=[END])
    assert allowed(matcher) == [3, OTHER_END]
    matcher.advance(3)
    assert allowed(matcher) == [END]


def test_without_an_end_token_the_end_of_the_grammar_is_the_end() -> None:
    matcher = GrammarMatcher(Matcher([3], []), SIZE, [])
    assert not matcher.ended
    assert matcher.advance(3) is None
    assert matcher.ended


def test_a_dead_end_is_an_error() -> None:
    matcher = GrammarMatcher(Matcher([3], [], completed=False), SIZE, [END])
    error = matcher.advance(3)
    assert error is not None
    assert "none of the model's tokens" in error
    with pytest.raises(RequestError, match="none of the model's tokens"):
        GrammarMatcher(Matcher([], completed=False), SIZE, [END])


def test_a_fault_in_xgrammar_is_reported() -> None:
    error = GrammarMatcher(FaultyMatcher([3]), SIZE, [END]).advance(3)
    assert error is not None
    assert "out of order" in error


def test_its_time_is_counted_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(matcher_module.time, "thread_time", lambda: now)

    class SlowMatcher(Matcher):
        seconds = 0.0

        def accept_token(self, token: int) -> bool:
            nonlocal now
            now += self.seconds
            return super().accept_token(token)

    slow = SlowMatcher([3])
    matcher = GrammarMatcher(slow, SIZE, [END])
    slow.seconds = SECONDS_A_TOKEN
    assert all(matcher.advance(3) is None for _ in range(1000))
    slow.seconds = 0.9 * MAX_SECONDS
    assert matcher.advance(3) is None
    slow.seconds = 2 * SECONDS_A_TOKEN
    taken = sum(matcher.advance(3) is None for _ in range(1000))
    assert taken == pytest.approx(0.1 * MAX_SECONDS / SECONDS_A_TOKEN, abs=2)
    slow = SlowMatcher([3])
    matcher = GrammarMatcher(slow, SIZE, [END])
    slow.seconds = 1.1 * MAX_SECONDS
    assert "less ambiguous" in str(matcher.advance(3))


def test_a_grammar_that_takes_long_to_compile_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig()
    matchers = GrammarMatchers(config, load_tokenizer(config).vocab_size)
    go = threading.Event()
    compile = GrammarMatchers._compile

    def held_up(self: GrammarMatchers, text: str) -> object:
        if "long" in text:
            go.wait()
        return compile(self, text)

    monkeypatch.setattr(GrammarMatchers, "_compile", held_up)
    try:
        made = []
        for text, slow in (("long", True), ("short", False)):
            form = {"type": "const_string", "value": text}
            tag = json.dumps({"type": "structural_tag", "format": form})
            matchers.keep(Compiled(text.encode(), tag, 1, slow))
            add = Add(text, pack_prompt([1], None), SamplingParams(), (), 0, 0.0, text.encode())
            made.append(matchers.make(add))
        assert allowed(made[1].result())
        assert not made[0].done()
        go.set()
        assert allowed(made[0].result())
    finally:
        go.set()
        matchers.close()
