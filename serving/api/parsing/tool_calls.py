"""Calls of functions in what a model says.

A format is a mark that opens a call, or the start of the answer, and a reader of what follows: a
generator that is sent one character at a time, so that where the text was cut cannot matter.
Text is held back while it may still become a call. A call has started when its name is known and
its arguments begin; from there on they are passed on as they come.

What turns out to be no call is content, as the model wrote it. Arguments that turn out to be no
JSON stay arguments, up to the closing mark: what has been streamed cannot be taken back, and the
client is told by OpenAI's documents to expect it. Whitespace around calls is no content.
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
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"  # of hermes


class CallReader:
    """What the formats' readers do to the answer; see `ToolCallParser`.

    Attributes:
        names: functions that can be called.
        out: pieces that are certain.
        held: characters that are not yet a piece.
        in_arguments: a call has started, and its arguments have not ended.
        complete: there was a call, and nothing but its closing mark can follow.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = names
        self.out: list[Piece] = []
        self.held: list[str] = []
        self.in_arguments = False
        self.complete = False

    def hermes(self) -> Reader:
        """`{"name": ..., "arguments": {...}}</tool_call>`, after the opening mark.

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
        """Objects with "parameters", of functions that were offered; `;` between them."""
        char = yield from _after_space()
        while True:
            self.complete = False
            yield from self._json_call(char, known=True)
            char = yield from _after_space()
            _require(char == ";")
            char = yield from _after_space()

    def mistral(self) -> Reader:
        """A list of objects; of newer models a name, `[ARGS]` and the arguments."""
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
        """`[f(x=1), g()]`, the whole answer; it is read when that has ended."""
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
        """The answer has ended: it is a list of calls, or content."""
        calls = _python_calls("".join(self.held), self.names)
        if calls is None:
            self.end()
            return
        for name, arguments in calls:
            self.out += (CallStart(name), Arguments(arguments))

    def end(self) -> None:
        """The answer has ended while it was being read."""
        text = "".join(self.held)
        if not (self.complete and _CLOSE.startswith(text.strip())):
            self.out.append(Content(text))

    def _json_call(self, char: str, *, known: bool = False) -> Reader:
        """An object; with `known` it must name a function that was offered."""
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
            if mark == "[CALL_ID]":  # of which the template makes no use but to repeat it
                while (char := (yield)) != "[":
                    pass
                mark = yield from _mark(char)
            _require(mark == "[ARGS]")
            char = yield from _after_space()
        _require(char == "{")
        yield from self._arguments(name, char)
        self._call_ends()

    def _arguments(self, name: str, char: str) -> Reader:
        """Pass an object on as it comes; it begins with `char`, and its end is the last one.

        The call starts with the first key, so that what begins like Python's or JavaScript's
        objects is content.
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
    """How a model writes calls.

    Attributes:
        read: the reader of what follows the opening mark, or of the whole answer.
        end: called when the answer ends while it is being read.
        open, close: the marks; without a closing one, text that is no JSON is arguments up to the
            next opening one.
        at_start: an answer may begin with a call without a mark.
        more_marks: that may be tokens of their own.
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
    """Splits what a model says into content and calls.

    Args:
        form: of the calls.
        names: functions that were offered.
        parallel: there may be several calls; else those after the first are left out.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], *, parallel: bool = True) -> None:
        self._form = form
        self._parallel = parallel
        self._reading = CallReader(names)
        self._reader: Reader | None = None
        self._wait = ""  # outside of calls
        self._mode = self._content
        self._calls = 0
        if form.at_start:
            self._enter("")

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        while text:
            text = self._mode(text)
        return self._taken()

    def flush(self) -> list[Piece]:
        """What was held back; the answer ends."""
        if self._mode == self._call:
            self._form.end(self._reading)
        elif self._mode == self._broken:
            self._reading.out.append(Arguments(self._wait))
        elif not (self._calls and self._wait.isspace()):
            self._reading.out.append(Content(self._wait))
        return self._taken()

    def _content(self, text: str) -> str:
        """Take text up to the next mark; returns what follows it."""
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
        """Take text up to the end of a call; returns what follows it."""
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
        """Take arguments that are no JSON, up to the next mark; returns what follows it."""
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
        """What the reader has found, without calls that are too many."""
        out, self._reading.out = self._reading.out, []
        kept: list[Piece] = []
        for piece in out:
            self._calls += isinstance(piece, CallStart)
            if isinstance(piece, Content) or self._parallel or self._calls == 1:
                kept.append(piece)
        return kept


def _after_space(char: str = " ") -> Generator[None, str, str]:
    """The first character from `char` on that is no whitespace."""
    while char in SPACE:
        char = yield
    return char


def _value(char: str) -> Generator[None, str, tuple[str, str]]:
    """The value that begins with `char`, and the character after it."""
    scanner = JsonScanner()
    text: list[str] = []
    while scanner.push(char):
        text.append(char)
        char = yield
    return "".join(text), char


def _string(char: str) -> Generator[None, str, tuple[str, str]]:
    """The text of the string that begins with `char`, and the character after it."""
    _require(char == '"')
    text, char = yield from _value(char)
    return str(_loads(text)), char


def _mark(char: str) -> Generator[None, str, str]:
    """The mark in brackets that begins with `char`; the character after it is still to come."""
    mark = char
    while char != "]":
        _require(len(mark) < 16)
        char = yield
        mark += char
    return mark


def _object(text: str) -> str:
    """The JSON of arguments: an object, a string that holds one, or nothing."""
    value = _loads(text)
    if isinstance(value, str):
        text, value = value, _loads(value)
        text.encode()  # an escape may stand for half of a surrogate pair, which is no character
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
    """Read calls as Python writes them, `[f(x=1), g(y="z")]`.

    Names and arguments (JSON) of a list of calls; None if the text is no such list.

    Args:
        text: a Python expression, of which nothing is executed.
        names: functions that can be called.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" is text to us
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
