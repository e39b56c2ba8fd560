"""Chat templates: the arguments for switching a model's thinking, in several families.

The templates are excerpts from real ones: the parts for thoughts.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, get_args

import pytest
from support.tokenizers import write_byte_level

from weft.errors import ConfigError, ModelError, RequestError
from weft.serving.engine.chat_templates import (
    EFFORTS,
    ChatTemplates,
    Effort,
    Level,
    Thinking,
    Verbosity,
)
from weft.serving.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "Hello"}]
QWEN = (
    "{{ messages[-1].content }}{%- if add_generation_prompt %}<|im_start|>assistant\n"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
DEEPSEEK = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{{ messages[-1].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"
)
KIMI = (
    "{% generation %}{{ messages[-1].content }}{% endgeneration %}"
    "{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>"
    "{%- endif -%}"
)
GPT_OSS = (
    "{%- macro system() -%}{%- if reasoning_effort is not defined %}"
    "{%- set reasoning_effort = 'medium' %}{%- endif %}Reasoning: {{ reasoning_effort }}"
    "{%- endmacro -%}{{ system() }}{{ messages[-1].content }}"
)
MISTRAL = (
    "{%- set reasoning_effort = reasoning_effort if reasoning_effort is defined "
    "and reasoning_effort is not none else 'none' %}"
    "{%- if reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('must be none or high') }}{%- endif %}"
    "[{{ reasoning_effort }}]{{ messages[-1].content }}"
)
PLAIN = "{{ messages[-1].content }}"


def templates(source: str, **defaults: Any) -> ChatTemplates:
    return ChatTemplates({"default": source}, {"eos_token": "</s>"}, defaults)


@pytest.mark.parametrize(
    ("source", "off", "on"),
    [
        (QWEN, {"enable_thinking": False}, {"enable_thinking": True}),
        (DEEPSEEK, {"thinking": False}, {"thinking": True}),
        (KIMI, {"thinking": False}, {"thinking": True}),
        (MISTRAL, {"reasoning_effort": "none"}, {"reasoning_effort": "high"}),
        (PLAIN, {}, {}),
    ],
)
def test_a_thought_is_switched_as_the_template_takes_it(
    source: str, off: dict[str, Any], on: dict[str, Any]
) -> None:
    chat = templates(source)
    assert chat.thinking_arguments(Thinking()) == {}
    assert chat.thinking_arguments(Thinking.of_effort("none")) == off
    assert chat.thinking_arguments(Thinking(on=True)) == on
    for effort in EFFORTS[1:]:
        assert chat.thinking_arguments(Thinking.of_effort(effort)) == on
    prompts = [chat.render(MESSAGES, thinking=Thinking(on=each)) for each in (False, True)]
    assert len(set(prompts)) == (2 if off else 1)


@pytest.mark.parametrize(
    ("asked", "given"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")],
)
def test_an_effort_becomes_the_nearest_that_the_model_has(asked: Effort, given: str) -> None:
    chat = templates(GPT_OSS)
    assert chat.efforts == ("low", "medium", "high")
    for thinking in (Thinking.of_effort(asked), Thinking(effort=asked)):
        assert chat.render(MESSAGES, thinking=thinking) == f"Reasoning: {given}Hello"
    assert chat.render(MESSAGES, thinking=Thinking(on=True)) == "Reasoning: mediumHello"


def test_a_thought_that_cannot_be_switched_off() -> None:
    with pytest.raises(RequestError, match=r"a\.b asks .* efforts low, medium, high") as error:
        templates(GPT_OSS).thinking_arguments(Thinking.of_effort("none", "a.b"))
    assert error.value.param == "a.b"


def test_a_template_may_have_both_forms() -> None:
    chat = templates(QWEN + "{{ reasoning_effort | default('medium') }}")
    assert chat.thinking_arguments(Thinking.of_effort("none")) == {"enable_thinking": False}
    on = {"enable_thinking": True, "reasoning_effort": "low"}
    assert chat.thinking_arguments(Thinking.of_effort("low")) == on


def test_a_verbosity_is_for_templates_that_read_it() -> None:
    chat = templates("{% if verbosity is defined %}{{ verbosity }} {% endif %}" + PLAIN)
    assert chat.render(MESSAGES) == "Hello"
    for level in get_args(Level):
        assert chat.render(MESSAGES, verbosity=Verbosity(level)) == f"{level} Hello"
    contradiction = r"a\.b and chat_template_kwargs.verbosity contradict"
    with pytest.raises(RequestError, match=contradiction) as error:
        chat.render(MESSAGES, arguments={"verbosity": "low"}, verbosity=Verbosity("high", "a.b"))
    assert error.value.param == "a.b"


def test_without_such_a_template_the_verbosity_is_medium() -> None:
    chat = templates(PLAIN)
    assert chat.render(MESSAGES, verbosity=Verbosity("medium")) == "Hello"
    for level in ("low", "high"):
        with pytest.raises(
            RequestError, match=r"a\.b is '(low|high)'; .* template knows no verbosity"
        ) as error:
            chat.render(MESSAGES, verbosity=Verbosity(level, "a.b"))
        assert (error.value.param, error.value.code) == ("a.b", "unsupported_value")


def test_arguments_of_a_request_come_before_the_defaults() -> None:
    chat = templates(QWEN, enable_thinking=False)
    off, on = templates(QWEN).render(MESSAGES, arguments={"enable_thinking": False}), "assistant"
    assert chat.render(MESSAGES) == off
    assert chat.render(MESSAGES, arguments={"enable_thinking": True}).endswith(on)
    assert chat.render(MESSAGES, thinking=Thinking(on=True)).endswith(on)


def test_contradictions_are_refused() -> None:
    chat, off = templates(QWEN), Thinking.of_effort("none")
    with pytest.raises(RequestError, match=r"reasoning_effort and chat_template_kwargs.enable_th"):
        chat.render(MESSAGES, arguments={"enable_thinking": True}, thinking=off)
    chat.render(MESSAGES, arguments={"enable_thinking": False}, thinking=off)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "eos_token"])
def test_an_argument_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(RequestError, match=f"chat_template_kwargs.{name} is set by the server"):
        templates(PLAIN).render(MESSAGES, arguments={name: "x"})


@pytest.mark.parametrize("name", ["name", "thinking", "given"])
def test_an_argument_may_have_any_other_name(name: str) -> None:
    chat = templates(f"{{{{ {name} }}}}")
    assert chat.render(MESSAGES, arguments={name: "x"}) == "x"
    assert templates(f"{{{{ {name} }}}}", **{name: "y"}).render(MESSAGES) == "y"


def test_a_refusal_is_one_line() -> None:
    chat = templates(
        "{% if x %}{{ raise_exception('one\ntwo') }}{% endif %}{{ messages | length }}"
    )
    with pytest.raises(RequestError, match=r"with chat_template_kwargs: one$"):
        chat.render(MESSAGES, arguments={"x": 1})
    assistant = {"role": "assistant", "content": "Well,"}
    with pytest.raises(RequestError) as error:
        templates("{{ messages[0].content }}").render([*MESSAGES, assistant], continued=True)
    assert "does not appear" in error.value.message
    assert "\n" not in error.value.message


def test_an_argument_that_the_template_cannot_use() -> None:
    with pytest.raises(RequestError, match=r"rejects the messages, with chat_template_kwargs: "):
        templates("{{ 1 + x }}").render(MESSAGES, arguments={"x": []})


def test_a_file_replaces_the_templates_of_the_checkpoint(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path)
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ x }}")
    tokenizer = Tokenizer.load(path, chat_template=file, template_arguments={"x": 1})
    assert tokenizer.chat_templates.render(MESSAGES) == "mine 1"
    file.write_text("{% if %}")
    with pytest.raises(ModelError, match=r"mine.jinja: .* is not valid Jinja"):
        Tokenizer.load(path, chat_template=file)
    with pytest.raises(ConfigError, match=r"--chat-template is .*absent: "):
        Tokenizer.load(path, chat_template=tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"--default-chat-template-kwargs: .*messages is set"):
        Tokenizer.load(path, template_arguments={"messages": []})
    (path / "chat_template.jinja").write_bytes(b"{{ 'caf\xe9' }}")
    with pytest.raises(ModelError, match=r"chat_template.jinja is not UTF-8: "):
        Tokenizer.load(path)


def test_threads_render_at_once() -> None:
    chat, seen = templates(MISTRAL), set()

    def render() -> None:
        seen.add(chat.render(MESSAGES, thinking=Thinking.of_effort("low")))

    threads = [threading.Thread(target=render) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"[high]Hello"}
