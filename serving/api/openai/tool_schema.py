"""A tool's parameters are a JSON schema of an object: as far as to keep nonsense off the model."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator

_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}


def _check(schema: Any, place: str) -> None:
    """Raise ValueError for what is no schema; keywords that are not known here may be anything."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise ValueError(f"{place} must be a JSON schema")
    kind = schema.get("type", [])
    for name in kind if isinstance(kind, list) else [kind]:
        if not isinstance(name, str) or name not in _TYPES:
            shown = str(name)[:40]
            raise ValueError(f"{place}.type is {shown!r}; a type is {', '.join(sorted(_TYPES))}")
    if not isinstance(schema.get("pattern", ""), str):
        raise ValueError(f"{place}.pattern must be a text")
    for key in ("properties", "$defs"):
        inner = schema.get(key, {})
        if not isinstance(inner, dict):
            raise ValueError(f"{place}.{key} must be an object")
        for name, each in inner.items():
            _check(each, f"{place}.{key}.{name[:40]}")
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key, [])
        if not isinstance(inner, list):
            raise ValueError(f"{place}.{key} must be a list")
        for i, each in enumerate(inner):
            _check(each, f"{place}.{key}[{i}]")
    if "items" in schema and not isinstance(schema["items"], list):  # a list: of older drafts
        _check(schema["items"], f"{place}.items")


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        raise ValueError(f".type is {str(schema['type'])[:40]!r}; it must be 'object'")
    _check(schema, "")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(_parameters)]
