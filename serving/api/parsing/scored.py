"""Splits an answer into pieces, and gives each content the log probabilities of its tokens.

A parser holds text back, and drops marks and the whitespace beside them. Its input comes here one
character at a time. After each character, the number of held-back characters says how far the
answer is settled, and the new pieces say whether the newly settled text is content.
"""

from __future__ import annotations

from collections import deque
from itertools import zip_longest
from typing import TYPE_CHECKING

from weft.serving.api.parsing.pieces import Content, Piece, merged

if TYPE_CHECKING:
    from weft.serving.api.parsing.parser import AnswerParser
    from weft.serving.engine.protocol import TokenLogprob
    from weft.serving.engine.request_stream import Delta


class ScoredParser:
    """A parser for one answer with log probabilities.

    A content gets the log probabilities of its tokens; a token beside a mark counts if a part of
    its text is content. Tokens without text, such as an end token, belong to a content before them.
    The other tokens of thoughts, calls and marks are dropped.

    Args:
        parser: splits the text.
    """

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
        self._tokens: deque[tuple[int, int, TokenLogprob]] = deque()  # with begin and end; waiting
        self._place = 0  # in the answer, in characters
        self._settled = 0
        self._in_content = False

    def push(self, delta: Delta) -> list[Piece]:
        """Take more of the answer; returns the certain pieces."""
        pieces: list[Piece] = []
        for text, logprob in zip_longest(delta.token_texts or (), delta.logprobs or ()):
            if logprob is not None:
                self._tokens.append((self._place, self._place + len(text), logprob))
            for char in text:
                self._place += 1
                pieces += self._scored(self._parser.push(char), self._place - self._parser.held)
        return merged(pieces)

    def flush(self) -> list[Piece]:
        """End the answer, once, after the last push; returns the held-back pieces."""
        pieces = self._scored(self._parser.flush(), self._place)
        if self._in_content and self._tokens:
            pieces.append(Content("", tuple(logprob for _, _, logprob in self._tokens)))
        return pieces

    def _scored(self, pieces: list[Piece], settled: int) -> list[Piece]:
        """Add log probabilities to the pieces, with which the text is settled up to a place."""
        found: list[Piece] = []
        for piece in pieces:
            self._in_content = isinstance(piece, Content)
            if isinstance(piece, Content):
                # Whitespace may be dropped with it, or a line end added.
                self._drop(max(self._settled, settled - len(piece.text)))
                piece = Content(piece.text, self._take(settled))
            found.append(piece)
        self._drop(settled)
        self._settled = max(self._settled, settled)
        return found

    def _take(self, end: int) -> tuple[TokenLogprob, ...]:
        taken = []
        while self._tokens and self._tokens[0][0] < end:
            taken.append(self._tokens.popleft()[2])
        return tuple(taken)

    def _drop(self, end: int) -> None:
        while self._tokens and self._tokens[0][0] < end >= self._tokens[0][1]:
            self._tokens.popleft()
