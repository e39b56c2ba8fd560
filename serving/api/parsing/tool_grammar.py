"""Grammars for well-formed tool calls in an answer.

Each is a structural tag for xgrammar: the format's own texts, with the tool's parameter schema
between them. The parsers therefore find the calls in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from weft.errors import RequestError
from weft.serving.api.parsing.formats import (
    HARMONY_FINAL,
    HARMONY_NEXT,
    TOOL_FORMATS,
    Parameters,
    ReasoningFormat,
    ToolFormat,
)
from weft.serving.api.parsing.grammar_parts import (
    Format,
    either,
    literal,
    optional,
    regex,
    sequence,
    star,
)
from weft.serving.api.parsing.schema_grammar import Arguments
from weft.serving.engine.sampling_params import Grammar

ANY_OBJECT = {"type": "object", "additionalProperties": True}
"""The schema of arguments that are not constrained."""
INPUT = "input"
"""The only argument of a tool that takes a text."""


@dataclass(frozen=True)
class InputGrammar:
    """The grammar for a tool's text.

    Attributes:
        syntax: how the grammar is written.
        definition: the grammar.
    """

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True)
class Offered:
    """A tool for the model.

    Attributes:
        name: the function's name.
        schema: the arguments' JSON schema.
        input_grammar: grammar for INPUT, then the only argument.
    """

    name: str
    schema: dict[str, Any]
    input_grammar: InputGrammar | None = None


def calls_only(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """Return a grammar for an answer of one or more calls.

    Args:
        form: name of the format.
        tools: the tools that the model may call.
        several: allow more than one call.
        tokens: the marks' special tokens, by text.

    Raises:
        RequestError: the format is unknown, or cannot enforce a tool's schema.
    """
    known = _known(form, tokens, "tool_choice requires a call", "tool_choice")
    return Grammar("structural_tag", _tag(_Calls(known, tokens).several(tools, several)), "tools")


def or_calls(
    grammar: Grammar,
    form: str | None,
    tools: Sequence[Offered],
    *,
    several: bool,
    tokens: Mapping[str, int],
) -> Grammar:
    """Extend a grammar: the answer may also be calls; args as `calls_only`."""
    known = _known(form, tokens, f"{grammar.param} constrains the answer", grammar.param)
    calls = json.dumps(_Calls(known, tokens).several(tools, several))
    return msgspec.structs.replace(grammar, instead=calls)


def strict_calls(
    form: str | None, tools: Sequence[Offered], *, several: bool, tokens: Mapping[str, int]
) -> Grammar:
    """Return a grammar for a free answer with calls that match the schemas; see `calls_only`."""
    known = _known(form, tokens, "a tool is strict", "tools")
    free = _Calls(known, tokens).among_text(tools, several)
    return Grammar("structural_tag", _tag(free), "tools")


def after_thought(
    grammar: Grammar, form: ReasoningFormat, tokens: Mapping[str, int], *, opened: bool
) -> Grammar:
    """Extend a grammar, so that a thought may precede the answer.

    Args:
        grammar: constrains the answer without its thought.
        form: the format for thoughts.
        tokens: the marks' special tokens, by text.
        opened: the prompt ends within the thought; else the thought is optional.
    """
    thought = _until(form.close, tokens)
    if form.channels:
        more = star(sequence(literal(form.open, tokens), thought))
        before = sequence(thought, more) if opened else more
    else:
        before = sequence(thought, regex("\\n{0,2}"))
        if form.answer[0]:  # the answer ends with the grammar, without its closing text
            answer = sequence(literal(form.answer[0], tokens), regex("\\n?"))
            before = sequence(before, optional(answer))
        if not opened:
            before = optional(sequence(literal(form.open, tokens), before))
    return msgspec.structs.replace(grammar, before=json.dumps(before))


def final_answer(grammar: Grammar, tokens: Mapping[str, int]) -> Grammar:
    """Extend a grammar for an answer's content by harmony's header for it."""
    return msgspec.structs.replace(grammar, header=json.dumps(literal(HARMONY_FINAL, tokens)))


def _known(form: str | None, tokens: Mapping[str, int], why: str, param: str) -> ToolFormat:
    """Return the format with this name, for a model with these special tokens."""
    if form is None:
        raise RequestError(
            f"{why}, but this model's format for calls is unknown; start the server with one of "
            f"--tool-parser {', '.join(TOOL_FORMATS)}",
            param=param,
            code="unsupported_value",
        )
    known = TOOL_FORMATS[form]
    return known.newer if known.newer is not None and known.newer_token in tokens else known


class _Calls:
    """The formats for calls to some tools.

    Args:
        form: how calls are written.
        tokens: the marks' special tokens, by text.
    """

    def __init__(self, form: ToolFormat, tokens: Mapping[str, int]) -> None:
        self._form = form
        self._tokens = tokens

    def several(self, tools: Sequence[Offered], several: bool) -> Format:
        """Return the format for one call to any tool, or for several calls."""
        form = self._form
        call = either(*map(self._call, tools))
        more = [star(sequence(self._text(form.separator), call))] if several else []
        return sequence(self._text(form.section[0]), call, *more, self._text(form.section[1]))

    def among_text(self, tools: Sequence[Offered], several: bool) -> Format:
        """Return the format for a free answer with calls."""
        form = self._form
        if form.syntax == "harmony":
            return self._among_messages(tools, several)
        # If the mark contains a token, text must not have that token at all: xgrammar takes a
        # token for text unless its own text is excluded.
        mark = next((token for token in self._tokens if token in form.mark), form.mark)
        text: Format = {"type": "any_text", "excludes": [mark] if mark else []}
        if form.at_start:  # either the whole answer is calls, or it must not begin like a call
            other = sequence(regex(rf"[^\{form.first[0]}<\s]"), text)
            return either(self.several(tools, several), optional(other))
        calls = self.several(tools, several and bool(form.section[1]))
        times = star if several else optional
        return sequence(text, times(sequence(calls, text)))

    def _among_messages(self, tools: Sequence[Offered], several: bool) -> Format:
        """Return the format for messages in channels; the last is content or calls."""
        preamble = sequence(
            self._text("<|channel|>commentary<|message|>"), _until(HARMONY_NEXT, self._tokens)
        )
        final = sequence(self._text(HARMONY_FINAL), {"type": "any_text"})
        return sequence(star(preamble), either(self.several(tools, several), final))

    def _call(self, tool: Offered) -> Format:
        form = self._form
        names = form.name.replace("%s", tool.name).split("%d")
        name = [self._text(names[0])]
        for part in names[1:]:
            name += (regex("[0-9]+"), self._text(part))
        return sequence(
            self._text(form.call[0]),
            *name,
            self._text(form.call[1]),
            self._arguments(tool),
            self._text(form.call[2]),
        )

    def _arguments(self, tool: Offered) -> Format:
        form, place = self._form, f"tools: {tool.name}"
        if tool.input_grammar is not None:
            return self._input(tool.input_grammar, place)
        if form.syntax == "gemma":
            return Arguments(tool.schema, place, self._tokens, form.quote).gemma()
        if form.syntax == "python":
            arguments = Arguments(tool.schema, place, self._tokens).python()
            return sequence(self._text("("), arguments, self._text(")"))
        found: Format = {"type": "json_schema", "json_schema": tool.schema, "of": place}
        if form.parameters is not None:
            written = form.parameters.open + form.parameters.middle + form.parameters.close
            special = next((mark for mark in self._tokens if mark in written), None)
            if special is not None and tool.schema == ANY_OBJECT:
                return self._any_parameters(form.parameters)
            if special is not None:
                raise RequestError(
                    f"{special!r} is a special token of this model, so its format for calls cannot "
                    "be enforced: remove strict, or use tool_choice auto",
                    param="tools",
                    code="unsupported_value",
                )
            found |= {"style": form.parameters.style, "excludes": [form.parameters.close]}
        return found

    def _any_parameters(self, form: Parameters) -> Format:
        """Return the format for any parameters; their marks may be tokens."""
        parts = [self._text(form.open), _until(form.middle, self._tokens)]
        if form.typed:
            parts.append(either(self._text(f"true{form.typed}"), self._text(f"false{form.typed}")))
        parts += (_until(form.close, self._tokens), regex("\\n?"))
        return star(sequence(*parts))

    def _input(self, grammar: InputGrammar, place: str) -> Format:
        """Return the format for arguments with one text, constrained by a grammar."""
        form = self._form
        writing = "json"
        match form.syntax:
            case "parameters":
                assert form.parameters is not None
                parts, end = form.parameters, "\n" if form.parameters.newlines else ""
                typed = f"true{parts.typed}" if parts.typed else ""
                around = (parts.open + INPUT + parts.middle + typed + end, end + parts.close)
                writing = "plain"
            case "gemma":
                around = (f"{{{INPUT}:{form.quote}", f"{form.quote}}}")
                writing = "plain"
            case "python":
                around = (f'({INPUT}="', '")')
            case _:
                around = (f'{{"{INPUT}": "', '"}')
        text: Format = {
            "type": "grammar",
            "grammar": grammar.definition,
            "syntax": grammar.syntax,
            "writing": writing,
            "of": place,
        }
        space = [regex("\\n?")] if form.syntax == "parameters" else []
        return sequence(self._text(around[0]), text, self._text(around[1]), *space)

    def _text(self, text: str) -> Format:
        return literal(text, self._tokens)


def _until(end: str, tokens: Mapping[str, int]) -> Format:
    """Return the format for any text up to a mark."""
    mark = literal(end, tokens)
    if mark["type"] == "const_string":
        return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    if mark["type"] == "token":
        return {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": mark}
    return sequence({"type": "any_text"}, mark)


def _tag(form: Format) -> str:
    return json.dumps({"type": "structural_tag", "format": form})
