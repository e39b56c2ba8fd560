"""Tools in Responses: functions, custom tools, groups of both, and OpenAI's hosted tools.

The model sees functions only. A custom tool takes a text: the model sees a function with the
argument `input`. A tool in a namespace has the namespace in its name. Hosted tools are left out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type
from weft.serving.api.conversation import TextFunction
from weft.serving.api.errors import explain
from weft.serving.api.openai.tools import Function, FunctionName, ToolMode
from weft.serving.api.parsing.tool_grammar import INPUT, InputGrammar

MAX_NAME = 64
"""Maximum number of characters in a tool's name, as the model sees it."""

logger = logging.getLogger(__name__)
_said: set[str] = set()  # types already named in the log

Name = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


def _allows_the_model(callers: Any) -> Any:
    if isinstance(callers, list) and "direct" not in callers:
        raise ValueError(" must have 'direct', because only the model calls tools here")
    return callers


class _Options(Body):
    """Tool options without an effect here."""

    allowed_callers: Annotated[
        list[Literal["direct", "programmatic"]] | None, BeforeValidator(_allows_the_model)
    ] = Field(None, json_schema_extra={"contains": {"const": "direct"}})
    async_: Literal[False] | None = Field(None, alias="async")
    defer_loading: bool | None = None


class FunctionTool(Function, _Options):
    """A function for the model."""

    type: Literal["function"]
    output_schema: dict[str, Any] | None = None


class InputFormat(Body):
    """The form of a custom tool's text: free, or constrained by a grammar."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    model_config = by_type(
        {"grammar": ("syntax", "definition"), "text": ()}, {"text": ("syntax", "definition")}
    )

    @model_validator(mode="after")
    def _a_grammar_is_complete(self) -> InputFormat:
        for name in ("syntax", "definition"):
            if (self.type == "grammar") != (getattr(self, name) is not None):
                raise ValueError(f".{name} is only for type 'grammar', which requires it")
        return self

    @property
    def grammar(self) -> InputGrammar | None:
        """The constraint on the text, if there is one."""
        if self.syntax is None or self.definition is None:
            return None
        return InputGrammar(self.syntax, self.definition)


class CustomTool(_Options):
    """A custom tool: it takes a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class NamespaceTool(Body):
    """A tool group."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[FunctionTool | CustomTool]


Hosted = Literal[
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
]


class HostedTool(Body):
    """A tool on OpenAI's servers, or one that only OpenAI's models know. It is left out."""

    type: Hosted

    model_config = ConfigDict(extra="allow")


class _ClientKind(Body):
    """A client-side tool's type, without its other fields."""

    type: Literal["function", "custom"]

    model_config = ConfigDict(extra="allow")


class _AnyKind(_ClientKind):
    """Any tool's type."""

    type: Literal["function", "custom", "namespace", Hosted]  # type: ignore[assignment]


ClientTool = FunctionTool | CustomTool
AnyTool = ClientTool | NamespaceTool | HostedTool
_CLIENT: dict[str, type[Body]] = {"function": FunctionTool, "custom": CustomTool}
_ANY = _CLIENT | {"namespace": NamespaceTool} | dict.fromkeys(get_args(Hosted), HostedTool)


def _read(value: Any) -> Any:
    """Read tools by their types, so that an error is about this type's form."""
    if not isinstance(value, list):
        return value
    return [_tool(each, ("body", "tools", i), _ANY, _AnyKind) for i, each in enumerate(value)]


def _tool(
    value: Any, place: tuple[str | int, ...], kinds: dict[str, type[Body]], other: type[Body]
) -> Any:
    if isinstance(value, Body):
        return value
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "namespace" and kinds is _ANY and isinstance(inner := value.get("tools"), list):
        within = (*place, "tools")
        tools = [_tool(t, (*within, i), _CLIENT, _ClientKind) for i, t in enumerate(inner)]
        value = {**value, "tools": tools}
    form = kinds.get(kind, other) if isinstance(kind, str) else other
    try:
        return form.model_validate(value)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise explain([{**first, "loc": (*place, *first["loc"])}]) from None


