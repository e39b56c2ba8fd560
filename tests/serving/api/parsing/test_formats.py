"""Every format for calls: found in a template, read under all cuts, and enforced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args

import pytest
import xgrammar
from support.tokenizers import write_byte_level

from weft.errors import RequestError
from weft.serving.api.parsing.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    reasoning_format_in,
    tool_format_in,
)
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.parsing.pieces import Answer, merged
from weft.serving.api.parsing.tool_grammar import Offered, calls_only, strict_calls
from weft.serving.config.settings import ReasoningParser, ToolParser
from weft.serving.engine.grammar.structural_tag import as_format, preceded, tag_of
from weft.serving.engine.sampling_params import Grammar
from weft.serving.engine.tokenizer import Tokenizer

TOOLS = [
    Offered(
        "weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    ),
    Offered(
        "timer",
        {
            "type": "object",
            "properties": {"seconds": {"type": "integer"}},
            "required": ["seconds"],
        },
    ),
]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
CALLS = [("weather", {"city": "Bad Ems", "days": 3}), ("timer", {"seconds": 60})]

END = 256  # in a byte vocabulary
WRITTEN = {
    "openai": "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Bad Ems", "days": 3}<|end|><|start|>assistant<|channel|>commentary '
    'to=functions.timer <|constrain|>json<|message|>{"seconds": 60}',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Bad Ems", "days": 3}<|tool_call_end|>'
    "<|tool_call_begin|>functions.timer:1<|tool_call_argument_begin|>"
    '{"seconds": 60}<|tool_call_end|><|tool_calls_section_end|>',
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bad Ems</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="timer">\n'
    '<｜DSML｜parameter name="seconds" string="false">60</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    '```json\n{"city": "Bad Ems", "days": 3}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>timer\n```json\n"
    '{"seconds": 60}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Bad Ems", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>timer<｜tool▁sep｜>'
    '{"seconds": 60}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n'
    '<parameter name="city">Bad Ems</parameter>\n<parameter name="days">3</parameter>\n'
    '</invoke>\n<invoke name="timer">\n<parameter name="seconds">60</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=weather>\n<parameter=city>Bad Ems</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n<function=timer>\n"
    "<parameter=seconds>60</parameter>\n</function>\n</seed:tool_call>",
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bad Ems</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
    "<tool_call>timer\n<arg_key>seconds</arg_key>\n<arg_value>60</arg_value>\n</tool_call>",
    "glm47": "<tool_call>weather<arg_key>city</arg_key><arg_value>Bad Ems</arg_value>"
    "<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>"
    "<tool_call>timer<arg_key>seconds</arg_key><arg_value>60</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBad Ems\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=timer>\n<parameter=seconds>\n60\n</parameter>\n</function>\n"
    "</tool_call>",
    "gemma4": '<|tool_call>call:weather{city:<|"|>Bad Ems<|"|>,days:3}<tool_call|>'
    "<|tool_call>call:timer{seconds:60}<tool_call|>",
    "functiongemma": "<start_function_call>call:weather{city:<escape>Bad Ems<escape>,days:3}"
    "<end_function_call><start_function_call>call:timer{seconds:60}<end_function_call>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Bad Ems", "days": 3}}, '
    '{"name": "timer", "arguments": {"seconds": 60}}]',
    "hunyuan_a13b": '<tool_calls>[{"name": "weather", "arguments": {"city": "Bad Ems", "days": 3}}'
    ', {"name": "timer", "arguments": {"seconds": 60}}]</tool_calls>',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": {"city": "Bad Ems", "days": 3}}, '
    '{"name": "timer", "arguments": {"seconds": 60}}]',
    "phi4_mini_json": 'functools[{"name": "weather", "arguments": {"city": "Bad Ems", "days": 3}}, '
    '{"name": "timer", "arguments": {"seconds": 60}}]',
    "olmo3": '<function_calls>weather(city="Bad Ems", days=3)\ntimer(seconds=60)</function_calls>',
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bad Ems", "days": 3}}\n'
    '</tool_call>\n<tool_call>\n{"name": "timer", "arguments": {"seconds": 60}}\n</tool_call>',
    "llama4_pythonic": '[weather(city="Bad Ems", days=3), timer(seconds=60)]',
    "pythonic": '[weather(city="Bad Ems", days=3), timer(seconds=60)]',
    "llama3_json": '{"name": "weather", "parameters": {"city": "Bad Ems", "days": 3}}; '
    '{"name": "timer", "parameters": {"seconds": 60}}',
}
"""Two calls as each family's chat template writes them."""
NEWER = (
    '[TOOL_CALLS]weather[ARGS]{"city": "Bad Ems", "days": 3}[TOOL_CALLS]timer[ARGS]{"seconds": 60}'
)

