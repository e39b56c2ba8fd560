"""Finds function calls in a model's output.

A format has a mark that opens a call, or lets calls begin at the start of the output. Its reader
takes the text after the mark. A reader is a generator that receives one character at a time, so the
result cannot depend on where the text is cut. Text is held back while it may still become a call. A
call starts when its name is known and its arguments begin; from then on, arguments pass at once.

Text that turns out to be no call is content, exactly as the model wrote it. Arguments that turn out
to be invalid JSON stay arguments, up to the closing mark: they have been streamed, and OpenAI's
documents tell clients to expect invalid JSON. Whitespace around calls is dropped.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

from weft.serving.api.parsing.json_scanner import SPACE, JsonScanner
from weft.serving.api.parsing.pieces import Arguments, CallStart, Content, Piece, split_at

Reader = Generator[None, str, None]
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # marks in the format hermes


class CallReader:
    """The readers of all formats, and their state; see `ToolCallParser`.

    Attributes:
        names: functions that the model may call.
        out: pieces that are certain.
        held: characters that are not yet in a piece.
        in_arguments: a call has started, and its arguments have not ended.
        complete: a call has ended, and only its closing mark can follow.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.out: list[Piece] = []
        self.held: list[str] = []
        self.in_arguments = False
        self.complete = False

    def hermes(self) -> Reader:
        """Read `{"name": ..., "arguments": {...}}</tool_call>` after the opening mark.

        The closing mark may be missing before another call.
        """
        mark = _OPEN
        while mark == _OPEN:
            self.complete = False
            yield from self._json_call((yield from _after_space()))
            mark = yield from _after_space()
            while mark not in (_OPEN, _CLOSE):
                _require(_OPEN.startswith(mark) or _CLOSE.startswith(mark))
                mark += yield

    def llama3_json(self) -> Reader:
        """Read objects with "parameters", separated by `;`; the functions must be known."""
        char = yield from _after_space()
        while True:
            self.complete = False
            yield from self._json_call(char, known=True)
            char = yield from _after_space()
            _require(char == ";")
            char = yield from _after_space()

    def mistral(self) -> Reader:
        """Read a list of objects; newer models write a name, `[ARGS]` and the arguments."""
        char = yield from _after_space()
        if char != "[":
            yield from self._named_call(char)
            return
        char = yield from _after_space()
        while True:
            yield from self._json_call(char)
            char = yield from _after_space()
            if char == "]":
                return
            _require(char == ",")
            char = yield from _after_space()

    def pythonic(self) -> Reader:
        """Read `[f(x=1), g()]`, which is the whole answer; `pythonic_end` parses it."""
        char = yield from _after_space()
        _require(char == "[")
        char = yield from _after_space()
        _require(char.isidentifier())
        while char.isidentifier() or char.isdigit() or char == ".":
            char = yield
        _require(char == "(")
        while True:
            yield

    def pythonic_end(self) -> None:
        """End the answer: it is a list of calls, or content."""
        calls = _python_calls("".join(self.held), self.names)
        if calls is None:
            self.end()
            return
        for name, arguments in calls:
            self.out += (CallStart(name), Arguments(arguments))

    def end(self) -> None:
        """End the answer while the reader is active."""
        text = "".join(self.held)
        if not (self.complete and _CLOSE.startswith(text.strip())):
            self.out.append(Content(text))

    def _json_call(self, char: str, *, known: bool = False) -> Reader:
        """Read an object; with `known` it must name a known function."""
        _require(char == "{")
        name = arguments = None
        started = False
        char = yield from _after_space()
        while char != "}":
            key, char = yield from _string(char)
            _require((yield from _after_space(char)) == ":")
            char = yield from _after_space()
            if key in ("arguments", "parameters") and name and char == "{" and not started:
                started = True
                yield from self._arguments(name, char)
                char = yield
            elif key == "name" and name is None:
                name, char = yield from _string(char)
                _require(_NAME.fullmatch(name) is not None and (not known or name in self.names))
            else:
                text, char = yield from _value(char)
                if key in ("arguments", "parameters") and not started:
                    arguments = _object(text)
            char = yield from _after_space(char)
            if char == ",":
                char = yield from _after_space()
                _require(char == '"')
            else:
                _require(char == "}")
        _require(name is not None)
        if name is not None and not started:
            self.out += (CallStart(name), Arguments(arguments or "{}"))
        self._call_ends()

    def _named_call(self, char: str) -> Reader:
        name = ""
        while char not in "[{" + SPACE:
            name += char
            _require(_NAME.fullmatch(name) is not None)
            char = yield
        _require(bool(name))
        char = yield from _after_space(char)
        if char == "[":
            mark = yield from _mark(char)
            if mark == "[CALL_ID]":  # the id has no use: the template only repeats it
                while (char := (yield)) != "[":
                    pass
                mark = yield from _mark(char)
            _require(mark == "[ARGS]")
            char = yield from _after_space()
        _require(char == "{")
        yield from self._arguments(name, char)
        self._call_ends()

    def _arguments(self, name: str, char: str) -> Reader:
        """Read an object that begins with `char`, and pass it on at once.

        The call starts with the first key, so an object in the syntax of Python or JavaScript
        stays content.
        """
        scanner = JsonScanner()
        scanner.push(char)
        opening = char
        while opening[-1] in "{" + SPACE:
            char = yield
            scanner.push(char)
            opening += char
        self.out += (CallStart(name), Arguments(opening))
        self.held = []
        self.in_arguments, self.complete = True, False
        while not scanner.done:
            char = yield
            scanner.push(char)
            self.out.append(Arguments(char))
            self.held = []
        self.in_arguments = False

    def _call_ends(self) -> None:
        self.held = []
        self.complete = True


