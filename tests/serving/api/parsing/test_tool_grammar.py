"""The grammar of forced and strict calls admits what the parser reads, and nothing else."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import xgrammar

from weft.errors import RequestError
from weft.serving.api.parsing.formats import REASONING_FORMATS, TOOL_FORMATS
from weft.serving.api.parsing.pieces import Answer, Call
from weft.serving.api.parsing.tool_calls import ToolCallParser
from weft.serving.api.parsing.tool_grammar import (
    Offered,
    after_thought,
    calls_only,
    or_calls,
    strict_calls,
)
from weft.serving.engine.grammar.structural_tag import as_format, preceded, tag_of
from weft.serving.engine.sampling_params import Grammar

INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [Offered("f", INTEGER), Offered("g", {"type": "object", "properties": {}})]
THINK = REASONING_FORMATS["think"]
F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
END, TOKENS = 256, {"<tool_call>": 257, "</tool_call>": 258, "</think>": 259, "[TOOL_CALLS]": 260}


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """For a vocabulary of bytes and of marks."""
    marks = [b"\xff" + text.encode() for text in TOKENS]
    tokens = [*(bytes([i]) for i in range(END)), b"", *marks]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def admits(compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str) -> bool:
    """With each mark in the text as its token, where that is written as {mark}."""
    form = preceded(as_format(grammar, lambda token: int(token)), grammar.before)
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag_of(form)))
    pieces = re.split(r"\{([^{}\s]+)\}", text)
    tokens = [
        token
        for i, piece in enumerate(pieces)
        for token in ([TOKENS[piece]] if i % 2 else piece.encode())
    ]
    return all(matcher.accept_token(token) for token in [*tokens, END])


def thinking(*, opened: bool, tokens: dict[str, int] | None = None) -> Grammar:
    """Calls behind a thought."""
    grammar = calls_only("hermes", TOOLS, several=True, tokens={})
    return after_thought(grammar, THINK, tokens or {}, opened=opened)


@pytest.mark.parametrize(
    ("settings", "text", "good"),
    [
        ({}, F, True),
        ({}, f"{F}\n{G}", True),
        ({}, "hello", False),
        ({}, f"hello {F}", False),
        ({}, F.replace("1", '"a"'), False),
        ({}, F.replace('"f"', '"h"'), False),
        ({"several": False}, F, True),
        ({"several": False}, f"{F}\n{G}", False),
    ],
)
def test_calls_only(
    compiler: xgrammar.GrammarCompiler, settings: dict[str, Any], text: str, good: bool
) -> None:
    settings = {"several": True, "tokens": {}} | settings
    assert admits(compiler, calls_only("hermes", TOOLS, **settings), text) == good


@pytest.mark.parametrize(
    ("grammar", "text", "good"),
    [
        (thinking(opened=True), f"hm</think>\n\n{F}", True),
        (thinking(opened=True), F, False),
        (thinking(opened=True), f"hm</think>hm{F}", False),
        (thinking(opened=True, tokens=TOKENS), f"hm{{</think>}}{F}", True),
        (thinking(opened=True, tokens=TOKENS), f"hm</think>{F}", False),
        (thinking(opened=True, tokens=TOKENS), f"hm{{<tool_call>}}{{</think>}}{F}", False),
        (thinking(opened=False), f"<think>hm</think>{F}", True),
        (thinking(opened=False), F, True),
        (thinking(opened=False), f"hm</think>{F}", False),
    ],
)
def test_a_thought_comes_first(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str, good: bool
) -> None:
    assert admits(compiler, grammar, text) == good


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "ab+"),
        Grammar("ebnf", 'root ::= "a" more\nmore ::= "b" | "b" more'),
        Grammar("choice", '["ab", "abb"]'),
        Grammar("json_schema", '{"enum": [12, 122]}'),
        Grammar("json_object"),
        Grammar(
            "structural_tag",
            '{"type": "structural_tag", "format": {"type": "const_string", "value": "ab"}}',
        ),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_every_kind_of_grammar_may_follow_one(
    compiler: xgrammar.GrammarCompiler, grammar: Grammar
) -> None:
    text = {"json_schema": "12", "json_object": '{"a": []}'}.get(grammar.kind, "ab")
    thoughtful = after_thought(grammar, THINK, TOKENS, opened=True)
    assert admits(compiler, grammar, text)
    assert admits(compiler, thoughtful, f"hm{{</think>}}\n{text}")
    assert not admits(compiler, thoughtful, f"{text}")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '{<tool_call>}\n{"name": "g", "arguments": {}}\n{</tool_call>}'),
        ("mistral", '{[TOOL_CALLS]}[{"name": "g", "arguments": {}}]'),
    ],
)
def test_marks_that_are_tokens(compiler: xgrammar.GrammarCompiler, form: str, text: str) -> None:
    grammar = calls_only(form, TOOLS, several=True, tokens=TOKENS)
    assert admits(compiler, grammar, text)
    for mark in TOKENS:
        text = text.replace(f"{{{mark}}}", mark)
    assert not admits(compiler, grammar, text)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f"{F}\n{G}"),
        (
            "llama3_json",
            '{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        ),
    ],
)
def test_the_parser_reads_what_it_admits(
    compiler: xgrammar.GrammarCompiler, form: str, text: str
) -> None:
    assert admits(compiler, calls_only(form, TOOLS, several=True, tokens={}), text)
    parser = ToolCallParser(TOOL_FORMATS[form], {"f": {}, "g": {}})
    answer = Answer([*parser.push(text), *parser.flush()])
    assert (answer.content, answer.reasoning) == ("", "")
    assert answer.calls == [Call("f", '{"x": 1}'), Call("g", "{}")]


def test_strict_calls(compiler: xgrammar.GrammarCompiler) -> None:
    grammar = strict_calls("hermes", TOOLS, several=True, tokens={})
    for text, good in (
        ("hello <b>", True),
        (f"hello {F} and {G}", True),
        (F.replace("1", '"a"'), False),
        (f"hello {F}<tool_call>", False),
    ):
        assert admits(compiler, grammar, text) == good
    grammar = strict_calls("hermes", TOOLS, several=True, tokens=TOKENS)
    for text, good in (
        ("hello", True),
        ('{<tool_call>}\n{"name": "f", "arguments": {"x": 1}}\n{</tool_call>} and', True),
        ('{<tool_call>}\n{"name": "f", "arguments": {"x": "a"}}\n{</tool_call>}', False),
        ("hello {<tool_call>} you", False),
        (F, False),
    ):
        assert admits(compiler, grammar, text) == good


@pytest.mark.parametrize(
    ("form", "text", "good"),
    [
        ("mistral", 'hello [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', True),
        ("mistral", 'hello [TOOL_CALLS][{"name": "f", "arguments": {"x": "a"}}]', False),
        ("mistral", "hello [", True),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', True),
        ("llama3_json", '{"name": "f", "parameters": {"x": "a"}}', False),
        ("llama3_json", ' {"name": "f", "parameters": {"x": "a"}}', False),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"x": "a"}}', False),
        ("llama3_json", 'hello <|python_tag|>{"name": "f", "parameters": {"x": "a"}}', False),
        ("llama3_json", 'hello {"a": 1}', True),
        ("llama3_json", "", True),
    ],
)
def test_strict_calls_of_other_formats(
    compiler: xgrammar.GrammarCompiler, form: str, text: str, good: bool
) -> None:
    assert admits(compiler, strict_calls(form, TOOLS, several=True, tokens={}), text) == good


@pytest.mark.parametrize(
    ("form", "text", "good"),
    [
        ("hermes", "hello", True),
        ("hermes", f"hello {F} and", True),
        ("hermes", f"hello {F} and {G}", False),
        ("hermes", f"{F}\n{G}", False),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]', True),
        ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}}, {"name": "g"', False),
        ("llama3_json", '{"name": "f", "parameters": {"x": 1}}', True),
        ("llama3_json", '{"name": "g", "parameters": {}}; {"name": "g", "parameters": {}}', False),
    ],
)
def test_one_strict_call(
    compiler: xgrammar.GrammarCompiler, form: str, text: str, good: bool
) -> None:
    assert admits(compiler, strict_calls(form, TOOLS, several=False, tokens={}), text) == good


@pytest.mark.parametrize(
    ("settings", "text", "good"),
    [
        ({}, '{"a": [true]}', True),
        ({}, f"{F}\n{G}", True),
        ({}, '{"a": 1}', False),
        ({}, F.replace("1", '"a"'), False),
        ({}, f'{F}\n{{"a": [true]}}', False),
        ({}, "hello", False),
        ({"several": False}, F, True),
        ({"several": False}, f"{F}\n{G}", False),
        ({"form": "mistral"}, '[TOOL_CALLS][{"name": "g", "arguments": {}}]', True),
        ({"form": "llama3_json"}, '{"name": "f", "parameters": {"x": 1}}', True),
        ({"form": "llama3_json"}, '{"name": "f", "parameters": {"x": "a"}}', False),
        ({"form": "llama3_json"}, '{"a": [true]}', True),
    ],
)
def test_calls_or_what_a_schema_says(
    compiler: xgrammar.GrammarCompiler, settings: dict[str, Any], text: str, good: bool
) -> None:
    a = {"type": "array", "items": {"type": "boolean"}}
    schema = {"type": "object", "properties": {"a": a}, "required": ["a"]}
    grammar = Grammar("json_schema", json.dumps(schema), "response_format")
    asked = {"form": "hermes", "several": True, "tokens": {}} | settings
    both = or_calls(grammar, tools=TOOLS, **asked)
    assert admits(compiler, both, text) == good
    thoughtful = after_thought(both, THINK, {}, opened=True)
    assert admits(compiler, thoughtful, f"hm</think>{text}") == good


def test_an_unknown_format_cannot_be_forced() -> None:
    form = None
    with pytest.raises(RequestError, match="--tool-parser"):
        calls_only(form, TOOLS, several=True, tokens={})
    with pytest.raises(RequestError, match=r"tool is strict.*--tool-parser"):
        strict_calls(form, TOOLS, several=True, tokens={})
    with pytest.raises(RequestError, match=r"regex constrains the answer.*--tool-parser"):
        or_calls(Grammar("regex", "a", "regex"), form, TOOLS, several=True, tokens={})
