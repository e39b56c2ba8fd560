"""What an answer is made of, piece by piece, and the whole that the pieces join to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Content:
    """More of what the model says to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a function."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the arguments of the call that started last: JSON, if the model made no mistake."""

    text: str


Piece = Content | Reasoning | CallStart | Arguments


@dataclass(slots=True)
class Call:
    """A call of a function; `arguments` is JSON as the model wrote it."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All pieces of an answer, joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        """Join more pieces to it."""
        for piece in pieces:
            match piece:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(name):
                    self.calls.append(Call(name))
                case Arguments(text):
                    self.calls[-1].arguments += text


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one, and none that is empty."""
    found: list[Piece] = []
    for kind, group in groupby(pieces, type):
        if kind is CallStart:
            found.extend(group)
        elif text := "".join(piece.text for piece in group if not isinstance(piece, CallStart)):
            found.append(kind(text))
    return found
