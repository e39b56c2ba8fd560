"""A custom tool: in every format its grammar holds, and its text comes back."""

from __future__ import annotations

import json

import pytest
import xgrammar
from support.patches import PATCH_GRAMMAR

from weft.serving.api.parsing.formats import TOOL_FORMATS, ToolFormat
from weft.serving.api.parsing.harmony import HarmonyParser
from weft.serving.api.parsing.pieces import Answer
from weft.serving.api.parsing.tool_calls import ToolCallParser
from weft.serving.api.parsing.tool_grammar import (
    ANY_OBJECT,
    InputGrammar,
    Offered,
    calls_only,
    strict_calls,
)
from weft.serving.api.responses.tool_input import ToolInput
from weft.serving.engine.grammar.structural_tag import as_format, tag_of
from weft.serving.engine.sampling_params import Grammar

PATCH = (
    "*** Begin Patch\n*** Update File: a/é.py\n@@ def f():\n-\tx = \"1\\n\"\n+  y = '日本😀'\n \n"
    "*** Add File: b\n+\n*** End Patch"
)
BAD = PATCH.replace("+  y", "y")
SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TOOL = Offered("apply_patch", SCHEMA, InputGrammar("lark", PATCH_GRAMMAR))
OTHER = Offered("other", ANY_OBJECT)
END = 256


def admits(grammar: Grammar, text: str, marks: tuple[str, ...] = ()) -> bool:
    """Whether a text matches as a whole; marks are single tokens."""
    tokens = [*(bytes([i]) for i in range(END)), b"", *(b"\xff" + m.encode() for m in marks)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    form = as_format(grammar, lambda token: int(token))
    matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(tag_of(form)))
    ids: list[int] = []
    while text:
        mark = next((m for m in sorted(marks, key=len, reverse=True) if text.startswith(m)), "")
        ids += [END + 1 + marks.index(mark)] if mark else text[0].encode()
        text = text[len(mark) or 1 :]
    return all(matcher.accept_token(token) for token in [*ids, END])


def call(form: ToolFormat, text: str) -> str:
    """A call to the tool, as the model's template would write it."""
    escaped = json.dumps(text, ensure_ascii=False)
    match form.syntax:
        case "parameters":
            assert form.parameters is not None
            parts, end = form.parameters, "\n" if form.parameters.newlines else ""
            typed = f"true{parts.typed}" if parts.typed else ""
            arguments = f"{parts.open}input{parts.middle}{typed}{end}{text}{end}{parts.close}\n"
        case "gemma":
            arguments = f"{{input:{form.quote}{text}{form.quote}}}"
        case "python":
            arguments = f"(input={escaped})"
        case _:
            arguments = f'{{"input": {escaped}}}'
    name = form.name.replace("%s", TOOL.name).replace("%d", "0")
    written = form.call[0] + name + form.call[1] + arguments + form.call[2]
    return form.section[0] + written + form.section[1]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("marks", [False, True], ids=["plain", "tokens"])
def test_every_format_holds_the_grammar_and_gives_the_text_back(name: str, marks: bool) -> None:
    form = TOOL_FORMATS[name]
    special = form.marks if marks else ()
    tokens = {mark: END + 1 + i for i, mark in enumerate(special)}
    if marks and form.newer is not None:
        form = form.newer
    forced = calls_only(name, [TOOL, OTHER], several=True, tokens=tokens)
    free = strict_calls(name, [TOOL, OTHER], several=True, tokens=tokens)
    for grammar in (forced, free):
        assert admits(grammar, call(form, PATCH), special)
        assert not admits(grammar, call(form, BAD), special)
    parser: HarmonyParser | ToolCallParser = (
        HarmonyParser("<|start|>assistant", {TOOL.name: SCHEMA})
        if form.syntax == "harmony"
        else ToolCallParser(form, {TOOL.name: SCHEMA})
    )
    answer = Answer([*parser.push(call(form, PATCH)), *parser.flush()])
    (found,) = answer.calls
    assert found.name == TOOL.name
    reader = ToolInput()
    assert reader.push(found.arguments) + reader.flush() == PATCH


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"b\\\\n\\n\\u00e9\\ud83d\\ude00"}', 'a"b\\n\né😀'),
        (' { "input" : "" } ', ""),
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut\\u00', "cut"),
        ('{"input": "a"} and more "text"', "a"),
        (
            '{"input": "\\\\d \\d \\ud83dx\\ud83d\\n\\udc00\\ud83d\\u0041 \\u00zz"}',
            "\\d d ?x?\n??A u00zz",
        ),
        ('{"patch": "a"}', '{"patch": "a"}'),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_the_text_in_arguments(arguments: str, text: str, size: int) -> None:
    """However the arguments are cut."""
    reader = ToolInput()
    parts = [arguments[i : i + size] for i in range(0, len(arguments), size)]
    assert "".join([*map(reader.push, parts), reader.flush()]) == text
