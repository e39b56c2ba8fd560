"""Grammars that constrain an answer to well-formed tool calls.

Each is a structural tag for xgrammar: the format's own marks, and the schema of the tool's
parameters between them. `ToolCallParser` therefore finds the calls in the answer. If a mark is a
special token, the grammar requires that token, because no model writes the mark as plain text.
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
    """A tool for the model.

    Attributes:
        name: name of the function.
        schema: JSON schema of the arguments.
    """

    name: str
    schema: dict[str, Any]


@dataclass(frozen=True)
class _Form:
    """A list of calls in one format, as texts and marks; %s in `begin` stands for the name."""

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


# The mark before calls, and whether calls without the mark may begin an answer.
_MARKS = {
    "hermes": ("<tool_call>", False),
    "llama3_json": ("<|python_tag|>", True),
    "mistral": ("[TOOL_CALLS]", False),
}


def calls_only(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """Return a grammar for an answer of one or more calls.

    Args:
        form: name of the format.
        tools: the tools that the model may call.
        several: allow more than one call.
        tokens: special tokens that are marks, by their texts.

    Raises:
        RequestError: this format has no grammar.
    """
    if form not in _FORMS:
        raise RequestError(
            "tool_choice requires a call, but this model's format for calls is unknown; "
            f"start the server with --tool-parser {', '.join(_FORMS)}",
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
    """Extend a grammar, so that the answer may also be calls; arguments as in `calls_only`.

    Raises:
        RequestError: this format has no grammar.
    """
    if form not in _FORMS:
        raise RequestError(
            f"{grammar.param} constrains the answer, so the model could never call a tool; to "
            f"combine both, start the server with --tool-parser {', '.join(_FORMS)}",
            param=grammar.param,
            code="unsupported_value",
        )
    calls = json.dumps(_calls(_FORMS[form], tools, several, tokens))
    return msgspec.structs.replace(grammar, instead=calls)


def strict_calls(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """Return a grammar for a free answer, whose calls match the tools' schemas.

    The arguments are as in `calls_only`.

    Raises:
        RequestError: this format has no grammar.
    """
    if form not in _FORMS:
        raise RequestError(
            "a tool is strict, but this model's format for calls has no grammar: remove strict, or "
            f"start the server with --tool-parser {', '.join(_FORMS)}",
            param="tools",
            code="unsupported_value",
        )
    written = _FORMS[form]
    mark, at_start = _MARKS[form]
    text = {"type": "any_text", "excludes": [mark]}
    if at_start:  # either the whole answer is calls, or it must not begin like a call
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
    """Extend a grammar, so that a thought may precede the answer.

    Args:
        grammar: constrains the answer without its thought.
        form: the marks around the thought.
        tokens: special tokens that are marks, by their texts.
        opened: the prompt ends within the thought; else the thought is optional.
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
    """Return the format for one call to any tool, or for several calls."""
    call = _any_call(form, tools, tokens)
    more = {"type": "star", "content": _sequence(_text(form.separator), call)}
    return _sequence(
        *(_mark(text, tokens) for text in form.before),
        call,
        *([more] if several else ()),
        *(_mark(text, tokens) for text in form.after),
    )


def _any_call(form: _Form, tools: Sequence[Offered], tokens: Mapping[str, int]) -> Format:
    """Return the format for one call to any tool."""
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
    """Return a mark in the form for the ends of a tag."""
    return _mark(text, tokens) if text in tokens else text


def _text(text: str) -> Format:
    return {"type": "const_string", "value": text}


def _tag(form: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": form})
