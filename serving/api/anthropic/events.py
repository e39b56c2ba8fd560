"""Replies and events of Anthropic's Messages."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputTokensDetails(Struct):
    """The token count for thoughts."""

    thinking_tokens: int


class MessagesUsage(Struct):
    """Token counts; `input_tokens` excludes tokens from the prefix cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextOut(Struct, tag="text"):
    """Text for the user."""

    text: str
    citations: None = None


class ThinkingOut(Struct, tag="thinking"):
    """A thought. Some clients drop a thought without a signature; no server checks this one."""

    thinking: str
    signature: str = ""


class ToolUseOut(Struct, tag="tool_use"):
    """A call. Invalid JSON becomes its only key, INVALID_JSON, as Anthropic advises."""

    id: str
    name: str
    input: dict[str, Any]


BlockOut = TextOut | ThinkingOut | ToolUseOut


class AppliedEdits(Struct):
    """The edits for `context_management`: none."""

    applied_edits: list[None] = []


class MessageOut(Struct, tag="message"):
    """The assistant's turn. `context_management` answers the request's field."""

    id: str
    model: str
    content: list[BlockOut]
    usage: MessagesUsage
    role: Literal["assistant"] = "assistant"
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    context_management: AppliedEdits | UnsetType = UNSET


class TokenCount(Struct):
    """The reply to /v1/messages/count_tokens."""

    input_tokens: int


class ErrorDetails(Struct):
    """The error's code, for programs."""

    error_code: str


class AnthropicErrorDetail(Struct):
    """An error's type, message and code."""

    type: str
    message: str
    details: ErrorDetails | UnsetType = UNSET


class AnthropicError(Struct, tag="error"):
    """An error response's body, and a failed stream's last event."""

    error: AnthropicErrorDetail
    request_id: str | UnsetType | None = UNSET


class BatchCounts(Struct):
    """Request counts. All requests are processing until the batch has ended."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(Struct, tag="message_batch"):
    """A batch with Messages requests; `results_url` is a path on this server."""

    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: BatchCounts
    created_at: datetime
    expires_at: datetime
    ended_at: datetime | None = None
    cancel_initiated_at: datetime | None = None
    archived_at: None = None
    results_url: str | None = None


class MessageBatchList(Struct):
    """A page in the list of batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(Struct, tag="message_batch_deleted"):
    """The reply to a deletion."""

    id: str


class Succeeded(Struct, tag="succeeded"):
    """The answer to a request."""

    message: Raw


class Errored(Struct, tag="errored"):
    """The error for a request."""

    error: AnthropicError | Raw


class Canceled(Struct, tag="canceled"):
    """A cancelled request, without an answer."""


class Expired(Struct, tag="expired"):
    """An expired request, without an answer."""


class BatchResult(Struct):
    """A line in a batch's results."""

    custom_id: str
    result: Succeeded | Errored | Canceled | Expired


class MessageStart(Struct, tag="message_start"):
    """The first event, with an empty message."""

    message: MessageOut


class BlockStart(Struct, tag="content_block_start"):
    """The start of a block."""

    index: int
    content_block: BlockOut


class TextDelta(Struct, tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    """More text in a thought."""

    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    """A thought's signature, at its end."""

    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    """More input for a call."""

    partial_json: str


class BlockDelta(Struct, tag="content_block_delta"):
    """More content for a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, tag="content_block_stop"):
    """The end of a block."""

    index: int


class MessageEnd(Struct):
    """The reason for the message's end."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The end of the message."""

    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(Struct, tag="message_stop"):
    """The last event."""


class Ping(Struct, tag="ping"):
    """A sign of life, after the prompt has been computed."""


MessageEvent = (
    MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
)
