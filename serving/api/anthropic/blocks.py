"""Messages in Anthropic's form, and their blocks.

`cache_control` has no effect, because prefixes are always cached. Only Anthropic reads some fields,
so they have no effect here: `signature` and `data` in thoughts, `caller` in calls. This server
writes no citations, so it refuses blocks with `citations` enabled.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from weft.serving.api.anthropic.tools import Hint
from weft.serving.api.body import Body, by_field


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Body):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: Hint | None = None
    citations: list[Any] | None = Field(None, max_length=0)


Texts = Annotated[
    list[TextBlock], BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock])
]


class Citations(Body):
    """The switch for citations from a block; it can only be off."""

    enabled: Literal[False] | None = None


class SearchResultBlock(Body):
    """A search result; the model sees its title, source and texts."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]
    cache_control: Hint | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        """The text that the model sees."""
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class PlainText(Body):
    """A document's text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str

    @property
    def text(self) -> str:
        """The text."""
        return self.data


class Content(Body):
    """A document's texts."""

    type: Literal["content"]
    content: Texts

    @property
    def text(self) -> str:
        """The texts as one."""
        return "\n".join(block.text for block in self.content)


class DocumentBlock(Body):
    """A plain-text document; the model sees its title, context and text."""

    type: Literal["document"]
    source: Annotated[
        PlainText | Content, by_field("type", {"text": PlainText, "content": Content})
    ]
    title: str | None = None
    context: str | None = None
    cache_control: Hint | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        """The text that the model sees."""
        return "\n".join(filter(None, [self.title, self.context, self.source.text]))


class ToolReferenceBlock(Body):
    """A tool's name, found by a search. All tools are in the prompt already."""

    type: Literal["tool_reference"]
    tool_name: str
    cache_control: Hint | None = None

    @property
    def text(self) -> str:
        """The text that the model sees."""
        return self.tool_name


class ThinkingBlock(Body):
    """A thought from an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Body):
    """An encrypted thought: only Anthropic can read it. The model does not see it."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Body):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Hint | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(Body):
    """A call's result."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            list[
                Annotated[
                    TextBlock | SearchResultBlock | DocumentBlock | ToolReferenceBlock,
                    by_field(
                        "type",
                        {
                            "text": TextBlock,
                            "search_result": SearchResultBlock,
                            "document": DocumentBlock,
                            "tool_reference": ToolReferenceBlock,
                        },
                    ),
                ]
            ],
            BeforeValidator(_as_blocks),
        ]
        | None
    ) = None
    is_error: bool | None = None
    cache_control: Hint | None = None
    toolset_name: None = None

    @property
    def texts(self) -> list[str]:
        """The texts for the model. Chat templates have no place for `is_error`."""
        texts = [block.text for block in self.content or ()]
        return ["Error:", *texts] if self.is_error else texts


_UserBlock = Annotated[
    TextBlock | SearchResultBlock | DocumentBlock | ToolResultBlock,
    by_field(
        "type",
        {
            "text": TextBlock,
            "search_result": SearchResultBlock,
            "document": DocumentBlock,
            "tool_result": ToolResultBlock,
        },
    ),
]
_AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock,
    by_field(
        "type",
        {
            "text": TextBlock,
            "thinking": ThinkingBlock,
            "redacted_thinking": RedactedThinkingBlock,
            "tool_use": ToolUseBlock,
        },
    ),
]


class UserMessage(Body):
    """A user turn. It also has the results of calls."""

    role: Literal["user"]
    content: Annotated[list[_UserBlock], BeforeValidator(_as_blocks)]


class AssistantMessage(Body):
    """A model turn."""

    role: Literal["assistant"]
    content: Annotated[list[_AssistantBlock], BeforeValidator(_as_blocks)]


class SystemMessage(Body):
    """Instructions between turns, until the next user turn or permanently."""

    role: Literal["system"]
    content: Texts
    clear_at: Literal["next_user_message", "never"] | None = None
    output_config: None = None


ConversationMessage = Annotated[
    UserMessage | AssistantMessage | SystemMessage,
    by_field("role", {"user": UserMessage, "assistant": AssistantMessage, "system": SystemMessage}),
]
