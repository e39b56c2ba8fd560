"""The grammar of forced and strict calls admits what the parser reads, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from weft.errors import RequestError
from weft.serving.answer_parser.pieces import Call, ParsedAnswer
from weft.serving.answer_parser.reasoning import REASONING_FORMATS
from weft.serving.answer_parser.tool_calls import TOOL_FORMATS, ToolCallParser
from weft.serving.answer_parser.tool_grammar import Offered, Thought, calls_only, strict_calls
from weft.serving.sampling_params import Grammar

INTEGER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
TOOLS = [Offered("f", INTEGER), Offered("g", {"type": "object", "properties": {}})]
THINK = REASONING_FORMATS["think"]
F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
END = 256


@pytest.fixture(scope="module")
def compiler() -> xgrammar.GrammarCompiler:
    """For a vocabulary of bytes."""
    tokens = [*(bytes([i]) for i in range(END)), b""]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def admits(compiler: xgrammar.GrammarCompiler, grammar: Grammar, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(grammar.text))
    return all(matcher.accept_token(token) for token in [*text.encode(), END])


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
        ({"thought": Thought(THINK, opened=True)}, f"hm</think>\n\n{F}", True),
        ({"thought": Thought(THINK, opened=True)}, F, False),
        ({"thought": Thought(THINK, opened=False)}, f"<think>hm</think>{F}", True),
        ({"thought": Thought(THINK, opened=False)}, F, True),
        ({"thought": Thought(THINK, opened=False)}, f"hm</think>{F}", False),
    ],
)
def test_calls_only(
    compiler: xgrammar.GrammarCompiler, settings: dict[str, Any], text: str, good: bool
) -> None:
    settings = {"several": True, "thought": None} | settings
    assert admits(compiler, calls_only("hermes", TOOLS, **settings), text) == good


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
    assert admits(compiler, calls_only(form, TOOLS, several=True, thought=None), text)
    parser = ToolCallParser(TOOL_FORMATS[form], ("f", "g"))
    answer = ParsedAnswer()
    answer.add([*parser.push(text), *parser.flush()])
    assert answer == ParsedAnswer("", "", [Call("f", '{"x": 1}'), Call("g", "{}")])


def test_strict_calls(compiler: xgrammar.GrammarCompiler) -> None:
    grammar = strict_calls("hermes", TOOLS)
    assert grammar is not None
    for text, good in (
        ("hello <b>", True),
        (f"hello {F} and {G}", True),
        (F.replace("1", '"a"'), False),
    ):
        assert admits(compiler, grammar, text) == good
    assert strict_calls("pythonic", TOOLS) is None


@pytest.mark.parametrize("form", [None, "pythonic"])
def test_a_format_that_cannot_be_forced(form: str | None) -> None:
    with pytest.raises(RequestError, match="--tool-parser"):
        calls_only(form, TOOLS, several=True, thought=None)


def test_parameters_that_are_nested_too_deeply() -> None:
    schema: Any = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="nested"):
        strict_calls("hermes", [Offered("f", schema)])
    assert json.loads(calls_only("hermes", TOOLS, several=True, thought=None).text)
