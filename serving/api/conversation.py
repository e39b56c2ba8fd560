"""Conversations in OpenAI's form, and their prompts by the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import RequestError
from weft.serving.api.openai.requests import Function, FunctionName, Message, ToolMode
from weft.serving.engine.tokenizer import Tokenizer

MAX_COUNTED = 1 << 15
"""Tokens in a text that is only tokenized. If the context is longer, the context is the maximum."""


@dataclass(frozen=True)
class Conversation:
    """A chat request without its sampling settings.

    Attributes:
        messages: at least one.
        tools: functions for the model; subclasses' further fields are ignored.
        tool_choice: whether the model may or must call a tool, or the one tool to call.
        parallel: the model may call several tools at once.
        continued: the answer continues the last message, which is the assistant's.

    Raises:
        RequestError: the tools and the choice contradict each other.
    """

    messages: Sequence[Message]
    tools: Sequence[Function] = ()
    tool_choice: ToolMode | FunctionName = "auto"
    parallel: bool = True
    continued: bool = False

    def __post_init__(self) -> None:
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

    def prompt(self, tokenizer: Tokenizer, *, most: int, to_answer: bool = True) -> str:
        """Render the conversation with the model's chat template.

        Args:
            tokenizer: has the template.
            most: a message with far more tokens is refused, before it is rendered.
            to_answer: end with the beginning of the assistant's turn.

        Raises:
            RequestError: there is no chat template, or it refuses the conversation, or a message
                is far too long.
        """
        for message in self.messages:
            for part in message.content or ():
                tokenizer.check_length(part.text, most)
        functions = [tool.model_dump(exclude_none=True, include=_SHOWN) for tool in self.offered]
        tools = [{"type": "function", "function": function} for function in functions]
        messages = [_template_message(message, tokenizer) for message in self.messages]
        return tokenizer.render_chat(
            messages, tools, to_answer and not self.continued, continued=self.continued
        )


_SHOWN = set(Function.model_fields)


def _template_message(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """Convert a message for chat templates: one text, and calls with arguments as objects."""
    seen = message.model_dump(exclude_none=True)
    if message.role == "developer" and not _knows_developer(tokenizer):
        seen["role"] = "system"
    # Templates read it without a check for its presence.
    seen["content"] = None
    if message.content is not None:
        seen["content"] = "\n".join(part.text for part in message.content)
    if reasoning := seen.pop("reasoning", None):
        seen.setdefault("reasoning_content", reasoning)
    for call in seen.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = _object(function["arguments"])
    return seen


def _knows_developer(tokenizer: Tokenizer) -> bool:
    return any("developer" in source for source in tokenizer.chat_templates.values())


def _object(arguments: str) -> Any:
    """Parse arguments that the model wrote; text that is not JSON stays as it is."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
