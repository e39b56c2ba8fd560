"""Replies and events of OpenAI's Responses."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from weft.serving.api.openai.replies import ChatTokenLogprob

Progress = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag="output_text"):
    """Text for the user; with log probabilities for its tokens, when asked for."""

    text: str
    annotations: list[None] = field(default_factory=list)
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class ReasoningText(Struct, tag="reasoning_text"):
    """The text of a thought."""

    text: str


class OutputMessage(Struct, tag="message"):
    """A message in the output."""

    id: str
    content: list[OutputText]
    status: Progress = "in_progress"
    role: Literal["assistant"] = "assistant"


class ReasoningItem(Struct, tag="reasoning"):
    """A thought in the output, without a summary."""

    id: str
    content: list[ReasoningText]
    status: Progress = "in_progress"
    summary: list[None] = field(default_factory=list)
    encrypted_content: str | UnsetType = UNSET


class OutputCall(Struct, tag="function_call"):
    """A function call; the client runs it, and sends the result as a function_call_output."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET
    status: Progress = "in_progress"


class OutputCustomCall(Struct, tag="custom_tool_call"):
    """A call to a custom tool, with a text; the result is a custom_tool_call_output."""

    id: str
    call_id: str
    name: str
    input: str = ""
    namespace: str | UnsetType = UNSET
    status: Progress = "in_progress"


OutputItem = OutputMessage | ReasoningItem | OutputCall | OutputCustomCall


class InputTokensDetails(Struct):
    """Details about the input; `cached_tokens` came from the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """Details about the output; `reasoning_tokens` are thoughts."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Struct):
    """The reason for an incomplete answer."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseError(Struct):
    """The reason for a failed answer."""

    code: str
    message: str


class ResponseObject(Struct, tag="response", tag_field="object"):
    """The reply to /v1/responses, with the settings in effect."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, str]
    tools: list[dict[str, Any]]
    top_p: float
    user: str | UnsetType = UNSET
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    output: list[OutputItem] = field(default_factory=list)
    usage: ResponseUsage | UnsetType = UNSET
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    background: bool = False
    previous_response_id: str | None = None
    reasoning: dict[str, str | None] = field(
        default_factory=lambda: {"effort": None, "summary": None}
    )
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
    top_logprobs: int = 0


class ResponseDeleted(Struct):
    """The reply to DELETE /v1/responses/ID."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ResponseItems(Struct):
    """The reply to GET /v1/responses/ID/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(Struct, tag="response.input_tokens", tag_field="object"):
    """The reply to /v1/responses/input_tokens."""

    input_tokens: int


class _Event(Struct, kw_only=True):
    sequence_number: int = 0


class _OfResponse(_Event, kw_only=True):
    response: ResponseObject


class Created(_OfResponse, tag="response.created"):
    """The first event."""


class InProgress(_OfResponse, tag="response.in_progress"):
    """The second event; generation has begun."""


class Completed(_OfResponse, tag="response.completed"):
    """The last event, with the whole response."""


class Incomplete(_OfResponse, tag="response.incomplete"):
    """The last event when the answer was cut off."""


class Failed(_OfResponse, tag="response.failed"):
    """The last event when the request failed."""


class _OfItem(_Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, tag="response.output_item.added"):
    """An item begins."""


class ItemDone(_OfItem, tag="response.output_item.done"):
    """An item has ended."""


class _InItem(_Event, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_InItem, kw_only=True):
    part: OutputText | ReasoningText
    content_index: int = 0


class PartAdded(_OfPart, tag="response.content_part.added"):
    """An item's text begins."""


class PartDone(_OfPart, tag="response.content_part.done"):
    """An item's text has ended."""


class TextDelta(_InItem, kw_only=True, tag="response.output_text.delta"):
    """More text in a message."""

    delta: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class TextDone(_InItem, kw_only=True, tag="response.output_text.done"):
    """A message's whole text."""

    text: str
    content_index: int = 0
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)


class ReasoningDelta(_InItem, kw_only=True, tag="response.reasoning_text.delta"):
    """More text in a thought."""

    delta: str
    content_index: int = 0


class ReasoningDone(_InItem, kw_only=True, tag="response.reasoning_text.done"):
    """A thought's whole text."""

    text: str
    content_index: int = 0


class ArgumentsDelta(_InItem, kw_only=True, tag="response.function_call_arguments.delta"):
    """More arguments for a call."""

    delta: str


class ArgumentsDone(_InItem, kw_only=True, tag="response.function_call_arguments.done"):
    """A call's complete arguments."""

    name: str
    arguments: str


class InputDelta(_InItem, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More text for a custom tool."""

    delta: str


class InputDone(_InItem, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The whole text for a tool."""

    input: str


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
)
