"""Tools in Anthropic's form: the client's own tools, and Anthropic's.

A request names one of Anthropic's tools by its `type`, without a schema, because Anthropic's models
know it. The client runs some of them: bash, text editors and memory. These get their documented
schema here. Anthropic's servers run the others, so the model does not see them.

Sources for the schemas: Anthropic's documents "Bash tool", "Text editor tool" and "Memory tool",
and the classes BetaMemoryTool20250818... in its SDK. The newer editors name a text `insert_text`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type, one_of, wrong_choice
from weft.serving.api.openai.tools import Function, Parameters

logger = logging.getLogger(__name__)

Hint = dict[str, Any]
"""The type of `cache_control`, which has no effect, because prefixes are always cached."""


class _Known(NamedTuple):
    """One of Anthropic's client-side tools."""

    name: str
    description: str
    schema: dict[str, Any]


def _schema(required: Sequence[str], **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "The command to run."}


_LINE = {"type": "integer", "description": "For insert: the line after which to insert."}
_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "description": "For view: the first and the last line, from 1. -1 is the end of the file.",
}
_FILE = {
    "path": _text("The path of the file or directory."),
    "file_text": _text("For create: the content of the file."),
    "old_str": _text("For str_replace: the text to replace, which must occur exactly once."),
    "insert_line": _LINE,
    "view_range": _RANGE,
}
_BASH = _Known(
    "bash",
    "Run a command in a bash session that persists between calls.",
    _schema(
        (),
        command=_text("The command to run. It is required unless restart is true."),
        restart={"type": "boolean", "description": "True restarts the session."},
    ),
)
_OLD_EDITOR = _Known(
    "str_replace_editor",
    "View, create and edit text files.",
    _schema(
        ("command", "path"),
        command=_commands("view", "create", "str_replace", "insert", "undo_edit"),
        **_FILE,
        new_str=_text("For str_replace: the new text. For insert: the text to insert."),
    ),
)
_EDITOR = _Known(
    "str_replace_based_edit_tool",
    "View, create and edit text files.",
    _schema(
        ("command", "path"),
        command=_commands("view", "create", "str_replace", "insert"),
        **_FILE,
        new_str=_text("For str_replace: the new text."),
        insert_text=_text("For insert: the text to insert."),
    ),
)
_MEMORY = _Known(
    "memory",
    "Read and write files in /memories, a directory that persists between conversations.",
    _schema(
        ("command",),
        command=_commands("view", "create", "str_replace", "insert", "delete", "rename"),
        **_FILE,
        new_str=_text("For str_replace: the new text."),
        insert_text=_text("For insert: the text to insert."),
        old_path=_text("For rename: the old path."),
        new_path=_text("For rename: the new path."),
    ),
)
CLIENT_TOOLS = {
    "bash_20241022": _BASH,
    "bash_20250124": _BASH,
    "text_editor_20241022": _OLD_EDITOR,
    "text_editor_20250124": _OLD_EDITOR,
    "text_editor_20250429": _EDITOR,
    "text_editor_20250728": _EDITOR,
    "memory_20250818": _MEMORY,
}


class _OwnTool(Body):
    """The fields of each client-side tool."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,128}$")
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    allowed_callers: list[str] | None = None
    # Without effect: each tool is in the prompt.
    cache_control: Hint | None = None
    defer_loading: bool | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"allowed_callers": {"type": "null"}}},
                {"properties": {"allowed_callers": {"contains": {"const": "direct"}}}},
            ]
        }
    )

    @model_validator(mode="after")
    def _the_model_may_call_it(self) -> Self:
        if self.allowed_callers is not None and "direct" not in self.allowed_callers:
            raise RequestError(
                f"tools has {self.name!r} without 'direct' in allowed_callers; this server has no "
                "other caller",
                param="tools.allowed_callers",
                code="unsupported_value",
            )
        return self

    def _function(self, description: str | None, schema: dict[str, Any]) -> Function:
        examples = [f"Example input: {json.dumps(each)}" for each in self.input_examples or ()]
        text = "\n".join([*([description] if description else []), *examples])
        return Function.model_construct(
            name=self.name, description=text or None, parameters=schema, strict=self.strict
        )


class CustomTool(_OwnTool):
    """The client's own tool. `eager_input_streaming` has no effect: all input is streamed."""

    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: Parameters
    eager_input_streaming: bool | None = None

    @property
    def function(self) -> Function:
        """The function for the model; the examples are in its description."""
        return self._function(self.description, self.input_schema)


