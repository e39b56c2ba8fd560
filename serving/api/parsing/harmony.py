"""Splits an output in harmony (gpt-oss's format) into thought, content and calls.

An output is a sequence of messages, each with a header and a body:
`<|start|>assistant<|channel|>CHANNEL to=RECIPIENT <|constrain|>json<|message|>BODY<|end|>`. The
prompt ends within the first header. A body in the channel "analysis" is a thought; one for the
recipient functions.NAME is a call; all others are content. A line end separates bodies with the
same kind. Text outside messages is content.

Source: docs/format.md in github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from weft.serving.api.parsing.call_readers import Tools
from weft.serving.api.parsing.pieces import Arguments, CallStart, Content, Piece, Reasoning
from weft.serving.api.parsing.reader import NAME, Reader, Steps
from weft.serving.api.parsing.tool_calls import CallLimit

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ROLE = "assistant"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_NEXT = (_START, _CHANNEL)
_OPENINGS = (_START, _CHANNEL, _MESSAGE, "to=")
_HEADER = re.compile(
    r"(?:<\|start\|>)?\s*(?:assistant)?\s*(?:to=(?P<role>[^\s<]+))?\s*"
    r"(?:<\|channel\|>\s*(?P<channel>\w+)\s*(?:to=(?P<to>[^\s<]+))?\s*)?"
    r"(?:<\|constrain\|>)?\s*\w*\s*<\|message\|>"
)
_MAX_HEADER = 256
_PREFIX = "functions."


class HarmonyParser:
    """Splits an output into thought, content and calls.

    Args:
        prompt: the prompt as the model sees it; it ends with a message's beginning.
        tools: functions for the model; without functions, calls are content.
        thoughts: messages in the channel "analysis" are thoughts; else they are content.
        parallel: accept several calls; else only the first call is kept.

    Attributes:
        begun: the output has a thought.
    """

    def __init__(
        self, prompt: str, tools: Tools, *, thoughts: bool = True, parallel: bool = True
    ) -> None:
        self.begun = False
        self._tools = tools
        self._thoughts = thoughts
        self._limit = CallLimit(parallel=parallel)
        self._reader = Reader()
        self._body: type[Piece] | None = None  # the open body's kind
        self._empty = True  # the open body has no text yet
        self._seen: set[type[Piece]] = set()  # kinds with text
        self._steps = self._messages()
        next(self._steps)
        last = prompt[max(prompt.rfind(_START), 0) :]
        if last.startswith(_START + _ROLE) and last.removeprefix(_START + _ROLE).strip():
            self.push(last)
            self._seen.clear()
            self.begun = self._body is Reasoning

    @property
    def held(self) -> int:
        """The number of held-back characters."""
        return len(self._reader.held)

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the certain pieces."""
        for char in text:
            self._reader.held.append(char)
            next(self._steps)
        return self._taken()

    def flush(self) -> list[Piece]:
        """End the output; returns the held-back pieces. An open header is dropped."""
        if self._body is not None:
            self._say(self._reader.text(0))
            self._end_body()
        return self._taken()

    def _taken(self) -> list[Piece]:
        out, self._reader.out = self._reader.out, []
        self.begun |= any(isinstance(piece, Reasoning) for piece in out)
        return self._limit.kept(out)

    def _messages(self) -> Steps:
        """Read messages, and text outside messages, without end."""
        reader = self._reader
        while True:
            header = yield from self._header()
            marks: tuple[str, ...] = _NEXT
            if header is None:
                self._begin_body(Content)
                reader.at = max(len(reader.held) - 1, 1)
                self._say(reader.text(0, reader.at))
            else:
                marks += _ENDS
                self._begin_message(header)
            reader.forget()
            mark = ""
            while not mark:
                text, mark = yield from reader.until(*marks)
                self._say(text)
                reader.at -= len(mark) if mark in _NEXT else 0
                reader.forget()
            self._end_body()

    def _header(self) -> Generator[None, None, re.Match[str] | None]:
        """Read a header; returns None once the text can be none."""
        reader = self._reader
        while True:
            text = reader.text(0).lstrip()
            if text.endswith(_MESSAGE):
                reader.at = len(reader.held)
                return _HEADER.fullmatch(text)
            if len(reader.held) > _MAX_HEADER or not _may_begin(text):
                return None
            yield

    def _begin_message(self, header: re.Match[str]) -> None:
        recipient = header["to"] or header["role"] or ""
        name = recipient.removeprefix(_PREFIX)
        offered = recipient.startswith(_PREFIX) or name in self._tools
        if self._tools and offered and NAME.fullmatch(name):
            self._begin_body(Arguments)
            self._reader.out.append(CallStart(name))
        else:
            thought = self._thoughts and header["channel"] == "analysis"
            self._begin_body(Reasoning if thought else Content)

    def _begin_body(self, kind: type[Piece]) -> None:
        self._body, self._empty = kind, True

    def _say(self, text: str) -> None:
        """Add text to the body."""
        if not text or self._body is None:
            return
        if self._empty and self._body in self._seen and self._body is not Arguments:
            text = "\n" + text
        self._seen.add(self._body)
        self._empty = False
        self._reader.out.append(self._body(text))

    def _end_body(self) -> None:
        if self._body is Arguments and self._empty:
            self._reader.out.append(Arguments("{}"))
        self._body = None


def _may_begin(text: str) -> bool:
    """Return whether a text may begin a header."""
    if text.startswith(_START):
        text = text.removeprefix(_START).lstrip()
        if _ROLE.startswith(text):
            return True
        text = text.removeprefix(_ROLE).lstrip()
    return any(word.startswith(text) or text.startswith(word) for word in _OPENINGS)