@dataclass(frozen=True)
class ToolFormat:
    """A format for calls.

    Attributes:
        read: reads the text after the opening mark, or the whole answer.
        end: called when the answer ends while the reader is active.
        open, close: the marks. Invalid JSON counts as arguments up to the closing mark, or, if the
            format has no closing mark, up to the next opening mark.
        at_start: an answer may begin with a call without a mark.
        more_marks: further marks, which may be special tokens.
    """

    read: Callable[[CallReader], Reader]
    end: Callable[[CallReader], None] = CallReader.end
    open: str | None = None
    close: str | None = None
    at_start: bool = False
    more_marks: tuple[str, ...] = ()


TOOL_FORMATS = {
    "hermes": ToolFormat(CallReader.hermes, open=_OPEN, close=_CLOSE),
    "llama3_json": ToolFormat(CallReader.llama3_json, open="<|python_tag|>", at_start=True),
    "mistral": ToolFormat(
        CallReader.mistral, open="[TOOL_CALLS]", more_marks=("[ARGS]", "[CALL_ID]")
    ),
    "pythonic": ToolFormat(CallReader.pythonic, CallReader.pythonic_end, at_start=True),
}


class ToolCallParser:
    """Splits a model's output into content and calls.

    Args:
        form: the format for calls.
        names: functions that the model may call.
        parallel: accept several calls; else only the first call is kept.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._form = form
        self._parallel = parallel
        self._reading = CallReader(names)
        self._reader: Reader | None = None
        self._wait = ""  # text outside calls that may become a mark
        self._mode = self._content
        self._calls = 0
        if form.at_start:
            self._enter("")

    def push(self, text: str) -> list[Piece]:
        """Take more text; returns the pieces that are certain."""
        while text:
            text = self._mode(text)
        return self._taken()

    def flush(self) -> list[Piece]:
        """End the answer; returns the pieces that were held back."""
        if self._mode == self._call:
            self._form.end(self._reading)
        elif self._mode == self._broken:
            self._reading.out.append(Arguments(self._wait))
        elif not (self._calls and self._wait.isspace()):
            self._reading.out.append(Content(self._wait))
        return self._taken()

    def _content(self, text: str) -> str:
        """Take text up to the next mark; returns the text after the mark."""
        text = self._wait + text
        if self._form.open is None:
            self._reading.out.append(Content(text))
            return ""
        before, self._wait, after = split_at(text, self._form.open)
        self._reading.out.append(Content(before))
        if after is None:
            return ""
        self._enter(self._wait + self._form.open)
        return after

    def _enter(self, held: str) -> None:
        self._wait = ""
        self._reading.held = [held]
        self._reading.complete = False
        self._reader = self._form.read(self._reading)
        next(self._reader)
        self._mode = self._call

    def _call(self, text: str) -> str:
        """Take text up to the end of a call; returns the text after the call."""
        assert self._reader is not None
        reading = self._reading
        for i, char in enumerate(text):
            reading.held.append(char)
            try:
                self._reader.send(char)
            except StopIteration:
                reading.held = []
                self._mode = self._content
                return text[i + 1 :]
            except ValueError:
                reading.held.pop()
                if reading.in_arguments:
                    reading.in_arguments = False
                    self._mode = self._broken
                else:
                    reading.out.append(Content("".join(reading.held)))
                    self._mode = self._content
                return text[i:]
        return ""

    def _broken(self, text: str) -> str:
        """Take invalid arguments up to the next mark; returns the text after the mark."""
        mark = self._form.close or self._form.open
        assert mark is not None, "a format without marks has no arguments that break"
        before, self._wait, after = split_at(self._wait + text, mark)
        self._reading.out.append(Arguments(before))
        if after is None:
            return ""
        if mark == self._form.open:
            self._enter(mark)
        else:
            self._wait = ""
            self._mode = self._content
        return after

    def _taken(self) -> list[Piece]:
        """Return the reader's pieces, without calls beyond the allowed number."""
        out, self._reading.out = self._reading.out, []
        kept: list[Piece] = []
        for piece in out:
            self._calls += isinstance(piece, CallStart)
            if isinstance(piece, Content) or self._parallel or self._calls == 1:
                kept.append(piece)
        return kept


