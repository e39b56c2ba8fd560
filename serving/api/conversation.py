"""A conversation in OpenAI's form, and the prompt that the model's chat template makes of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import RequestError
from weft.serving.api.openai.requests import Function, FunctionName, Message, ToolMode
from weft.serving.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Conversation:
    """What is asked for, but for how it is sampled.

    Attributes:
        messages: at least one.
        tools: that are offered; of each the fields of a Function count.
        tool_choice: whether the model may or must call one of them, or that which it must call.
        parallel: it may call several at once.
        continued: the last message, which is the assistant's, is how its answer begins.

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
        """Tools that the model may call; with `tool_choice: "none"` it does not see them either."""
        return () if self.tool_choice == "none" else self.tools

    def prompt(self, tokenizer: Tokenizer, *, to_answer: bool = True) -> str:
        """The text that the model sees; with `to_answer` it is the assistant's turn.

        Raises:
            RequestError: there is no chat template, or it refuses the conversation.
        """
        functions = [tool.model_dump(exclude_none=True, include=_SHOWN) for tool in self.offered]
        tools = [{"type": "function", "function": function} for function in functions]
        messages = [_template_message(message, tokenizer) for message in self.messages]
        return tokenizer.render_chat(
            messages, tools, to_answer and not self.continued, continued=self.continued
        )


_SHOWN = set(Function.model_fields)


def _template_message(message: Message, tokenizer: Tokenizer) -> dict[str, Any]:
    """A message as chat templates expect it: its text in one piece, and arguments as objects."""
    seen = message.model_dump(exclude_none=True)
    if message.role == "developer" and not _knows_developer(tokenizer):
        seen["role"] = "system"
    # Templates test it without asking whether it is there.
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
    """The object that a model wrote; what is no JSON stays text, as the model wrote that too."""
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
