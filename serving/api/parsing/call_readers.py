"""The call reader, with a method for each syntax.

A call starts when its name is known and its arguments begin; from then on, arguments pass as they
come. At the first character that belongs to no call, the reader raises ValueError. The text that is
in no piece is then content.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Generator, Mapping
from typing import Any

from weft.serving.api.parsing.formats import Parameters, ToolFormat
from weft.serving.api.parsing.json_scanner import JsonScanner
from weft.serving.api.parsing.parameters import ANY, as_json, is_bounded, loads, types_of
from weft.serving.api.parsing.pieces import Arguments, CallStart
from weft.serving.api.parsing.reader import MAX_DEPTH, NAME, Reader, Steps, escaped

Tools = Mapping[str, Mapping[str, Any]]
"""The schemas of the offered tools' arguments, by name."""

_HEADER_ENDS = '<>[{"'
_NUMBER = re.compile(r":\d+$")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_TEXT = frozenset({"string"})
_JSON_WORDS = {"true": True, "false": False, "null": None}


class CallReader(Reader):
    """Reads calls in one format.

    Args:
        form: the format.
        tools: functions for the model.

    """

    def __init__(self, form: ToolFormat, tools: Tools) -> None:
        super().__init__()
        self._form = form
        self._tools = tools

    def read(self) -> Steps:
        """Read calls after their opening mark, or from the answer's beginning."""
        match self._form.syntax:
            case "object":
                return self._objects()
            case "python":
                return self._python()
            case _:
                return self._named()

    def end(self) -> str:
        """End the answer within calls; returns the text outside calls, for content."""
        if self._form.syntax == "python":
            calls = self._calls_in(self.text(0))
            for name, arguments in calls or ():
                self.out += (CallStart(name), Arguments(arguments))
            return "" if calls else self.text(0)
        rest = self.text(0).strip()
        known = self.complete and any(text.startswith(rest) for text in self.expected)
        return "" if self.started or known else self.text(0)

    def _objects(self) -> Steps:
        """Read JSON objects with a name and arguments. A closing mark may be missing."""
        form = self._form
        opening, closing = form.first.partition("{")[0], form.call[2].partition("}")[2].strip()
        bracket, after = form.section[1][:1], form.section[1][1:]
        if form.newer is not None and (yield from self.skip_space()) != "[":
            self._form = form.newer
            yield from self._named()
            return
        again = form.separator.strip() or form.mark
        ends = [text for text in (closing, bracket) if text]
        yield from self.literal(opening.removeprefix(form.mark))
        while (yield from self._object(closing)):
            if (yield from self.choose(again, *ends)) in ends:
                self.forget()
                yield from self.literal(after)
                return
            self.complete = False

    def _object(self, closing: str) -> Generator[None, None, bool]:
        """Read one object; returns False if its arguments were invalid."""
        yield from self.choose("{")
        name = arguments = None
        streamed = False
        char = yield from self.skip_space()
        while char != "}":
            key = yield from self._string()
            yield from self.choose(":")
            char = yield from self.skip_space()
            if key in ("arguments", "parameters") and name and char == "{" and not streamed:
                streamed = True
                if not (yield from self.json_arguments(name, closing, self._form.mark)):
                    return False
            elif key == "name" and name is None:
                name = self._checked((yield from self._string()))
            else:
                text = yield from self._value()
                if key in ("arguments", "parameters") and not streamed:
                    arguments = _object_of(text)
            char = yield from self.skip_space()
            if char == ",":
                self.at += 1
                _require((yield from self.skip_space()) == '"')
            else:
                _require(char == "}")
        self.at += 1
        _require(name is not None)
        if name is not None and not streamed:
            self.start(name, arguments or "{}")
        self.end_call()
        return True

    def _named(self) -> Steps:
        """Read calls with a name and arguments between marks."""
        form = self._form
        again, *more = form.call[0].split()
        closing, *closing_more = form.call[2].split() or [""]
        ends = [text for text in (closing, again, form.section[1]) if text]
        yield from self.literal(form.first.removeprefix(form.mark))
        while True:
            name = yield from self._header()
            match form.syntax:
                case "json":
                    valid = yield from self.json_arguments(name, closing, form.mark)
                    if not valid and not closing:
                        return  # the next opening mark is not taken yet
                    mark = (yield from self.choose(*ends)) if valid else closing
                case "gemma":
                    mark = yield from self._gemma(name, closing, ends)
                case _:
                    mark = yield from self._parameters(name, ends)
            if mark == closing:
                yield from self.literal(" ".join(closing_more))
                self.forget()
                if not form.section[1]:
                    return
                mark = yield from self.choose(again, form.section[1])
            if mark == form.section[1]:
                return
            self.complete = False
            yield from self.literal(" ".join(more))

    def _header(self) -> Generator[None, None, str]:
        """Read a name and the text up to the arguments; returns the name."""
        form = self._form
        yield from self.skip_space()
        prefix, suffix = form.name.split("%s")
        name = (yield from self.word(_HEADER_ENDS)).removeprefix(prefix)
        name = self._checked(_NUMBER.sub("", name) if suffix else name)
        if form.call[1] != "[ARGS]":
            yield from self.literal(form.call[1])
        elif (yield from self.skip_space()) == "[":  # else the mark is missing
            mark = yield from self.choose("[ARGS]", "[CALL_ID]")
            if mark == "[CALL_ID]":  # the id has no use: the template only repeats it
                yield from self.skip_space()
                yield from self.word(_HEADER_ENDS)
                yield from self.literal("[ARGS]")
        if form.syntax in ("json", "gemma"):
            _require((yield from self.skip_space()) == "{")
        return name

    def _parameters(self, name: str, ends: list[str]) -> Generator[None, None, str]:
        """Read parameters one by one; returns the mark behind them.

        The arguments end at any other text, too.
        """
        assert self._form.parameters is not None
        opening, *more = self._form.parameters.open.split()
        text = "{"
        try:
            while (mark := (yield from self.choose(opening, *ends))) == opening:
                yield from self.literal(" ".join(more))
                text = yield from self._parameter(self._form.parameters, name, text)
        except ValueError:
            if self.started:
                self.out.append(Arguments("}"))
                self.started, self.complete = False, True
            raise
        if self.started:
            self.argue("}")
        else:
            self.start(name, "{}")
        self.end_call()
        return mark

    def _parameter(self, form: Parameters, name: str, before: str) -> Generator[None, None, str]:
        """Read one parameter, and start the call with the first; returns the text for the next."""
        end, *more = form.middle.split()
        key, typed = (yield from self._all(end)).strip(), ""
        yield from self.literal(" ".join(more))
        if form.typed:
            typed = yield from self._all(form.typed)
            _require(typed in ("true", "false"))
        schema = self._tools.get(name, {})
        bounded = not typed and is_bounded(schema, key)
        types = {"true": _TEXT, "false": ANY - _TEXT}.get(typed) or types_of(schema, key)
        opening = f'{before}"{escaped(key)}": '
        if self.started:
            self.argue(opening)
        else:
            self.start(name, opening)
        marks = [form.close]
        if form.newlines:
            marks.insert(0, "\n" + form.close)
            self.at += (yield from self.peek()) == "\n"
            self.forget()
        if types == _TEXT and not bounded:
            yield from self._quoted(*marks)
        else:
            value = yield from self._all(*marks)
            self.argue(as_json(value.strip() if bounded else value, types))
        return ", "

    def _gemma(self, name: str, closing: str, ends: list[str]) -> Generator[None, None, str]:
        """Read an object in Gemma's syntax; returns the mark behind it."""
        self.at += 1
        if (yield from self.skip_space()) == "}":
            self.at += 1
            self.start(name, "{}")
            self.end_call()
            return (yield from self.choose(*ends))
        key = yield from self._gemma_key()
        self.start(name, f'{{"{escaped(key)}": ')
        try:
            yield from self._gemma_members(1)
        except ValueError:
            yield from self.raw_arguments(closing, "")
            return closing
        self.end_call()
        return (yield from self.choose(*ends))

    def _gemma_members(self, depth: int) -> Steps:
        """Read an object from behind its first key."""
        while True:
            yield from self._gemma_value(depth)
            char = yield from self.choose(",", "}")
            self.argue(", " if char == "," else "}")
            if char == "}":
                return
            key = yield from self._gemma_key()
            self.argue(f'"{escaped(key)}": ')

    def _gemma_key(self) -> Generator[None, None, str]:
        if (yield from self.skip_space()) == self._form.quote[0]:
            yield from self.choose(self._form.quote)
            key = yield from self._all(self._form.quote)
        else:
            key = yield from self.word(":,{}[]<")
            _require(bool(key))
        yield from self.choose(":")
        return key

    def _gemma_value(self, depth: int) -> Steps:
        _require(depth < MAX_DEPTH)
        char = yield from self.skip_space()
        if char == self._form.quote[0]:
            yield from self.choose(self._form.quote)
            yield from self._quoted(self._form.quote)
        elif char not in "{[":
            word = yield from self.word(",]}<")
            _require(bool(word))
            self.argue(as_json(word, ANY - _TEXT))
        else:
            self.at += 1
            self.argue(char)
            end = "}" if char == "{" else "]"
            if (yield from self.skip_space()) == end:
                self.at += 1
                self.argue(end)
            elif char == "{":
                key = yield from self._gemma_key()
                self.argue(f'"{escaped(key)}": ')
                yield from self._gemma_members(depth + 1)
            else:
                mark = ","
                while mark == ",":
                    yield from self._gemma_value(depth + 1)
                    mark = yield from self.choose(",", "]")
                    self.argue(", " if mark == "," else "]")

    def _python(self) -> Steps:
        """Read a section of calls; or `[f(x=1), g()]`, the whole answer, which `end` parses."""
        if self._form.mark:
            yield from self._all(self._form.section[1])
            calls = self._calls_in(self.text(0))
            _require(bool(calls))
            for name, arguments in calls or ():
                self.start(name, arguments)
                self.end_call()
            return
        char = yield from self.skip_space()
        if self._form.marks and char == "<":
            yield from self.choose(self._form.marks[0])
        yield from self.choose("[")
        char = yield from self.skip_space()
        _require(char.isidentifier())
        while char.isidentifier() or char.isdigit() or char == ".":
            self.at += 1
            char = yield from self.peek()
        _require(char == "(")
        while True:
            yield

    def _calls_in(self, text: str) -> list[tuple[str, str]] | None:
        """Return the names and arguments of calls in Python's syntax; see `python_calls`."""
        form = self._form
        if not form.mark:
            return python_calls(text, self._tools, form.marks)
        lines = text.partition(form.mark)[2].removesuffix(form.section[1]).split("\n")
        return python_calls(f"[{','.join(filter(None, map(str.strip, lines)))}]")

    def _checked(self, name: str) -> str:
        """Return a name if a call may have it."""
        _require(NAME.fullmatch(name) is not None)
        _require(not self._form.known or name in self._tools)
        return name

    def _quoted(self, *marks: str) -> Steps:
        """Pass on the text up to a mark as a JSON string."""
        self.argue('"')
        mark = ""
        while not mark:
            text, mark = yield from self.until(*marks)
            self.argue(escaped(text))
        self.argue('"')

    def _all(self, *marks: str) -> Generator[None, None, str]:
        """Return the text up to a mark."""
        parts: list[str] = []
        mark = ""
        while not mark:
            text, mark = yield from self.until(*marks)
            parts.append(text)
        return "".join(parts)

    def _value(self) -> Generator[None, None, str]:
        """Return the JSON value at this place."""
        scanner = JsonScanner()
        begin = self.at
        while not scanner.done and scanner.push((yield from self.peek())):
            self.at += 1
        return self.text(begin, self.at)

    def _string(self) -> Generator[None, None, str]:
        """Return the text in the JSON string at this place."""
        _require((yield from self.skip_space()) == '"')
        return str(loads((yield from self._value())))