def _after_space(char: str = " ") -> Generator[None, str, str]:
    """Skip whitespace from `char` on; returns the first other character."""
    while char in SPACE:
        char = yield
    return char


def _value(char: str) -> Generator[None, str, tuple[str, str]]:
    """Read a value from `char` on; returns the value and the next character."""
    scanner = JsonScanner()
    text: list[str] = []
    while scanner.push(char):
        text.append(char)
        char = yield
    return "".join(text), char


def _string(char: str) -> Generator[None, str, tuple[str, str]]:
    """Read a string from `char` on; returns its text and the next character."""
    _require(char == '"')
    text, char = yield from _value(char)
    return str(_loads(text)), char


def _mark(char: str) -> Generator[None, str, str]:
    """Read a mark in brackets from `char` on."""
    mark = char
    while char != "]":
        _require(len(mark) < 16)
        char = yield
        mark += char
    return mark


def _object(text: str) -> str:
    """Return arguments as JSON: from an object, from a string with an object, or from null."""
    value = _loads(text)
    if isinstance(value, str):
        text, value = value, _loads(value)
        text.encode()  # raises for half of a surrogate pair, which an escape can hide
    if value is None:
        return "{}"
    _require(isinstance(value, dict))
    return text


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("this is nested too deeply") from None


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("this is no call")


def _python_calls(text: str, names: Collection[str]) -> list[tuple[str, str]] | None:
    """Read a list of calls in Python's syntax: `[f(x=1), g(y="z")]`.

    Args:
        text: a Python expression; it is parsed and never executed.
        names: functions that the model may call.

    Returns:
        The names and the arguments (JSON) of the calls; None if the text is no such list.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" is plain text here
            node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.List) or not node.elts:
        return None
    calls = [_python_call(element) for element in node.elts]
    if any(call is None or call[0] not in names for call in calls):
        return None
    return [call for call in calls if call is not None]


def _python_call(node: ast.expr) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        return None
    try:
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
        return ast.unparse(node.func), json.dumps(arguments, allow_nan=False)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None
