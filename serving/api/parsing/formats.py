"""The model families' formats for calls and thoughts, as tables.

The names are vLLM's parser names. The texts in a table are from the family's chat template.
Parsers take any white space where the text has some; grammars write the text exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Place = Literal["before", "within", "after"]
Syntax = Literal["object", "json", "parameters", "gemma", "python", "harmony"]


@dataclass(frozen=True)
class Parameters:
    """How parameters are written one by one: `open` key `middle` value `close`.

    Attributes:
        open, middle, close: texts around a parameter's name and its value.
        style: xgrammar's name for this syntax.
        typed: text after the word "true" or "false" behind `middle`. The word says whether the
            value is text. Without `typed`, the tool's schema decides.
        newlines: the value stands between line ends. They do not belong to it.
    """

    open: str
    middle: str
    close: str
    style: str
    typed: str = ""
    newlines: bool = False


@dataclass(frozen=True)
class ToolFormat:
    """A format for calls.

    Calls are `section[0]`, single calls with `separator` between them, and `section[1]`. A call is
    `call[0]`, the name, `call[1]`, the arguments, and `call[2]`.

    Attributes:
        syntax: "object" for a JSON object with name and arguments; "json" for a name and JSON;
            "parameters" for a name and parameters one by one; "gemma" for a name and an object
            with texts between `quote`; "python" for Python calls in a list, or on lines in a
            section; "harmony" for messages in channels.
        call, section, separator: see above.
        name: how a name is written: %s is the name, %d a number.
        parameters: how parameters are written, for the syntax "parameters".
        quote: the mark around texts, for the syntax "gemma".
        mark: opens the calls; empty if calls only begin an answer.
        at_start: an answer may begin with a call without a mark.
        known: only offered tools' names count, because the format has no mark.
        ends_thought: a call ends a thought without a closing text.
        marks: texts, possibly special tokens.
        signs: texts that are all in the family's chat templates.
        absent: texts that none of these templates has.
        newer: the replacement format if the tokenizer has the token `newer_token`.
    """

    syntax: Syntax
    call: tuple[str, str, str] = ("", "", "")
    section: tuple[str, str] = ("", "")
    separator: str = ""
    name: str = "%s"
    parameters: Parameters | None = None
    quote: str = ""
    mark: str = ""
    at_start: bool = False
    known: bool = False
    ends_thought: bool = False
    marks: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    newer: ToolFormat | None = None
    newer_token: str = ""

    @property
    def first(self) -> str:
        """The text before the first call's name."""
        return self.section[0] + self.call[0]


@dataclass(frozen=True)
class ReasoningFormat:
    """A format for thoughts.

    Attributes:
        open, close: the texts around a thought.
        marks: texts, possibly special tokens.
        sign: a text in the family's chat templates.
        answer: texts around the answer behind a thought, if the family has them.
        channels: thoughts are messages in harmony's channel "analysis".
    """

    open: str
    close: str
    marks: tuple[str, ...]
    sign: str
    answer: tuple[str, str] = ("", "")
    channels: bool = False

    def opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends with the opening text, so within a thought."""
        return prompt.rstrip().endswith(self.open.rstrip())

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Return where an answer begins: before a thought, within it, or after it.

        Args:
            prompt: the prompt as the model sees it. It has the whole thought if a template
                switches thinking off by an empty thought.
            continued: the assistant's text at the prompt's end, for the answer to continue.
        """
        if continued is not None:
            opened = continued.rfind(self.open) > continued.rfind(self.close)
            return "within" if opened else "after"
        if self.opened_by(prompt):
            return "within"
        return "after" if prompt.rstrip().endswith(self.close) else "before"


_DEEPSEEK = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_KIMI = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
    *("<|tool_call_end|>", "<|tool_call_argument_begin|>"),
)
_TOOL_CALL = ("<tool_call>", "</tool_call>")
_GLM = (*_TOOL_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>"),
    *("<|call|>", "<|return|>"),
)
HARMONY_NEXT = "<|end|><|start|>assistant"
"""Harmony's text between two messages in one answer."""
HARMONY_FINAL = "<|channel|>final<|message|>"
"""Harmony's text before an answer for the user."""