def python_calls(
    text: str, tools: Tools | None = None, marks: tuple[str, ...] = ()
) -> list[tuple[str, str]] | None:
    """Read calls in Python's list syntax: `[f(x=1), g(y="z")]`.

    JSON's words and escapes are taken, too.

    Args:
        text: a Python expression; it is parsed and never executed.
        tools: functions for the model, if only calls to them count.
        marks: optional marks before and after the list.

    Returns:
        The calls' names and arguments (JSON); None if the text is no such list.
    """
    text = text.strip()
    if marks and text.startswith(marks[0]):
        text = text.removeprefix(marks[0]).removesuffix(marks[1]).strip()
    text = _ESCAPE.sub(lambda found: "/" if found[1] == "/" else found[0], text)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # "\d" is plain text here
            node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.List) or not node.elts:
        return None
    calls = [call for element in node.elts if (call := _python_call(element)) is not None]
    if len(calls) < len(node.elts) or any(tools is not None and c[0] not in tools for c in calls):
        return None
    return calls


def _python_call(node: ast.expr) -> tuple[str, str] | None:
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        return None
    try:
        values = {str(k.arg): ast.literal_eval(_Words().visit(k.value)) for k in node.keywords}
        name = ast.unparse(node.func)
        return (name, json.dumps(values, allow_nan=False)) if NAME.fullmatch(name) else None
    except (ValueError, TypeError, RecursionError, MemoryError):
        return None


class _Words(ast.NodeTransformer):
    """Replaces JSON's words by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_JSON_WORDS[node.id]) if node.id in _JSON_WORDS else node


def _object_of(text: str) -> str:
    """Return arguments as JSON: from an object, from a string with an object, or from null."""
    value = loads(text)
    if isinstance(value, str):
        text, value = value, loads(value)
        text.encode()  # raises for half a surrogate pair, possibly from an escape
    if value is None:
        return "{}"
    _require(isinstance(value, dict))
    return text


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("this is no call")