TEMPLATES = {
    "openai": "{{ '<|channel|>commentary to=functions.' + name }}<|channel|>analysis",
    "kimi_k2": "<|tool_calls_section_begin|>{% for %}<|tool_call_begin|></think>",
    "deepseek_v32": "<｜DSML｜function_calls>\n<｜DSML｜invoke",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '\\n' + '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
    "minimax_m2": "<minimax:tool_call>\n<invoke name=",
    "seed_oss": "<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter",
    "glm45": "'<tool_call>' <arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>",
    "glm47": "'<tool_call>' <arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",
    "qwen3_coder": "<tool_call>\n<function=example>\n<parameter=name>",
    "gemma4": "<|tool_call>call:{{ name }}",
    "functiongemma": "<start_function_call>call:{{ name }}",
    "mistral": "[TOOL_CALLS]{{ calls }}[/INST]",
    "hunyuan_a13b": '<tool_calls>[{"name": "func_name1", "arguments": {"argument1": "value1"}',
    "granite": "respond with <|tool_call|> followed by a JSON list of tools used",
    "phi4_mini_json": 'formatted as functools[{"name": [function name], "arguments": ',
    "olmo3": "<functions>' + tools + '</functions>' ... within <function_calls></function_calls>",
    "hermes": '<tool_call>\\n{"name": ',
    "llama4_pythonic": "<|header_start|> [func_name1(params_name1=params_value1)]",
    "pythonic": "[func_name1(params_name1=params_value1)]",
    "llama3_json": '{"name": function name, "parameters": dictionary of argument name}',
}
"""A part of each family's chat template."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_level(tmp_path_factory.mktemp("formats")))


def parsed(tokenizer: Tokenizer, form: str, *chunks: str) -> Answer:
    prompt = "<|start|>assistant" if form == "openai" else "Hi."
    parser = AnswerFormat(tokenizer, form, None).parser(prompt, SCHEMAS)
    pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
    return Answer(merged([*pieces, *parser.flush()]))


def calls(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def with_content(form: str) -> str:
    """Return calls behind a text, if the format has such calls."""
    text = "Let me see."
    if form == "openai":
        text = f"<|channel|>commentary<|message|>{text}<|end|><|start|>assistant"
    return ("" if TOOL_FORMATS[form].at_start else text) + WRITTEN[form]


@cache
def compiler(marks: tuple[str, ...] = ()) -> xgrammar.GrammarCompiler:
    """Return a compiler for a vocabulary with bytes and marks."""
    tokens = [*(bytes([i]) for i in range(END)), b"", *(b"\xff" + m.encode() for m in marks)]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info, max_threads=1)


def admits(grammar: Grammar, text: str, marks: tuple[str, ...] = ()) -> bool:
    """Return whether a grammar admits a text, with marks as tokens."""
    form = preceded(as_format(grammar, lambda token: int(token)), grammar.before)
    matcher = xgrammar.GrammarMatcher(compiler(marks).compile_structural_tag(tag_of(form)))
    return all(matcher.accept_token(token) for token in tokens_of(text, marks))


def tokens_of(text: str, marks: tuple[str, ...]) -> Iterator[int]:
    pattern = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
    for part in re.split(f"({pattern})", text) if marks else [text]:
        yield from [END + 1 + marks.index(part)] if part in marks else part.encode()
    yield END


def test_every_format_is_here() -> None:
    assert WRITTEN.keys() == TEMPLATES.keys() == TOOL_FORMATS.keys()
    assert {"auto", "none", *TOOL_FORMATS} == set(get_args(ToolParser))
    assert {"auto", "none", *REASONING_FORMATS} == set(get_args(ReasoningParser))


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_template_shows_its_format(form: str) -> None:
    assert tool_format_in(f"{{% if tools %}}{TEMPLATES[form]}{{% endif %}}") == form


def test_a_template_shows_its_format_for_thoughts() -> None:
    assert reasoning_format_in("{{ '</think>' }}") == "think"
    assert reasoning_format_in("<|channel|>analysis") == "openai_gptoss"
    assert reasoning_format_in("[/THINK]") == "mistral"
    assert reasoning_format_in("<|extra_0|>{{ '<think>\\n\\n</think>\\n' }}") == "hunyuan_a13b"
    assert reasoning_format_in("write your response after 'Here is my response:'") == "granite"
    assert reasoning_format_in("{{ '</seed:think>' }}") == "seed_oss"
    assert reasoning_format_in("<|channel>thought{{ text }}<channel|>") == "gemma4"
    assert reasoning_format_in("{{ messages }}") == "none"


@pytest.mark.parametrize("form", WRITTEN)
def test_a_format_is_read_under_all_cuts(tokenizer: Tokenizer, form: str) -> None:
    text = with_content(form)
    whole = parsed(tokenizer, form, text)
    assert calls(whole) == CALLS
    assert whole.content == ("" if text == WRITTEN[form] else "Let me see.")
    assert parsed(tokenizer, form, *text) == whole
    for i in range(len(text)):
        assert parsed(tokenizer, form, text[:i], text[i:]) == whole
    for end in range(0, len(text), 5):  # cut off by max_tokens
        assert parsed(tokenizer, form, *text[:end]) == parsed(tokenizer, form, text[:end])


@pytest.mark.parametrize("form", WRITTEN)
def test_a_format_is_enforced(form: str) -> None:
    text = WRITTEN[form]
    wrong = text.replace("3", "many", 1)
    forced = calls_only(form, TOOLS, several=True, tokens={})
    assert admits(forced, text)
    assert not admits(forced, wrong)
    assert not admits(forced, "Let me see.")
    one = calls_only(form, TOOLS, several=False, tokens={})
    assert not admits(one, text)
    strict = strict_calls(form, TOOLS, several=True, tokens={})
    assert admits(strict, with_content(form))
    assert not admits(strict, with_content(form).replace("3", "many", 1))


@pytest.mark.parametrize("form", WRITTEN)
def test_a_format_is_enforced_where_its_marks_are_tokens(form: str) -> None:
    marks = tuple(mark for mark in TOOL_FORMATS[form].marks if mark != "[ARGS]")
    tokens = {mark: END + 1 + i for i, mark in enumerate(marks)}
    parameters = TOOL_FORMATS[form].parameters
    if parameters is not None and any(m in parameters.open + parameters.close for m in marks):
        with pytest.raises(RequestError, match="is a special token of this model"):
            calls_only(form, TOOLS, several=True, tokens=tokens)
        return
    forced = calls_only(form, TOOLS, several=True, tokens=tokens)
    assert admits(forced, WRITTEN[form], marks)
    assert not admits(forced, WRITTEN[form].replace("3", "many", 1), marks)
    strict = strict_calls(form, TOOLS, several=True, tokens=tokens)
    assert admits(strict, with_content(form), marks)
    assert not admits(strict, with_content(form).replace("3", "many", 1), marks)


def test_mistrals_newer_format(tokenizer: Tokenizer) -> None:
    tokens = {"[TOOL_CALLS]": END + 1, "[ARGS]": END + 2}
    forced = calls_only("mistral", TOOLS, several=True, tokens=tokens)
    assert admits(forced, NEWER, tuple(tokens))
    assert not admits(forced, WRITTEN["mistral"], tuple(tokens))
    whole = parsed(tokenizer, "mistral", NEWER)
    assert calls(whole) == CALLS
    for i in range(len(NEWER)):
        assert parsed(tokenizer, "mistral", NEWER[:i], NEWER[i:]) == whole


@pytest.mark.parametrize(
    ("reasoning", "form", "prompt", "opening"),
    [
        ("think", "hermes", "Hi.", "<think>"),
        ("think", "kimi_k2", "Hi.<think>", ""),
        ("mistral", "mistral", "Hi.", "[THINK]"),
        ("seed_oss", "seed_oss", "Hi.", "<seed:think>"),
        ("granite", "granite", "Hi.", "Here is my thought process:"),
        ("hunyuan_a13b", "hunyuan_a13b", "Hi.", "<think>\n"),
        ("think", "olmo3", "Hi.<think>", ""),
        ("gemma4", "gemma4", "Hi.", "<|channel>thought\n"),
        ("openai_gptoss", "openai", "<|start|>assistant", "<|channel|>analysis<|message|>"),
    ],
)
def test_a_thought_before_calls(
    tokenizer: Tokenizer, reasoning: str, form: str, prompt: str, opening: str
) -> None:
    answer = AnswerFormat(tokenizer, form, reasoning)
    thoughts = REASONING_FORMATS[reasoning]
    text = f"{opening}hm{thoughts.close}{thoughts.answer[0]}{WRITTEN[form]}"
    forced = answer.after_thought(calls_only(form, TOOLS, several=True, tokens={}), prompt)
    assert admits(forced, text)
    assert not admits(forced, text.replace("3", "many", 1))

    def read(*chunks: str) -> Answer:
        parser = answer.parser(prompt, SCHEMAS)
        pieces = [piece for chunk in chunks for piece in parser.push(chunk)]
        return Answer(merged([*pieces, *parser.flush()]))

    whole = read(text)
    assert (whole.reasoning, whole.content, calls(whole)) == ("hm", "", CALLS)
    assert read(*text) == whole
    for i in range(len(text)):
        assert read(text[:i], text[i:]) == whole
