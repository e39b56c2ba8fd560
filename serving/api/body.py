"""What every request's body is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict


def by_type(
    required: Mapping[str, Sequence[str]],
    forbidden: Mapping[str, Sequence[str]] | None = None,
    default: str | None = None,
) -> ConfigDict:
    """A body whose field `type` says which others it has; its validators check that.

    Args:
        required: of each type the fields that are needed, and not null.
        forbidden: of each type the fields that are left out, or null.
        default: the type of a body without one.
    """
    branches: list[Any] = [
        {
            "properties": {"type": {"const": kind}}
            | {name: {"not": {"type": "null"}} for name in names}
            | {name: {"type": "null"} for name in (forbidden or {}).get(kind, ())},
            "required": [*names, *(["type"] if kind != default else [])],
        }
        for kind, names in required.items()
    ]
    return ConfigDict(json_schema_extra={"anyOf": branches})


def only_with(field: str, other: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema: a field is null or left out, or `other` holds."""
    return {"anyOf": [{"properties": {field: {"type": "null"}}}, other]}


class Body(BaseModel):
    """An object whose every field is known and has exactly its type."""

    model_config = ConfigDict(extra="forbid", strict=True)
