"""Conversations in OpenAI's form, and their prompts by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from weft.errors import RequestError
from weft.serving.api.openai.messages import Message
from weft.serving.api.openai.tools import Function, FunctionName, ToolMode
from weft.serving.api.parsing.formats import within_thought
from weft.serving.api.parsing.tool_grammar import InputGrammar
from weft.serving.engine.chat_templates import UNASKED, UNASKED_LENGTH, Thinking, Verbosity
from weft.serving.engine.tokenizer import Tokenizer

MAX_COUNTED = 1 << 15
"""Tokens in a text that is only tokenized. If the context is longer, the context is the maximum."""


class TextFunction(Function):
    """A function with one text as its argument INPUT.

    Attributes:
        grammar: constrains the text; only for a strict function.
    """

    grammar: InputGrammar | None = None


@dataclass(frozen=True)
class Conversation:
    """A chat request without its sampling settings.

    Attributes:
        messages: at least one.
        tools: functions for the model; subclasses' further fields are ignored.
        tool_choice: whether the model may or must call a tool, or the one tool to call.
        parallel: the model may call several tools at once.
        continued: the answer continues the last message, an assistant's message.
        to_answer: end the prompt where the assistant's turn begins.
        template_arguments: more variables for the chat template (`chat_template_kwargs`).
        thinking: the requested thinking.
        verbosity: the requested length of the answer.

    Raises:
        RequestError: the tools and the choice contradict each other, or the last message cannot
            be continued.
    """

    messages: Sequence[Message]
    tools: Sequence[Function] = ()
    tool_choice: ToolMode | FunctionName = "auto"
    parallel: bool = True
    continued: bool = False
    to_answer: bool = True
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = UNASKED
    verbosity: Verbosity = UNASKED_LENGTH

    def __post_init__(self) -> None:
        if self.continued and (role := self.messages[-1].role) != "assistant":
            raise RequestError(
                "continue_final_message is only for a last message of the assistant; its role is "
                f"{role!r}",
                param="continue_final_message",
            )
        if self.continued and self.messages[-1].tool_calls:
            raise RequestError(
                "continue_final_message continues a text; the last message has tool_calls",
                param="continue_final_message",
            )
        choice = self.tool_choice
        if choice in ("none", "auto"):
            return
        if not self.tools:
            raise RequestError("tool_choice asks for a call; tools is missing", param="tool_choice")
        names = [tool.name for tool in self.tools]
        if isinstance(choice, FunctionName) and choice.name not in names:
            raise RequestError(
                f"tool_choice names {choice.name!r}; tools has {', '.join(names)}",
                param="tool_choice",
            )

    @property
    def offered(self) -> Sequence[Function]:
        """The tools in the prompt; with `tool_choice: "none"` the model sees no tools."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def continued_text(self) -> str | None:
        """The text for the answer to continue, if there is one."""
        return text_of(self.messages[-1]) if self.continued else None

    def prompt(self, tokenizer: Tokenizer, *, most: int) -> str:
        """Render the conversation with the model's chat template.

        Args:
            tokenizer: has the template.
            most: a message with far more tokens is refused before it is rendered, and so are far
                more messages.

        Raises:
            RequestError: there is no chat template, it refuses the conversation or its arguments,
                the thought cannot be switched off, the template knows no verbosity, or a message
                is far too long.
        """
        if len(self.messages) > 2 * most:
            raise RequestError(
                f"the conversation has {len(self.messages):,} messages; with at least one token "
                f"each, they are more than the maximum of {most:,} tokens",
                code="context_length_exceeded",
            )
        for message in self.messages:
            for part in message.content or ():
                tokenizer.check_length(part.text, most)
        functions = [tool.model_dump(exclude_none=True, include=_SHOWN) for tool in self.offered]
        tools = [{"type": "function", "function": function} for function in functions]
        messages = [_template_message(message, tokenizer) for message in self.messages]
        prompt = tokenizer.chat_templates.render(
            messages,
            tools,
            self.to_answer and not self.continued,
            continued=self.continued,
            arguments=self.template_arguments,
            thinking=self.thinking,
            verbosity=self.verbosity,
        )
        if self.thinking.on is False and not self.continued and within_thought(prompt):
            param = self.thinking.param
            raise RequestError(
                f"{param} asks for no thought; this model always thinks",
                param=param,
                code="unsupported_value",
            )
        return prompt


@contextmanager
def prompt_from(field: str) -> Iterator[None]:
    """Let an error about the prompt name the request's field with the conversation."""
    try:
        yield
    except RequestError as error:
        if error.param not in ("prompt", "messages"):
            raise
        raise RequestError(
            error.message, param=field, code=error.code, status=error.status
        ) from None


_SHOWN = set(Function.model_fields)


def _template_message(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Convert a message for chat templates: one text, and calls with arguments as objects."""
    seen = message.model_dump(exclude_none=True)
    if message.role == "developer" and not _knows_developer(tokenizer):
        seen["role"] = "system"
    # Templates read it without a check for its presence.
    seen["content"] = None if message.content is None else text_of(message)
    if reasoning := seen.pop("reasoning", None):
        seen.setdefault("reasoning_content", reasoning)
    for call in seen.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = _object(function["arguments"])
    return seen


def text_of(message: Message) -> str:
    """Return a message's texts as one."""
    return "\n".join(part.text for part in message.content or ())


def _knows_developer(tokenizer: Tokenizer) -> bool:
    return "developer" in tokenizer.chat_templates.text


def _object(arguments: str) -> Any:
    """Parse arguments that the model wrote; text that is not JSON stays as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
