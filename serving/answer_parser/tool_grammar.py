"""What an answer must be for its calls to be as they were asked for: a grammar for the sampler.

It is a structural tag of xgrammar: the format's own marks, with the schema of the tool's
parameters between them, so that `ToolCallParser` finds the calls in what comes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import RequestError
from weft.serving.answer_parser.reasoning import ReasoningFormat
from weft.serving.sampling_params import Grammar


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
    """How a format writes a list of calls; `call` has a place for the name."""

    call: str
    end: str
    separator: str
    before: str = ""
    after: str = ""


_FORMS = {
    "hermes": _Form('<tool_call>\n{"name": "%s", "arguments": ', "}\n</tool_call>", "\n"),
    "llama3_json": _Form('{"name": "%s", "parameters": ', "}", "; "),
    "mistral": _Form('{"name": "%s", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]"),
}


def calls_only(
    form: str | None, tools: Sequence[Offered], *, several: bool, thought: Thought | None
) -> Grammar:
    """An answer that is calls, at least one.

    Args:
        form: the format's name.
        tools: that may be called.
        several: there may be more than one call.
        thought: that may come first.

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
    calls = {
        "type": "tags_with_separator",
        "tags": [_tag(written, tool) for tool in tools],
        "separator": written.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    parts = [_text(written.before), calls, _text(written.after)]
    if thought is not None:
        parts.insert(0, thought.format)
    elements = [part for part in parts if part is not None]
    return _grammar({"type": "sequence", "elements": elements})


@dataclass(frozen=True)
class Thought:
    """What comes before the calls: `opened` when the prompt has begun it."""

    form: ReasoningFormat
    opened: bool

    @property
    def format(self) -> dict[str, Any]:
        """In the words of structural tags."""
        begin = "" if self.opened else self.form.open
        tag = {
            "type": "tag",
            "begin": begin,
            "content": {"type": "any_text"},
            "end": self.form.close,
        }
        spaced = {"type": "sequence", "elements": [tag, {"type": "regex", "pattern": "\\n{0,2}"}]}
        return spaced if self.opened else {"type": "optional", "content": spaced}


def strict_calls(form: str | None, tools: Sequence[Offered]) -> Grammar | None:
    """A free answer whose calls have arguments of the tools' schemas; None if that cannot be."""
    if form != "hermes":
        return None
    tags = [_tag(_FORMS[form], tool) for tool in tools]
    return _grammar({"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags})


def _tag(form: _Form, tool: Offered) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": tool.schema}
    return {"type": "tag", "begin": form.call % tool.name, "content": content, "end": form.end}


def _text(text: str) -> dict[str, Any] | None:
    return {"type": "const_string", "value": text} if text else None


def _grammar(form: dict[str, Any]) -> Grammar:
    try:
        text = json.dumps({"type": "structural_tag", "format": form})
    except RecursionError:
        raise RequestError("tools are nested too deeply", param="tools") from None
    return Grammar("structural_tag", text, "tools")
