"""Tools of a chat in OpenAI's form, and the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from weft.errors import shown
from weft.serving.api.body import Body
from weft.serving.api.errors import explain

_SCHEMA_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}


def _check_schema(schema: Any, place: str) -> None:
    """Raise ValueError for an invalid schema; unknown keywords may have any value."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{place} must be a JSON schema")
    kind = schema.get("type", [])
    for name in kind if isinstance(kind, list) else [kind]:
        if not isinstance(name, str) or name not in _SCHEMA_TYPES:
            raise ValueError(
                f"{place}.type is {shown(name)}; a type is {', '.join(sorted(_SCHEMA_TYPES))}"
            )
    if not isinstance(schema.get("pattern", ""), str):
        raise ValueError(f"{place}.pattern must be a text")
    for key in ("properties", "$defs"):
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{place}.{key} must be an object")
        for name, each in inner.items():
            _check_schema(each, f"{place}.{key}.{name[:40]}")
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key, [])
        if not isinstance(inner, list):
            raise ValueError(f"{place}.{key} must be a list")
        for i, each in enumerate(inner):
            _check_schema(each, f"{place}.{key}[{i}]")
    if "items" in schema and not isinstance(schema["items"], list):  # older drafts have a list
        _check_schema(schema["items"], f"{place}.items")


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError(f".type is {shown(schema['type'])}; it must be 'object'")
    _check_schema(schema, "")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]


class Function(Body):
    """A function for the model; `parameters` is its JSON schema."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool for the model."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """The name of a tool."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


ToolMode = Literal["none", "auto", "required"]


def mode_or(named: type[Body]) -> BeforeValidator:
    """Return a validator for tool_choice; errors are about the form that the client tried."""

    def checked(value: Any) -> Any:
        if isinstance(value, dict):
            try:
                return named.model_validate(value)
            except ValidationError as error:
                (first, *_) = error.errors()
                raise explain([{**first, "loc": ("body", "tool_choice", *first["loc"])}]) from None
        if value is not None and value not in get_args(ToolMode):
            raise ValueError(
                f" is {shown(value)}; this server accepts 'none', 'auto', 'required', or a "
                'tool: {"type": "function", ...}'
            )
        return value

    return BeforeValidator(checked, json_schema_input_type=ToolMode | named | None)


ToolChoice = ToolMode | NamedTool
