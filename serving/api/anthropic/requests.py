"""Requests for Anthropic's Messages; events.py has the replies.

As in openai/requests.py, an unknown field is refused by its name. docs/api.md lists all fields.
"""

from __future__ import annotations

import json
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from weft.errors import RequestError
from weft.serving.api.anthropic.blocks import ConversationMessage, TextBlock, Texts
from weft.serving.api.anthropic.tools import Hint, Tool, ToolChoice, check_choice
from weft.serving.api.body import Body, by_type
from weft.serving.api.openai.requests import Priority, StopTexts, sampling_params
from weft.serving.engine.chat_templates import Thinking
from weft.serving.engine.sampling_params import Grammar, SamplingParams


class ThinkingConfig(Body):
    """The switch for thinking. A budget is not enforced, and thoughts are never summarized."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: Literal["summarized", "omitted"] | None = None
    block_binding: dict[str, Any] | None = None  # for signature checks

    model_config = by_type({"enabled": ("budget_tokens",), "disabled": (), "adaptive": ()})

    @model_validator(mode="after")
    def _enabled_has_a_budget(self) -> Self:
        if self.type == "enabled" and self.budget_tokens is None:
            raise RequestError(
                "thinking.budget_tokens is missing; type 'enabled' requires it",
                param="thinking.budget_tokens",
                code="missing_parameter",
            )
        return self


class OutputFormat(Body):
    """The answer's JSON schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The effort for the answer, and its form."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None
    task_budget: None = None


class ContextEdit(Body):
    """A requested change to a long conversation. This server makes none."""

    type: Literal["clear_thinking_20251015", "clear_tool_uses_20250919", "compact_20260112"]
    clear_at_least: dict[str, Any] | None = None
    clear_tool_inputs: bool | list[str] | None = None
    exclude_tools: list[str] | None = None
    instructions: str | None = None
    keep: Literal["all"] | dict[str, Any] | None = None
    pause_after_compaction: bool | None = None
    trigger: dict[str, Any] | None = None


class ContextManagement(Body):
    """Requested changes to a long conversation. This server makes none."""

    edits: list[ContextEdit] | None = None


class Thread(Body):
    """A stored conversation. This server stores none."""

    type: Literal["create", "continue"]
    previous_message_id: str | None = None

    @model_validator(mode="after")
    def _nothing_is_stored(self) -> Self:
        """Raise an error, so that Anthropic's SDK sends the whole conversation."""
        if self.type == "continue":
            raise RequestError(
                "thread.type is 'continue'; this server stores no conversations: send all messages",
                param="thread",
                code="thread_not_found",
                status=404,
            )
        return self


class Diagnostics(Body):
    """The message to compare the prompt cache with. This server does not report misses."""

    previous_message_id: str | None = None


class Metadata(Body):
    """Labels for the request."""

    user_id: str | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[ConversationMessage] = Field(min_length=1)
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    system: Texts | None = None
    thinking: ThinkingConfig | None = None
    tool_choice: ToolChoice | None = None
    tools: list[Tool] | None = None
    # Without effect.
    cache_control: Hint | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None
    speed: Literal["standard", "fast"] | None = None
    # Unsupported; null is the same as absent.
    billing_policy: None = None
    compaction: None = None

    @model_validator(mode="after")
    def _the_last_message_can_be_continued(self) -> Self:
        last = list(takewhile(lambda message: message.role == "assistant", self.messages[::-1]))
        blocks = [block for message in last[::-1] for block in message.content]
        for block in blocks:
            if not isinstance(block, TextBlock):
                raise RequestError(
                    f"messages ends with a message of the assistant that has a block of type "
                    f"{block.type}; only text can be continued",
                    param="messages",
                )
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        if text[-1:].isspace():
            raise RequestError(
                "messages ends with a message of the assistant whose text ends with white space; "
                "remove it, because the answer continues the text",
                param="messages",
            )
        return self

    @model_validator(mode="after")
    def _some_tool_can_be_chosen(self) -> Self:
        if self.tool_choice is not None:
            check_choice(self.tool_choice, self.tools or ())
        return self

    @model_validator(mode="after")
    def _one_format(self) -> Self:
        newer = None if self.output_config is None else self.output_config.format
        if newer is not None and self.output_format is not None:
            raise RequestError(
                "output_format and output_config.format each constrain the answer; give one of "
                "them",
                param="output_format",
            )
        return self

    @property
    def asked_thinking(self) -> Thinking:
        """The requested thinking."""
        effort = None if self.output_config is None else self.output_config.effort
        if self.thinking is None:
            return Thinking(None, effort, "output_config.effort")
        if self.thinking.type == "disabled":
            return Thinking(False, None, "thinking")
        return Thinking(True, effort, "thinking")

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the answer, if there is one."""
        form, param = self.output_format, "output_format.schema"
        if self.output_config is not None and self.output_config.format is not None:
            form, param = self.output_config.format, "output_config.format.schema"
        return None if form is None else Grammar("json_schema", json.dumps(form.schema_), param)


class MessagesRequest(CountRequest):
    """POST /v1/messages. Anthropic does not have `seed`, `min_p` and `priority`."""

    max_tokens: int
    min_p: float | None = None
    priority: Priority | None = None
    seed: int | None = None
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    # Without effect.
    diagnostics: Diagnostics | None = None
    inference_geo: str | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: Thread | None = None
    # Unsupported; null is the same as absent.
    container: None = None
    fallback_credit_token: None = None
    fallbacks: None = None

    @property
    def hides_thoughts(self) -> bool:
        """True if the response leaves out thoughts."""
        return self.thinking is not None and self.thinking.display == "omitted"

    def sampling_params(self) -> SamplingParams:
        """Return the sampling settings; RequestError if a value is out of range."""
        return sampling_params(self, stop=self.stop_sequences, grammar=self.grammar)