class ClientTool(_OwnTool):
    """One of Anthropic's client-side tools. The client also applies `max_characters`."""

    type: str
    max_characters: int | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"properties": {"type": {"const": kind}, "name": {"const": known.name}}}
                for kind, known in CLIENT_TOOLS.items()
            ]
        }
    )

    @model_validator(mode="after")
    def _has_its_own_name(self) -> Self:
        if self.name != (name := CLIENT_TOOLS[self.type].name):
            raise RequestError(
                f"tools has the name {self.name!r}; a tool of type {self.type} is named {name!r}",
                param="tools.name",
            )
        return self

    @property
    def function(self) -> Function:
        """The function for the model."""
        known = CLIENT_TOOLS[self.type]
        return self._function(known.description, known.schema)


SERVER_TOOLS = ("advisor", "code_execution", "tool_search_tool", "web_fetch", "web_search")
_SERVER_TOOL = f"^({'|'.join(SERVER_TOOLS)})_[a-z0-9_]{{1,64}}$"


class ServerTool(Body):
    """A tool on Anthropic's servers, so the model does not see it."""

    type: str = Field(pattern=_SERVER_TOOL)
    name: str | None = None

    model_config = ConfigDict(extra="ignore")

    @property
    def kind(self) -> str:
        """The type without its version."""
        return next(kind for kind in SERVER_TOOLS if self.type.startswith(kind))


def _tool(value: Mapping[str, Any]) -> type[Body]:
    kind = value.get("type")
    if kind in (None, "custom"):
        return CustomTool
    if isinstance(kind, str) and kind in CLIENT_TOOLS:
        return ClientTool
    if isinstance(kind, str) and re.match(_SERVER_TOOL, kind):
        return ServerTool
    raise wrong_choice("type", value, ["custom", *CLIENT_TOOLS])


Tool = Annotated[
    CustomTool | ClientTool | ServerTool, one_of((CustomTool, ClientTool, ServerTool), _tool)
]


class ToolChoice(Body):
    """The choice between tools: the model may, must or must not call one."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    model_config = by_type(
        {"tool": ("name",), "auto": (), "any": (), "none": ()},
        dict.fromkeys(("auto", "any", "none"), ("name",)),
    )

    @model_validator(mode="after")
    def _one_has_a_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise RequestError(
                "tool_choice.name is only for type 'tool', which requires it",
                param="tool_choice.name",
            )
        return self


def functions(tools: Sequence[CustomTool | ClientTool | ServerTool]) -> list[Function]:
    """Return the functions for the model, and log the left-out kinds of tools."""
    shown = []
    for tool in tools:
        if isinstance(tool, ServerTool):
            _note_left_out(tool.kind)
        else:
            shown.append(tool.function)
    return shown


def check_choice(choice: ToolChoice, tools: Sequence[CustomTool | ClientTool | ServerTool]) -> None:
    """Raise RequestError if only left-out tools could fulfil the choice."""
    left_out = [tool for tool in tools if isinstance(tool, ServerTool)]
    for tool in left_out:
        if choice.name is not None and choice.name == tool.name:
            raise RequestError(
                f"tool_choice names {tool.name!r}, a tool of type {tool.type}, which this server "
                "does not run; name another tool",
                param="tool_choice.name",
            )
    if choice.type == "any" and left_out and len(left_out) == len(tools):
        raise RequestError(
            f"tool_choice asks for a call; tools has only {left_out[0].type}, which this server "
            "does not run",
            param="tool_choice",
        )


@cache  # so it is logged once
def _note_left_out(kind: str) -> None:
    logger.warning("models do not see the tool %s of Anthropic's servers: it is left out", kind)
