"""A request's place in its grammar: what may come next, and when it may, must or cannot end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.engine.grammar import matcher as guide_module
from weft.serving.engine.grammar.matcher import MAX_SECONDS, SECONDS_A_TOKEN, GrammarMatcher

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


def allowed(guide: GrammarMatcher) -> list[int]:
    assert guide.mask.dtype == np.int32
    bits = np.unpackbits(guide.mask.view(np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


def test_each_token_changes_what_may_follow() -> None:
    guide = GrammarMatcher(Matcher([3, 31, 32], [5, END]), SIZE, [END])
    first = guide.mask
    assert allowed(guide) == [3, 31, 32]
    assert guide.advance(31) is None
    assert allowed(guide) == [5, END]
    assert first is not guide.mask, "a step under way may hold it"


def test_what_does_not_follow_is_an_error() -> None:
    guide = GrammarMatcher(Matcher([3], [5]), SIZE, [END])
    error = guide.advance(4)
    assert error is not None
    assert "token 4 does not follow" in error


def test_no_end_before_min_tokens_unless_nothing_else_can_come() -> None:
    guide = GrammarMatcher(Matcher([3, END], [3, END], [END]), SIZE, [END, OTHER_END], min_tokens=9)
    assert allowed(guide) == [3]
    guide.advance(3)
    assert allowed(guide) == [3]
    guide.advance(3)
    assert allowed(guide) == [END]


def test_with_ignore_eos_the_user_s_own_end_tokens_stay() -> None:
    steps = [3, END, OTHER_END], [END]
    guide = GrammarMatcher(Matcher(*steps), SIZE, [END, OTHER_END], unwanted=[END])
    assert allowed(guide) == [3, OTHER_END]
    guide.advance(3)
    assert allowed(guide) == [END]


def test_without_an_end_token_the_end_of_the_grammar_is_the_end() -> None:
    guide = GrammarMatcher(Matcher([3], []), SIZE, [])
    assert not guide.ended
    assert guide.advance(3) is None
    assert guide.ended


def test_a_dead_end_is_an_error() -> None:
    guide = GrammarMatcher(Matcher([3], [], completed=False), SIZE, [END])
    error = guide.advance(3)
    assert error is not None
    assert "no token of the model's" in error
    with pytest.raises(RequestError, match="no token of the model's"):
        GrammarMatcher(Matcher([], completed=False), SIZE, [END])


def test_a_fault_of_the_matcher_s_is_told() -> None:
    error = GrammarMatcher(FaultyMatcher([3]), SIZE, [END]).advance(3)
    assert error is not None
    assert "out of order" in error


def test_its_time_is_counted_over_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(guide_module.time, "thread_time", lambda: now)

    class SlowMatcher(Matcher):
        seconds = 0.0

        def accept_token(self, token: int) -> bool:
            nonlocal now
            now += self.seconds
            return super().accept_token(token)

    matcher = SlowMatcher([3])
    guide = GrammarMatcher(matcher, SIZE, [END])
    matcher.seconds = SECONDS_A_TOKEN
    assert all(guide.advance(3) is None for _ in range(1000))
    matcher.seconds = 0.9 * MAX_SECONDS
    assert guide.advance(3) is None
    matcher.seconds = 2 * SECONDS_A_TOKEN
    taken = sum(guide.advance(3) is None for _ in range(1000))
    assert taken == pytest.approx(0.1 * MAX_SECONDS / SECONDS_A_TOKEN, abs=2)
    matcher = SlowMatcher([3])
    guide = GrammarMatcher(matcher, SIZE, [END])
    matcher.seconds = 1.1 * MAX_SECONDS
    assert "less ambiguous" in str(guide.advance(3))
