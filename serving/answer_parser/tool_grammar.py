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
from weft.serving.answer_parser.reasoning import ReasoningFormat
from weft.serving.sampling_params import Grammar

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
    written = _FORMS[form]
    call = _any_call(written, tools, tokens)
    more = {"type": "star", "content": _sequence(_text(written.separator), call)}
    return _grammar(
        _sequence(
            *(_mark(text, tokens) for text in written.before),
            call,
            *([more] if several else ()),
            *(_mark(text, tokens) for text in written.after),
        )
    )


def strict_calls(
    form: str | None, tools: Sequence[Offered], tokens: Mapping[str, int]
) -> Grammar | None:
    """A free answer whose calls have arguments of the tools' schemas; None if that cannot be."""
    if form != "hermes":
        return None
    text = {"type": "any_text", "excludes": ["<tool_call>"]}
    call = _any_call(_FORMS[form], tools, tokens)
    return _grammar(_sequence(text, {"type": "star", "content": _sequence(call, text)}))


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


def _grammar(form: Format) -> Grammar:
    try:
        text = json.dumps({"type": "structural_tag", "format": form})
    except RecursionError:
        raise RequestError("tools are nested too deeply", param="tools") from None
    return Grammar("structural_tag", text, "tools")
