"""What an answer must be for its calls to be as they were asked for: a grammar for the sampler.

It is a structural tag of xgrammar: the format's own marks, with the schema of the tool's
parameters between them, so that `ToolCallParser` finds the calls in what comes. A mark that is a
special token is asked for as that token: as a text no model would write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.serving.api.parsing.reasoning import ReasoningFormat
from weft.serving.engine.sampling_params import Grammar

Format = dict[str, Any]


@dataclass(frozen=True)
class Offered:
    """A tool.

    Attributes:
        name: of the function.
        schema: of its arguments.
    """

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True)
class _Form:
    """How a format writes a list of calls, in texts and marks; `begin` has a place for the name."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    separator: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


_FORMS = {
    "hermes": _Form(
        ("<tool_call>", '\n{"name": "%s", "arguments": '), ("}\n", "</tool_call>"), "\n"
    ),
    "llama3_json": _Form(('{"name": "%s", "parameters": ',), ("}",), "; "),
    "mistral": _Form(
        ('{"name": "%s", "arguments": ',), ("}",), ", ", ("[TOOL_CALLS]", "["), ("]",)
    ),
}


# The mark that begins calls, and whether an answer may begin with them without it.
_MARKS = {
    "hermes": ("<tool_call>", False),
    "llama3_json": ("<|python_tag|>", True),
    "mistral": ("[TOOL_CALLS]", False),
}


def calls_only(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """An answer that is calls, at least one.

    Args:
        form: the format's name.
        tools: that may be called.
        several: there may be more than one call.
        tokens: special tokens that are marks, by their texts.

    Raises:
        RequestError: the format cannot be forced.
    """
    if form not in _FORMS:
        raise RequestError(
            "tool_choice asks for a call, and how this model writes calls is not known; the server "
            f"takes that with --tool-parser {', '.join(_FORMS)}",
            param="tool_choice",
            code="unsupported_value",
        )
    return Grammar("structural_tag", _tag(_calls(_FORMS[form], tools, several, tokens)), "tools")


def or_calls(
    grammar: Grammar,
    form: str | None,
    tools: Sequence[Offered],
    *,
    several: bool,
    tokens: Mapping[str, int],
) -> Grammar:
    """An answer that is what a grammar says, or calls; the arguments are as of `calls_only`.

    Raises:
        RequestError: the calls of this format have no grammar.
    """
    if form not in _FORMS:
        raise RequestError(
            f"{grammar.param} says what the answer must be, so the tools could never be called: "
            f"beside it the server takes tools with --tool-parser {', '.join(_FORMS)}",
            param=grammar.param,
            code="unsupported_value",
        )
    calls = json.dumps(_calls(_FORMS[form], tools, several, tokens))
    return msgspec.structs.replace(grammar, instead=calls)


def strict_calls(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """A free answer whose calls have arguments of the tools' schemas, and are as of `calls_only`.

    Raises:
        RequestError: the calls of this format have no grammar.
    """
    if form not in _FORMS:
        raise RequestError(
            "a tool is strict, and how this model writes calls has no grammar: leave strict out; "
            f"the server takes it with --tool-parser {', '.join(_FORMS)}",
            param="tools",
            code="unsupported_value",
        )
    written = _FORMS[form]
    mark, at_start = _MARKS[form]
    text = {"type": "any_text", "excludes": [mark]}
    if at_start:  # calls are all of the answer, and no other may begin like one
        other = _sequence({"type": "regex", "pattern": r"[^{<\s]"}, text)
        calls = _calls(written, tools, several, tokens)
        free = {"type": "or", "elements": [calls, {"type": "optional", "content": other}]}
    else:
        calls = _calls(written, tools, several and bool(written.before), tokens)
        times = "star" if several else "optional"
        free = _sequence(text, {"type": times, "content": _sequence(calls, text)})
    return Grammar("structural_tag", _tag(free), "tools")


def after_thought(
    grammar: Grammar, form: ReasoningFormat, tokens: Mapping[str, int], *, opened: bool
) -> Grammar:
    """A grammar for what follows a thought.

    Args:
        grammar: of the answer without its thought.
        form: of the thought.
        tokens: special tokens that are marks, by their texts.
        opened: the prompt has begun the thought; else there may be none.
    """
    thought: Format = {
        "type": "tag",
        "begin": "" if opened else _mark_or_text(form.open, tokens),
        "content": {"type": "any_text"},
        "end": _mark_or_text(form.close, tokens),
    }
    before = _sequence(thought, {"type": "regex", "pattern": "\\n{0,2}"})
    if not opened:
        before = {"type": "optional", "content": before}
    return msgspec.structs.replace(grammar, before=json.dumps(before))


def _calls(
    form: _Form, tools: Sequence[Offered], several: bool, tokens: Mapping[str, int]
) -> Format:
    """One call of any of the tools, or several."""
    call = _any_call(form, tools, tokens)
    more = {"type": "star", "content": _sequence(_text(form.separator), call)}
    return _sequence(
        *(_mark(text, tokens) for text in form.before),
        call,
        *([more] if several else ()),
        *(_mark(text, tokens) for text in form.after),
    )


def _any_call(form: _Form, tools: Sequence[Offered], tokens: Mapping[str, int]) -> Format:
    """One call, of any of the tools."""
    calls = [
        _sequence(
            *(_mark(text.replace("%s", tool.name), tokens) for text in form.begin),
            {"type": "json_schema", "json_schema": tool.schema, "of": f"tools: {tool.name}"},
            *(_mark(text, tokens) for text in form.end),
        )
        for tool in tools
    ]
    return {"type": "or", "elements": calls}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _mark(text: str, tokens: Mapping[str, int]) -> Format:
    return {"type": "token", "token": tokens[text]} if text in tokens else _text(text)


def _mark_or_text(text: str, tokens: Mapping[str, int]) -> Format | str:
    """The same as a tag has it at its ends."""
    return _mark(text, tokens) if text in tokens else text


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _tag(form: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": form})
