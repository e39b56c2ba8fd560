"""Streamed equals unstreamed, and nothing is lost, for any text in any format, cut anywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tokenizers import write_byte_level

from weft.serving.api.parsing.formats import REASONING_FORMATS, TOOL_FORMATS, Place
from weft.serving.api.parsing.parser import AnswerFormat, AnswerParser, Stage
from weft.serving.api.parsing.pieces import Answer, Arguments, Call, CallStart, Content, merged
from weft.serving.api.parsing.reasoning import ReasoningParser
from weft.serving.api.parsing.tool_calls import ToolCallParser
from weft.serving.engine import tokenizer as tokenizer_module
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import Tokenizer

NAMES = ("f", "get_weather")
TOOLS: dict[str, dict[str, Any]] = {name: {} for name in NAMES}
MARKS = (
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<think>", "</think>", "[THINK]", "[/THINK]", "<answer>", "</answer>",
    "Here is my thought process:", "Here is my response:", "<tool_calls>[", "</tool_calls>",
    "<|tool_call|>", "functools[", "<function_calls>", "</function_calls>",
)  # fmt: skip
PARTS = (
    *MARKS, '{"name": "f", "arguments": {', '{"name": "f", "parameters": {}}', '"arguments": ',
    '"x": [1, 2.5e3, true, null, "a\\n\\u00e9"]', "}", "]", "[", "{", ";", ",", "\n", "  ", '"',
    "[f(x=1)]", "[f(", "f", "get_weather", '"name": "nobody"', "'", "\\", "é", "😀", "\x00", "hm",
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(MARKS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=14).map("".join) | (
    # What begins like a call, and goes wrong somewhere.
    st.tuples(
        st.sampled_from(
            ["", "<tool_call>", "[TOOL_CALLS][", "[TOOL_CALLS]f[ARGS]", " ", "functools["]
        ),
        JSON.map(lambda value: json.dumps({"name": "f", "arguments": {"x": value}})),
        st.integers(0, 60),
        st.sampled_from(PARTS) | st.text(max_size=2),
    ).map(lambda made: made[0] + made[1][: made[2]] + made[3] + made[1][made[2] :])
)


def make(tools: str | None, reasoning: str | None = None, **settings: bool) -> AnswerParser:
    """A parser; `parallel` as the part has it. The prompt ends within or after a thought."""
    place: Place = "within" if settings.pop("opened", False) else "before"
    place = "after" if settings.pop("closed", False) else place
    stages: list[Stage] = []
    if reasoning is not None:
        stages.append(ReasoningParser(REASONING_FORMATS[reasoning], place=place))
    if tools is not None:
        stages.append(ToolCallParser(TOOL_FORMATS[tools], TOOLS, **settings))
    return AnswerParser(stages)


def parse(parser: AnswerParser, *chunks: str) -> Answer:
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return Answer(merged([*pieces, *parser.flush()]))


def parts(answer: Answer) -> tuple[str, str, list[Call]]:
    return answer.content, answer.reasoning, answer.calls


def cut(text: str, cuts: list[int]) -> Iterator[str]:
    """The text, cut at the places that `cuts` names (modulo its length)."""
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    yield from (text[a:b] for a, b in pairwise(places))


@settings(max_examples=400, deadline=None)
@given(
    text=TEXTS,
    tools=st.sampled_from([None, *TOOL_FORMATS]),
    reasoning=st.sampled_from([None, *REASONING_FORMATS]),
    place=st.sampled_from(["opened", "closed", ""]),
    parallel=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
def test_streamed_equals_unstreamed(
    text: str,
    tools: str | None,
    reasoning: str | None,
    place: str,
    parallel: bool,
    cuts: list[int],
) -> None:
    def fresh() -> AnswerParser:
        how = {place: True} if place else {}
        how |= {} if tools is None else {"parallel": parallel}
        return make(tools, reasoning, **how)

    whole = parse(fresh(), text)
    assert parse(fresh(), *cut(text, cuts)) == whole
    assert parse(fresh(), *text) == whole


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, tools=st.sampled_from([*TOOL_FORMATS]))
def test_what_is_no_call_is_content_as_it_was_written(text: str, tools: str) -> None:
    answer = parse(make(tools), text)
    if not answer.calls:
        assert answer.content == text


@settings(max_examples=150, deadline=None)
@given(
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=4), JSON, max_size=3)),
        min_size=1,
        max_size=3,
    ),
    content=st.sampled_from(["", "Let me see.", "a < b\n\nc"]),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
def test_calls_come_back_as_they_were_written(
    calls: list[tuple[str, dict[str, object]]], content: str, cuts: list[int]
) -> None:
    written = [Call(name, json.dumps(arguments)) for name, arguments in calls]
    for tools, text in {
        "hermes": f"{content}\n"
        + "\n".join(
            f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>'
            for c in written
        ),
        "mistral": f"{content}[TOOL_CALLS]["
        + ", ".join(f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in written)
        + "]",
        "granite": f"{content}<|tool_call|>["
        + ", ".join(f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in written)
        + "]",
        "hunyuan_a13b": f"{content}\n<tool_calls>\n["
        + ",\n".join(f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in written)
        + "]\n</tool_calls>",
        "phi4_mini_json": f"{content} functools["
        + ", ".join(f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in written)
        + "]",
        "llama3_json": f"{content}<|python_tag|>"
        + "; ".join(f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in written),
    }.items():
        answer = parse(make(tools), *cut(text, cuts))
        assert (answer.content, answer.calls) == (content, written), tools
    newer = content + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in written)
    assert parts(parse(make("mistral"), *cut(newer, cuts))) == (content, "", written)


def one(text: str, tools: str, **settings: bool) -> tuple[str, list[tuple[str, str]]]:
    answer = parse(make(tools, **settings), text)
    return answer.content, [(call.name, call.arguments) for call in answer.calls]


CALL = '{"name": "f", "arguments": {"x": 1}}'


@pytest.mark.parametrize(
    ("tools", "text", "content", "calls"),
    [
        # Whitespace beside calls belongs to the format.
        ("hermes", f"Hi \n<tool_call>\n{CALL}\n</tool_call>\n", "Hi", [("f", '{"x": 1}')]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\nBye", "\nBye", [("f", '{"x": 1}')]),
        # Marks in a string are text.
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
            "",
            [("f", '{"x": "</tool_call>"}')],
        ),
        # Keys in another order, arguments as text, none, and one more key.
        (
            "hermes",
            '<tool_call>{"arguments": "{\\"x\\": 1}", "name": "f"}</tool_call>',
            "",
            [("f", '{"x": 1}')],
        ),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        (
            "hermes",
            '<tool_call>{"id": 7, "name": "f", "arguments": {}, "type": "x"}</tool_call>',
            "",
            [("f", "{}")],
        ),
        # A model may call what was not offered, and forget the last mark.
        ("hermes", '<tool_call>{"name": "nobody"}', "", [("nobody", "{}")]),
        ("hermes", f"<tool_call>{CALL}", "", [("f", '{"x": 1}')]),
        ("hermes", f"<tool_call>{CALL}\n</tool_", "", [("f", '{"x": 1}')]),
        (
            "hermes",
            f'<tool_call>{CALL}\n<tool_call>\n{{"name": "g"}}</tool_call><tool_call>{CALL}',
            "",
            [("f", '{"x": 1}'), ("g", "{}"), ("f", '{"x": 1}')],
        ),
        # What follows one without its last mark, and is none.
        ("hermes", f"<tool_call>{CALL}\n<tool_call>[]", "\n<tool_call>[]", [("f", '{"x": 1}')]),
        ("hermes", f"<tool_call>{CALL} <tool_call>", " <tool_call>", [("f", '{"x": 1}')]),
        ("hermes", f"<tool_call>{CALL}</tool<tool_call>{CALL}", "</tool", [("f", '{"x": 1}')] * 2),
        # Cut off: before the arguments content, in them a call.
        ("hermes", '<tool_call>{"name": "f", "ar', '<tool_call>{"name": "f", "ar', []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x', "", [("f", '{"x')]),
        # Another call within one that is none, and after one.
        ("hermes", f"<tool_call> <tool_call>{CALL}", "<tool_call> ", [("f", '{"x": 1}')]),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"x": 1 2}}</tool_call><tool_call>' + CALL,
            "",
            [("f", '{"x": 1 2}}'), ("f", '{"x": 1}')],
        ),
        ("hermes", f"<tool_call>{CALL}x</tool_call>", "x</tool_call>", [("f", '{"x": 1}')]),
        (
            "mistral",
            "[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{}[TOOL_CALLS] f {}",
            "",
            [("f", "{}")] * 2,
        ),
        # JSON that is an answer, not a call: nobody offered `John`.
        ("llama3_json", '{"name": "John", "parameters": {}}', None, []),
        ("llama3_json", '{"f": 1}', None, []),
        ("pythonic", '[f(x=1, y=["a", {"b": -2.5}]), f()]', "",
         [("f", '{"x": 1, "y": ["a", {"b": -2.5}]}'), ("f", "{}")]),
        ("pythonic", "[f(x=open('/etc/passwd'))]", None, []),
        ("pythonic", "[f(1)]", None, []),
        ("pythonic", "[nobody()]", None, []),
        ("pythonic", "[f(x=1)] it is", None, []),
    ],
)  # fmt: skip
def test_calls(tools: str, text: str, content: str | None, calls: list[tuple[str, str]]) -> None:
    assert one(text, tools) == (text if content is None else content, calls)


@pytest.mark.parametrize(
    "call",
    [
        "",
        "f(1)",
        "[]",
        '"f"',
        '{"name": 1, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "a b", "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": 1}',
        '{"name": "f", "arguments": "[]"}',
        '{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}',
        '{"name": "f", "arguments": {x: 1}}',
        '{"name": "f", "arguments": {\'x\': 1}}',
        '{"name": "f" "arguments": {}}',
        '{"name": "f", }',
        '{"name": "\\x"}',
        '{"arguments": ' + "[" * 20_000 + "]" * 20_000 + ', "name": "f"}',
    ],
)
def test_a_malformed_call_is_content(call: str) -> None:
    text = f"a <tool_call>{call}</tool_call> b"
    assert one(text, "hermes") == (text, [])


def test_arguments_are_streamed() -> None:
    parser = make("hermes")
    text = '<tool_call>{"name": "f", "arguments": {"city": "Paris"}}</tool_call>'
    pieces = [parser.push(part) for part in re.findall(".{1,8}", text)]
    flat = [piece for some in pieces for piece in some]
    assert flat[0] == CallStart("f")
    fragments = [piece.text for piece in flat[1:] if isinstance(piece, Arguments)]
    assert len(fragments) == len(flat) - 1 > 2
    assert "".join(fragments) == '{"city": "Paris"}'


def test_only_what_may_be_a_mark_waits() -> None:
    parser = make("hermes", "think")
    assert parser.push("a") == [Content("a")]
    assert parser.push(" b <tool") == [Content(" b")]
    assert parser.push("s>") == [Content(" <tools>")]
    assert parser.flush() == []


def test_calls_after_the_first_are_left_out_if_there_may_be_one() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 2 + "ok"
    assert one(text, "hermes", parallel=False) == ("ok", [("f", '{"x": 1}')])


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n\nhello\n", False, "hm", "hello\n"),
        ("\n<think>hm", False, "hm", ""),
        ("hm\n</think>\nhello", True, "hm", "hello"),
        ("hm </thin", True, "hm </thin", ""),
        ("</think>hello", True, "", "hello"),
        ("hello <think>hm</think>", False, "", "hello <think>hm</think>"),
        (" <thin", False, "", " <thin"),
        ("<think></think>a</think>", False, "", "a</think>"),
    ],
)
def test_reasoning(text: str, opened: bool, reasoning: str, content: str) -> None:
    answer = parse(make("hermes", "think", opened=opened), *text)
    assert (answer.reasoning, answer.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "place", "reasoning", "content"),
    [
        ("<think>\nhm\n</think>\n<answer>\nhello\n</answer>", "", "hm", "hello"),
        ("hm\n</think>\n<answer>\nhello\n</answer>\n", "opened", "hm", "hello"),
        ("<answer>\nhello\n</answer>", "closed", "", "hello"),
        ("<answer>hello", "", "", "hello"),
        ("<answer>hello </answ", "closed", "", "hello </answ"),
        ("<think>hm</think> <answ", "", "hm", "<answ"),
        ("<think>hm</think>hello </answer>", "", "hm", "hello </answer>"),
        (" hello <answer>you</answer>", "closed", "", " hello <answer>you</answer>"),
        ("<answer>a</answer> b </answer>", "closed", "", "ab </answer>"),
        (" <thin", "", "", " <thin"),
    ],
)
def test_an_answer_between_texts_of_its_own(
    text: str, place: str, reasoning: str, content: str
) -> None:
    how = {place: True} if place else {}
    for chunks in ([text], list(text)):
        answer = parse(make("hunyuan_a13b", "hunyuan_a13b", **how), *chunks)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_calls_in_an_answer_between_texts_of_its_own() -> None:
    call = f"<tool_calls>[{CALL}]</tool_calls>"
    text = f"<think>\nhm\n</think>\n<answer>\n{call}\n</answer>"
    for chunks in ([text], list(text)):
        answer = parse(make("hunyuan_a13b", "hunyuan_a13b"), *chunks)
        assert parts(answer) == ("", "hm", [Call("f", '{"x": 1}')])


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ('<function_calls>f(x="a\\n", y=null)\n\n get_weather()\n</function_calls> ok', " ok", 2),
        ("<function_calls>\nother(x=[1, {'a': true}])</function_calls>", "", 1),
        ("<function_calls>f(x=1)", "", 1),
        ("a <function_calls>f(x=</function_calls> b", None, 0),
        ("a <function_calls>f(1)</function_calls> b", None, 0),
        ("a <function_calls>f[0](x=1)</function_calls> b", None, 0),
        ("a <function_calls></function_calls> b", None, 0),
        ("a <function_calls>f(x=1", None, 0),
    ],
)
def test_lines_of_python_calls(text: str, content: str | None, names: int) -> None:
    for chunks in ([text], list(text)):
        answer = parse(make("olmo3"), *chunks)
        assert answer.content == (text if content is None else content)
        assert len(answer.calls) == names
        assert all(json.loads(call.arguments) is not None for call in answer.calls)


def test_text_behind_a_section_without_its_end_is_content() -> None:
    text = f"<tool_calls>[{CALL}] and more"
    assert one(text, "hunyuan_a13b") == (" and more", [("f", '{"x": 1}')])


def test_a_call_within_a_thought_is_a_thought() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    answer = parse(make("hermes", "think"), f"<think>{call}</think>{call}")
    assert parts(answer) == ("", call, [Call("f", '{"x": 1}')])


def test_a_grammar_begins_where_the_thought_ends(tmp_path: Path) -> None:
    """Also where the prompt has the whole thought: another would be one too many."""
    form = AnswerFormat(Tokenizer.load(write_byte_level(tmp_path)), None, "think")
    grammar = Grammar("regex", "yes|no")

    def before(prompt: str) -> str:
        return form.after_thought(grammar, prompt).before

    assert json.loads(before("Is it?"))["type"] == "optional"
    (thought, _) = json.loads(before("Is it?<think>\n"))["elements"]
    assert (thought["begin"], thought["end"]) == ("", "</think>")
    assert form.after_thought(grammar, "Is it?<think>\n\n</think>\n\n") == grammar
    assert AnswerFormat(form.tokenizer, None, None).after_thought(grammar, "Is it?") == grammar


def test_the_tokenizer_knows_the_marks_of_every_format() -> None:
    formats = (*TOOL_FORMATS.values(), *REASONING_FORMATS.values())
    assert {mark for form in formats for mark in form.marks} == tokenizer_module.MARKS