Tools = Annotated[list[AnyTool], BeforeValidator(_read, json_schema_input_type=list[AnyTool])]


class _Named(Body):
    """A named tool's type. This check comes first."""

    type: Literal["function", "custom"]


class NamedTool(FunctionName, _Named):
    """The tool for the model to call."""

    namespace: str | None = None


class Called(NamedTuple):
    """A tool as its client knows it.

    Attributes:
        name: its name, within its namespace.
        namespace: its group's name, if it has one.
        takes_text: its input is a text, and not JSON.
    """

    name: str
    namespace: str | None = None
    takes_text: bool = False


class Toolbox:
    """One request's tools.

    Args:
        tools: as the client sent them.

    Attributes:
        functions: the tools as the model sees them.

    Raises:
        RequestError: two tools have the same name.
    """

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        self.functions: list[Function] = []
        self._called: dict[str, Called] = {}
        for tool, namespace in _flat(tools):
            inside = None if namespace is None else namespace.name
            name = self.shown(inside, tool.name)
            if name in self._called:
                raise RequestError(f"tools has two tools with the name {name}", param="tools")
            self._called[name] = Called(tool.name, inside, isinstance(tool, CustomTool))
            about = None if namespace is None else namespace.description
            description = "\n\n".join(filter(None, (about, tool.description))) or None
            self.functions.append(_function(tool, name, description))

    def shown(self, namespace: str | None, name: str) -> str:
        """Return a tool's name for the model. A too long name ends with a digest."""
        if not namespace:
            return name
        full = namespace + ("" if namespace.endswith("__") else "__") + name
        if len(full) <= MAX_NAME:
            return full
        digest = hashlib.sha256(full.encode()).hexdigest()[:8]
        return f"{full[: MAX_NAME - len(digest) - 1]}_{digest}"

    def called(self, name: str) -> Called:
        """Return the tool that the model calls by this name."""
        return self._called.get(name) or Called(name)

    def choice(self, choice: ToolMode | NamedTool | None) -> ToolMode | FunctionName:
        """Return the choice between the tools as the model sees them."""
        if isinstance(choice, NamedTool):
            return FunctionName(name=self.shown(choice.namespace, choice.name))
        return choice or "auto"


def echoed(tool: AnyTool) -> dict[str, Any]:
    """Return a tool as a response shows it, with OpenAI's required fields."""
    shown = tool.model_dump(exclude_none=True, by_alias=True)
    match tool:
        case FunctionTool():
            return {"strict": None, "parameters": None} | shown
        case NamespaceTool():
            return {"description": ""} | shown
    return shown


def _flat(tools: Sequence[AnyTool]) -> Iterator[tuple[ClientTool, NamespaceTool | None]]:
    """Yield the client-side tools, with their groups."""
    for tool in tools:
        match tool:
            case HostedTool():
                if tool.type not in _said:
                    _said.add(tool.type)
                    logger.warning(
                        "tools of type %s are left out of requests: no model here knows them",
                        tool.type,
                    )
            case NamespaceTool():
                for inner in tool.tools:
                    yield inner, tool
            case _:
                yield tool, None


def _function(tool: ClientTool, name: str, description: str | None) -> Function:
    if isinstance(tool, FunctionTool):  # copied without checking its schema again
        return tool.model_copy(update={"name": name, "description": description})
    grammar = None if tool.format is None else tool.format.grammar
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    if grammar is not None:
        form = {"lark": "Lark grammar", "regex": "regular expression"}[grammar.syntax]
        text["description"] += f" It must match this {form}:\n{grammar.definition}"
    return TextFunction(
        name=name,
        description=description,
        parameters={
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
        strict=grammar is not None or None,
        grammar=grammar,
    )