TOOL_FORMATS = {
    "openai": ToolFormat(
        "harmony",
        ("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", ""),
        separator=HARMONY_NEXT,
        marks=HARMONY_MARKS,
        signs=("<|channel|>commentary",),
    ),
    "kimi_k2": ToolFormat(
        "json",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        name="functions.%s:%d",
        mark="<|tool_calls_section_begin|>",
        ends_thought=True,
        marks=_KIMI,
        signs=("<|tool_calls_section_begin|>",),
    ),
    "deepseek_v32": ToolFormat(
        "parameters",
        ('<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n"),
        ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
        parameters=Parameters(
            '<｜DSML｜parameter name="',
            '" string="',
            "</｜DSML｜parameter>",
            "deepseek_xml",
            typed='">',
        ),
        mark="<｜DSML｜function_calls>",
        marks=("｜DSML｜",),
        signs=("｜DSML｜", "function_calls>"),
    ),
    "deepseek_v3": ToolFormat(
        "json",
        (
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "\n```json\n",
            "\n```<｜tool▁call▁end｜>",
        ),
        _DEEPSEEK_SECTION,
        separator="\n",
        mark="<｜tool▁calls▁begin｜>",
        marks=_DEEPSEEK,
        signs=("<｜tool▁calls▁begin｜>", "```json"),
    ),
    "deepseek_v31": ToolFormat(
        "json",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        _DEEPSEEK_SECTION,
        mark="<｜tool▁calls▁begin｜>",
        marks=_DEEPSEEK,
        signs=("<｜tool▁calls▁begin｜>",),
    ),
    "minimax_m2": ToolFormat(
        "parameters",
        ('<invoke name="', '">\n', "</invoke>\n"),
        ("<minimax:tool_call>\n", "</minimax:tool_call>"),
        parameters=Parameters('<parameter name="', '">', "</parameter>", "minimax_xml"),
        mark="<minimax:tool_call>",
        marks=("<minimax:tool_call>", "</minimax:tool_call>"),
        signs=("<minimax:tool_call>",),
    ),
    "seed_oss": ToolFormat(
        "parameters",
        ("<function=", ">\n", "</function>\n"),
        ("<seed:tool_call>\n", "</seed:tool_call>"),
        parameters=Parameters("<parameter=", ">", "</parameter>", "qwen_xml"),
        mark="<seed:tool_call>",
        marks=("<seed:tool_call>", "</seed:tool_call>"),
        signs=("<seed:tool_call>",),
    ),
    "glm45": ToolFormat(
        "parameters",
        ("<tool_call>", "\n", "</tool_call>"),
        separator="\n",
        parameters=Parameters("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "glm_xml"),
        mark="<tool_call>",
        marks=_GLM,
        signs=("</arg_key>\n<arg_value>",),
    ),
    "glm47": ToolFormat(
        "parameters",
        ("<tool_call>", "", "</tool_call>"),
        parameters=Parameters("<arg_key>", "</arg_key><arg_value>", "</arg_value>", "glm_xml"),
        mark="<tool_call>",
        marks=_GLM,
        signs=("<arg_key>",),
    ),
    "qwen3_coder": ToolFormat(
        "parameters",
        ("<tool_call>\n<function=", ">\n", "</function>\n</tool_call>"),
        separator="\n",
        parameters=Parameters("<parameter=", ">", "</parameter>", "qwen_xml", newlines=True),
        mark="<tool_call>",
        marks=_TOOL_CALL,
        signs=("<tool_call>", "<function=", "<parameter="),
    ),
    "gemma4": ToolFormat(
        "gemma",
        ("<|tool_call>call:", "", "<tool_call|>"),
        quote='<|"|>',
        mark="<|tool_call>call:",
        ends_thought=True,
        marks=("<|tool_call>", "<tool_call|>", '<|"|>'),
        signs=("<|tool_call>call:",),
    ),
    "functiongemma": ToolFormat(
        "gemma",
        ("<start_function_call>call:", "", "<end_function_call>"),
        quote="<escape>",
        mark="<start_function_call>call:",
        marks=("<start_function_call>", "<end_function_call>", "<escape>"),
        signs=("<start_function_call>call:",),
    ),
    "mistral": ToolFormat(
        "object",
        ('{"name": "', '", "arguments": ', "}"),
        ("[TOOL_CALLS][", "]"),
        separator=", ",
        mark="[TOOL_CALLS]",
        marks=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        signs=("[TOOL_CALLS]",),
        newer=ToolFormat("json", ("[TOOL_CALLS]", "[ARGS]", ""), mark="[TOOL_CALLS]"),
        newer_token="[ARGS]",
    ),
    "hunyuan_a13b": ToolFormat(
        "object",
        ('{"name": "', '", "arguments": ', "}"),
        ("<tool_calls>[", "]</tool_calls>"),
        separator=", ",
        mark="<tool_calls>",
        marks=("<tool_calls>", "</tool_calls>"),
        signs=("<tool_calls>[",),
    ),
    "granite": ToolFormat(
        "object",
        ('{"name": "', '", "arguments": ', "}"),
        ("<|tool_call|>[", "]"),
        separator=", ",
        mark="<|tool_call|>",
        marks=("<|tool_call|>",),
        signs=("<|tool_call|>",),
        absent=("<tool_call>",),
    ),
    "phi4_mini_json": ToolFormat(
        "object",
        ('{"name": "', '", "arguments": ', "}"),
        ("functools[", "]"),
        separator=", ",
        mark="functools[",
        signs=("functools[",),
    ),
    "olmo3": ToolFormat(
        "python",
        section=("<function_calls>", "</function_calls>"),
        separator="\n",
        mark="<function_calls>",
        marks=("<function_calls>", "</function_calls>"),
        signs=("<function_calls>", "</functions>"),
    ),
    "hermes": ToolFormat(
        "object",
        ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>"),
        separator="\n",
        mark="<tool_call>",
        marks=_TOOL_CALL,
        signs=("<tool_call>",),
        absent=("<function=",),
    ),
    "llama4_pythonic": ToolFormat(
        "python",
        section=("[", "]"),
        separator=", ",
        at_start=True,
        known=True,
        marks=("<|python_start|>", "<|python_end|>"),
        signs=("[func_name1(", "<|header_start|>"),
    ),
    "pythonic": ToolFormat(
        "python",
        section=("[", "]"),
        separator=", ",
        at_start=True,
        known=True,
        signs=("[func_name1(",),
    ),
    "llama3_json": ToolFormat(
        "object",
        ('{"name": "', '", "parameters": ', "}"),
        separator="; ",
        mark="<|python_tag|>",
        at_start=True,
        known=True,
        marks=("<|python_tag|>",),
        signs=('"parameters": dictionary',),
    ),
}
"""Formats for calls by name. The first whose signs are in a chat template is the model's."""

REASONING_FORMATS = {
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        HARMONY_NEXT,
        HARMONY_MARKS,
        "<|channel|>analysis",
        channels=True,
    ),
    "gemma4": ReasoningFormat(
        "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>"), "<channel|>"
    ),
    "hunyuan_a13b": ReasoningFormat(
        *("<think>", "</think>", ("<think>", "</think>"), "<|extra_0|>"),
        answer=("<answer>", "</answer>"),
    ),
    "granite": ReasoningFormat(
        *("Here is my thought process:", "Here is my response:", (), "Here is my response:")
    ),
    "think": ReasoningFormat("<think>", "</think>", ("<think>", "</think>"), "</think>"),
    "seed_oss": ReasoningFormat(
        *("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>"), "</seed:think>")
    ),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]"), "[/THINK]"),
}
"""Formats for thoughts by name. The first whose sign is in a chat template is the model's."""


def tool_format_in(templates: str) -> str:
    """Return the name of the chat templates' call format, or "none".

    The texts in a template may be written with escapes, so `\\n` also stands for a line end.
    """
    templates = templates.replace("\\n", "\n")
    for name, form in TOOL_FORMATS.items():
        here = all(sign in templates for sign in form.signs)
        if here and not any(sign in templates for sign in form.absent):
            return name
    return "none"


def reasoning_format_in(templates: str) -> str:
    """Return the name of the chat templates' reasoning format, or "none"."""
    return next((n for n, form in REASONING_FORMATS.items() if form.sign in templates), "none")


def within_thought(prompt: str) -> bool:
    """Return whether the prompt ends with any format's opening text."""
    return any(form.opened_by(prompt) for form in REASONING_FORMATS.values())
