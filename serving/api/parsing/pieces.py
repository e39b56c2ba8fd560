"""An answer and its pieces: content, reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from weft.serving.api.openai.replies import FinishReason
    from weft.serving.engine.protocol import TokenLogprob


class Content(Struct, frozen=True, gc=False):
    """More text for the user.

    `logprobs` are those of the text's tokens, if the request asks for them beside the text.
    """

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


class Reasoning(Struct, frozen=True, gc=False):
    """More of the model's thought before its answer."""

    text: str


class CallStart(Struct, frozen=True, gc=False):
    """The start of a function call."""

    name: str


class Arguments(Struct, frozen=True, gc=False):
    """More arguments for the last call: JSON, if the model made no mistake."""

    text: str


Piece = Content | Reasoning | CallStart | Arguments


class Call(Struct):
    """A function call; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


class Answer(Struct):
    """One answer to a request, or a new part.

    Attributes:
        pieces: the text, split by a parser; may be empty.
        index: number of the answer within its request, from 0.
        token_ids: the sampled tokens.
        logprobs: one per token, when asked for.
        prompt_logprobs: on the first part, when asked for.
        finish_reason: on the last part; None before.
        stop_reason: the stop string or the user's stop token that ended the answer.
    """

    pieces: list[Piece]
    index: int = 0
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    @property
    def content(self) -> str:
        """The text for the user."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))

    @property
    def reasoning(self) -> str:
        """The model's thought."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Reasoning))

    @property
    def calls(self) -> list[Call]:
        """The function calls, in their order."""
        calls: list[Call] = []
        for piece in self.pieces:
            if isinstance(piece, CallStart):
                calls.append(Call(piece.name))
            elif isinstance(piece, Arguments):
                calls[-1].arguments += piece.text
        return calls


def merged(pieces: list[Piece]) -> list[Piece]:
    """Join neighbours of the same type, and omit empty pieces."""
    if len(pieces) == 1 and isinstance(pieces[0], Content):  # nearly always
        return pieces if pieces[0].text else []
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallStart:
            found.extend(group)
            continue
        same = [piece for piece in group if not isinstance(piece, CallStart)]
        scores = (piece.logprobs for piece in same if isinstance(piece, Content))
        if text := "".join(piece.text for piece in same):
            logprobs = tuple(chain.from_iterable(scores))
            found.append(Content(text, logprobs) if kind is Content else kind(text))
    return found


def split_at(text: str, mark: str, other: str = "") -> tuple[str, str, str | None]:
    """Look for a mark in a growing text, which may end with only the mark's beginning.

    Args:
        text: the text.
        mark: the mark.
        other: another mark. It ends the text before, and stays in the text after; empty for none.

    Returns:
        The text before the mark, the whitespace between that text and the mark, and the text after
        the mark. If the mark is missing, the third is None, and the second is the end of the text
        that must wait for more: whitespace, and a possible beginning of the mark.
    """
    places = [(text.find(mark), len(mark)), (text.find(other) if other else -1, 0)]
    if found := [place for place in places if place[0] >= 0]:
        at, size = min(found)
        before = text[:at].rstrip()
        return before, text[len(before) : at], text[at + size :]
    begun = max(overlap(text, mark), overlap(text, other))
    before = text[: len(text) - begun].rstrip()
    return before, text[len(before) :], None


def overlap(text: str, mark: str) -> int:
    """Return the number of characters at a text's end that begin a mark."""
    return next((k for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k])), 0)
