"""Converts a parameter's text to JSON by the tool's schema.

Some formats write parameters one by one, and texts without quotes. So `12` may be a text or a
number; only the schema tells. If a schema allows texts and another type, valid JSON with an allowed
type counts as JSON, and everything else as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

ANY = frozenset({"string", "number", "boolean", "null", "array", "object"})
"""All types of JSON; "integer" counts as "number" here."""

_WORDS = {"True": "true", "False": "false", "None": "null"}
_BOUNDED = ("enum", "const", "pattern", "format")
_MAX_STEPS = 256
"""Maximum number of schemas that are read for one parameter."""


def types_of(root: Mapping[str, Any], name: str) -> frozenset[str]:
    """Return a schema's allowed types for a parameter; all if the schema names none.

    Args:
        root: the arguments' schema.
        name: the parameter's name.
    """
    found: set[str] = set()
    todo: list[Any] = [_property(root, name)]
    for _ in range(_MAX_STEPS):
        if not todo:
            return frozenset(found)
        schema = todo.pop()
        if not isinstance(schema, Mapping):
            return ANY
        options = next(
            (schema[word] for word in ("anyOf", "oneOf", "allOf") if _filled(schema.get(word))),
            None,
        )
        if isinstance(schema.get("$ref"), str):
            todo.append(_referenced(root, schema["$ref"]))
        elif options is not None:
            todo += options
        elif "const" in schema:
            found.add(type_of(schema["const"]))
        elif _filled(schema.get("enum")):
            found.update(map(type_of, schema["enum"]))
        elif "type" in schema:
            named = schema["type"]
            found.update(map(_named, named if isinstance(named, list) else [named]))
        else:
            return ANY
    return ANY


def is_bounded(root: Mapping[str, Any], name: str) -> bool:
    """Return whether a schema allows only certain texts for a parameter, so no outer space."""
    schema = _property(root, name)
    return isinstance(schema, Mapping) and any(word in schema for word in _BOUNDED)


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert a parameter's text to JSON; to a text if no other allowed type fits."""
    stripped = text.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        if type_of(loads(stripped)) in types - {"string"}:
            return stripped
    except ValueError:
        pass
    return json.dumps(text, ensure_ascii=False)


def loads(text: str) -> Any:
    """Parse JSON as RFC 8259 has it.

    Raises:
        ValueError: the text is no JSON, or is nested too deeply.
    """
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("this is nested too deeply") from None


def type_of(value: Any) -> str:
    """Return a value's type name in JSON Schema."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case int() | float():
            return "number"
        case list():
            return "array"
    return "object"


def _property(root: Mapping[str, Any], name: str) -> Any:
    """Return a parameter's schema; None if there is none."""
    for _ in range(_MAX_STEPS):
        if not isinstance(root.get("$ref"), str):
            break
        root = _referenced(root, root["$ref"]) or {}
    properties = root.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return root.get("additionalProperties")


def _referenced(root: Mapping[str, Any], reference: str) -> Any:
    """Return the schema at a place such as `#/$defs/city`; None if it is not there."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        if not isinstance(found, Mapping):
            return None
        found = found.get(part.replace("~1", "/").replace("~0", "~"))
    return found if isinstance(found, Mapping) else None


def _named(name: Any) -> str:
    return "number" if name == "integer" else str(name)


def _filled(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")
