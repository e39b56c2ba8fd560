"""Token filters: the mask after any output, against the rule said plainly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.engine.grammar.matcher import mask_of
from weft.serving.engine.grammar.token_filter import TokenFilter

SIZE = 37  # more bits than one word of a mask
END = 36
TOKENS = st.integers(0, 5)


def bits(mask: Int32) -> set[int]:
    assert mask.dtype == np.int32
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def only(*tokens: int) -> Int32:
    return mask_of(tokens, SIZE)


class Allows:
    """A matcher that always allows the same tokens."""

    def __init__(self, *tokens: int, ended: bool = False) -> None:
        self.mask = mask_of(tokens, SIZE)
        self.ended = ended

    def advance(self, token: int) -> str | None:
        return None if token in bits(self.mask) else f"not {token}"


def banned_after(output: Sequence[int], banned: Sequence[Sequence[int]]) -> set[int]:
    """The tokens that would complete a sequence."""
    return {each[-1] for each in banned if [*output, each[-1]][-len(each) :] == list(each)}


@given(
    banned=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=6),
    output=st.lists(TOKENS, max_size=12),
)
def test_no_sequence_is_completed(banned: list[list[int]], output: list[int]) -> None:
    filter = TokenFilter(SIZE, None, banned)
    for i, token in enumerate(output):
        assert bits(filter.mask) == set(range(SIZE)) - banned_after(output[:i], banned)
        filter.advance(token)
    assert bits(filter.mask) == set(range(SIZE)) - banned_after(output, banned)


def test_only_allowed_tokens() -> None:
    filter = TokenFilter(SIZE, only(3, 32), [[3, 32]])
    assert bits(filter.mask) == {3, 32}
    first = filter.mask
    assert filter.advance(3) is None
    assert bits(filter.mask) == {3}
    assert bits(first) == {3, 32}, "a step under way may hold it"


def test_no_end_before_min_tokens_unless_nothing_else_can_come() -> None:
    filter = TokenFilter(SIZE, only(3, END), [], [END], min_tokens=1)
    assert bits(filter.mask) == {3}
    filter.advance(3)
    assert bits(filter.mask) == {3, END}
    assert bits(TokenFilter(SIZE, only(END), [], [END], min_tokens=1).mask) == {END}
    filter = TokenFilter(SIZE, only(3, END), [[3, 3]], [END], min_tokens=5)
    assert filter.advance(3) is None
    assert bits(filter.mask) == {END}, "the bad word leaves only the end"


def test_with_a_grammar_both_hold() -> None:
    filter = TokenFilter(SIZE, only(1, 2, 3), [[3]], [END], 9, Allows(2, 3, 4))
    assert bits(filter.mask) == {2}
    assert not filter.ended
    assert filter.advance(2) is None
    assert filter.advance(5) == "not 5"
    assert TokenFilter(SIZE, only(1), [], matcher=Allows(1, ended=True)).ended


def test_nothing_can_follow() -> None:
    """The error names the request's fields."""
    with pytest.raises(RequestError, match=r"^allowed_token_ids and the grammar leave no token"):
        TokenFilter(SIZE, only(1), [], matcher=Allows(2))
    with pytest.raises(RequestError, match=r"^bad_words and the grammar leave no token"):
        TokenFilter(SIZE, None, [[2]], matcher=Allows(2))
    with pytest.raises(RequestError, match=r"^bad_words leaves no token that can follow$"):
        TokenFilter(SIZE, None, [[token] for token in range(SIZE)])
    filter = TokenFilter(SIZE, only(1), [[1, 1]])
    assert filter.advance(1) == "allowed_token_ids and bad_words leave no token that can follow"
