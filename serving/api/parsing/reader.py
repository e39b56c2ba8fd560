"""The base of all call readers: a growing text, and a place in it.

A reader is a generator. It pauses when it needs another character. It gets one character at a time,
so its result cannot depend on the cuts in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator

from weft.serving.api.parsing.json_scanner import SPACE, JsonScanner
from weft.serving.api.parsing.pieces import Arguments, CallStart, Piece, overlap

Steps = Generator[None, None, None]
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MAX_DEPTH = 64
"""Maximum depth of values in one another, in formats that are not JSON."""

_MAX_WORD = 128


class Reader:
    """A growing text, and a place in it.

    Attributes:
        out: certain pieces.
        held: characters without a piece so far.
        at: place in `held`: the reader has taken everything before it.
        started: a call has started, so `held` cannot become content.
        complete: a call has ended, and only `expected` can belong to it.
        expected: allowed next texts.
    """

    def __init__(self) -> None:
        self.out: list[Piece] = []
        self.held: list[str] = []
        self.at = 0
        self.started = False
        self.complete = False
        self.expected: tuple[str, ...] = ()

    def text(self, begin: int, end: int | None = None) -> str:
        """Return a slice of the held text."""
        return "".join(self.held[begin:end])

    def peek(self) -> Generator[None, None, str]:
        """Return the next character."""
        while self.at == len(self.held):
            yield
        return self.held[self.at]

    def skip_space(self) -> Generator[None, None, str]:
        """Skip white space; returns the character after it."""
        while (char := (yield from self.peek())) in SPACE:
            self.at += 1
        return char

    def literal(self, text: str) -> Steps:
        """Take a text; its white space, and none, stand for any white space.

        Raises:
            ValueError: another text is here.
        """
        for word in text.split():
            yield from self.choose(word)

    def choose(self, *texts: str) -> Generator[None, None, str]:
        """Skip white space, take one of the texts (they have no white space), and return it.

        Raises:
            ValueError: no text matches here.
        """
        self.expected = texts
        yield from self.skip_space()
        while True:
            here = self.text(self.at)
            for text in texts:
                if here.startswith(text):
                    self.at += len(text)
                    return text
            if not any(text.startswith(here) for text in texts):
                raise ValueError("another text is here")
            yield

    def word(self, ends: Collection[str]) -> Generator[None, None, str]:
        """Take the characters up to one of `ends` or white space.

        Raises:
            ValueError: there are too many characters.
        """
        begin = self.at
        while (yield from self.peek()) not in ends and self.held[self.at] not in SPACE:
            self.at += 1
            if self.at - begin > _MAX_WORD:
                self.at = begin
                raise ValueError("this is no name")
        return self.text(begin, self.at)

    def until(self, *marks: str, passed: bool = True) -> Generator[None, None, tuple[str, str]]:
        """Take the next part of a text before its closing mark.

        Args:
            marks: possible closing marks; put a longer mark before its own suffix.
            passed: take the mark too.

        Returns:
            More text, and the mark; the mark is empty if the text goes on.
        """
        begin = self.at
        while True:
            text = self.text(begin)
            for mark in marks:
                if text.endswith(mark):
                    self.at = len(self.held) - (0 if passed else len(mark))
                    return text[: len(text) - len(mark)], mark
            waits = max(overlap(text, mark) for mark in marks)
            if len(text) > waits:
                self.at = len(self.held) - waits
                return text[: len(text) - waits], ""
            yield

    def start(self, name: str, arguments: str = "") -> None:
        """Start a call; the held text belongs to it."""
        self.out.append(CallStart(name))
        self.started, self.complete = True, False
        self.argue(arguments)

    def argue(self, text: str) -> None:
        """Add a text to the call's arguments, and forget the taken text."""
        self.out.append(Arguments(text))
        self.forget()

    def forget(self) -> None:
        """Forget the taken text."""
        del self.held[: self.at]
        self.at = 0

    def end_call(self) -> None:
        """End the call."""
        self.forget()
        self.started, self.complete = False, True

    def json_arguments(self, name: str, closing: str, opening: str) -> Generator[None, None, bool]:
        """Start a call with the JSON object at this place, and pass it on at once.

        The call starts with the first key, so an object in Python's or JavaScript's syntax is no
        call. Invalid JSON counts as arguments up to the closing mark or, if the format has none, up
        to the next opening mark.

        Returns:
            Whether the object is complete; else the closing mark is taken.

        Raises:
            ValueError: this is no JSON object.
        """
        scanner = JsonScanner()
        opening = ""
        while not opening.strip("{" + SPACE):
            char = yield from self.peek()
            if not opening and char != "{":
                raise ValueError("this is no object")
            scanner.push(char)
            opening += char
            self.at += 1
        self.start(name, opening)
        try:
            while not scanner.done:
                char = yield from self.peek()
                scanner.push(char)
                self.at += 1
                self.argue(char)
        except ValueError:
            yield from self.raw_arguments(closing, opening)
            return False
        self.end_call()
        return True

    def raw_arguments(self, closing: str, opening: str) -> Steps:
        """Pass on the remaining invalid arguments, and end the call."""
        mark = ""
        while not mark:
            text, mark = yield from self.until(closing or opening, passed=bool(closing))
            self.argue(text)
        self.end_call()


def escaped(text: str) -> str:
    """Return a text as JSON writes it, without quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
