"""Finds function calls in a model's output.

The parser looks for the opening mark in the model's format. It gives the text after the mark to a
reader, one character at a time. It holds text back while the text may still become a call. If the
text is no call, it is content, exactly as the model wrote it. Invalid JSON in arguments stays
there, up to the closing mark: it has been streamed, and OpenAI's documents tell clients to expect
invalid JSON. Whitespace around calls is dropped.
"""

from __future__ import annotations

from weft.serving.api.parsing.call_readers import CallReader, Tools
from weft.serving.api.parsing.formats import ToolFormat
from weft.serving.api.parsing.pieces import Arguments, CallStart, Content, Piece, split_at
from weft.serving.api.parsing.reader import Steps


class CallLimit:
    """Drops calls beyond the first, if only one is allowed.

    Args:
        parallel: allow several calls.

    Attributes:
        calls: call count so far.
    """

    def __init__(self, *, parallel: bool) -> None:
        self.calls = 0
        self._parallel = parallel

    def kept(self, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces without further calls."""
        kept: list[Piece] = []
        for piece in pieces:
            self.calls += isinstance(piece, CallStart)
            other = not isinstance(piece, CallStart | Arguments)
            if other or self._parallel or self.calls == 1:
                kept.append(piece)
        return kept


class ToolCallParser:
    """Splits a model's output into content and calls.

    Args:
        form: the format for calls.
        tools: functions for the model, with their arguments' schemas.
        parallel: accept several calls; else only the first call is kept.
    """

    begun = False

    def __init__(self, form: ToolFormat, tools: Tools, *, parallel: bool = True) -> None:
        self._form = form
        self._limit = CallLimit(parallel=parallel)
        self._tools = tools
        self._out: list[Piece] = []
        self._wait = ""  # text outside calls that may become a mark
        self._reader: CallReader | None = None
        self._steps: Steps | None = None
        if form.at_start:
            self._enter("")

    @property
    def held(self) -> int:
        """The number of held-back characters."""
        return len(self._wait if self._reader is None else self._reader.held)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the certain pieces."""
        while text:
            text = self._content(text) if self._reader is None else self._call(self._reader, text)
        return self._taken()

    def flush(self) -> list[Piece]:
        """End the answer; returns the held-back pieces."""
        if self._reader is not None:
            rest = self._reader.end()
            self._out += self._reader.out
            self._out.append(Content(rest))
        elif not (self._limit.calls and self._wait.isspace()):
            self._out.append(Content(self._wait))
        return self._taken()

    def _content(self, text: str) -> str:
        """Take text up to the next mark; returns the text after the mark."""
        text = self._wait + text
        mark = self._form.mark
        if not mark:
            self._out.append(Content(text))
            return ""
        before, self._wait, after = split_at(text, mark)
        self._out.append(Content(before))
        if after is None:
            return ""
        self._enter(self._wait + mark)
        return after

    def _enter(self, held: str) -> None:
        self._wait = ""
        self._reader = CallReader(self._form, self._tools)
        self._reader.held, self._reader.at = list(held), len(held)
        self._steps = self._reader.read()
        next(self._steps)

    def _call(self, reader: CallReader, text: str) -> str:
        """Take text up to the calls' end; returns the text after them."""
        assert self._steps is not None
        for i, char in enumerate(text):
            reader.held.append(char)
            try:
                next(self._steps)
            except (StopIteration, ValueError) as end:
                self._out += reader.out
                if isinstance(end, ValueError):
                    self._out.append(Content(reader.text(0, reader.at)))
                self._reader = self._steps = None
                return reader.text(reader.at) + text[i + 1 :]
        self._out += reader.out
        reader.out = []
        return ""

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return self._limit.kept(out)
