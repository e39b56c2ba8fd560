"""Bodies of requests: strict JSON objects without unknown fields."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict
from pydantic_core import from_json

from weft.errors import RequestError
from weft.serving.api.errors import field_name
from weft.serving.engine.sampling_params import is_unicode

MAX_DEPTH = 200
"""The maximum nesting of objects and lists in a body; pydantic_core has the same limit."""
_EXPLAINED = 1 << 16  # maximum bytes of a body that is searched again for the field at fault
_MAX_NAME = 80  # characters of a field's name in an error


def by_type(
    required: Mapping[str, Sequence[str]],
    forbidden: Mapping[str, Sequence[str]] | None = None,
    default: str | None = None,
) -> ConfigDict:
    """Document a body whose other fields depend on its field `type`; validators check them.

    Args:
        required: for each type, the fields that must be present and not null.
        forbidden: for each type, the fields that must be absent or null.
        default: the type of a body without the field `type`.
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
    """Return a JSON schema: a field is null or absent, or `other` holds."""
    return {"anyOf": [{"properties": {field: {"type": "null"}}}, other]}


class Body(BaseModel):
    """An object without unknown fields; each value has exactly its field's type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class JsonRoute(APIRoute):
    """A route that reads its body with `read_json`, because FastAPI accepts too much.

    A test checks that every route with a body has this class.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with another reader of the body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def reading(request: Request) -> Response:
            read = _ReadRequest(request.scope, request.receive)
            if body := await read.body():
                read.content = read_json(body)
            return await handle(read)

        return reading


class _ReadRequest(Request):
    content: Any

    async def json(self) -> Any:
        return self.content


def read_json(data: bytes) -> Any:
    """Read a body so that each of its strings and keys can be encoded again.

    The body must be JSON (RFC 8259) in UTF-8, with a nesting up to MAX_DEPTH. Halves of surrogate
    pairs and integers with more than 4300 digits are errors. The last of several fields with one
    name counts, a byte order mark is skipped, and 1e999 is infinite.

    Raises:
        RequestError: the body is invalid; the message names the field, or the position.
    """
    try:
        return from_json(data.removeprefix(codecs.BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        found = _explained(data) if len(data) <= _EXPLAINED else None
        if found is None:
            message = f"the body cannot be read as JSON: {error}"
            if "hex escape" in message:
                message += " (half of a surrogate pair is no character)"
            raise RequestError(message, code="invalid_json") from None
        loc, what = found
        param = field_name(("body", *loc))[:_MAX_NAME]
        message = f"{param or 'the body'} {what}"
        raise RequestError(message, param=param or None, code="invalid_json") from None


_Fault = tuple[tuple[str | int, ...], str]


def _explained(data: bytes) -> _Fault | None:
    """Return the first fault that Python's own reader accepts."""
    try:
        return next(_faults(json.loads(data), ()), None)
    except (ValueError, RecursionError):
        return None


def _faults(value: Any, loc: tuple[str | int, ...]) -> Iterator[_Fault]:
    half = "half of a surrogate pair, which is no character"
    if isinstance(value, str) and not is_unicode(value):
        yield loc, f"holds {half}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield loc, f"is {value}, which is no number of JSON"
    elif isinstance(value, dict | list) and len(loc) > MAX_DEPTH:
        yield loc, f"is nested too deeply: over {MAX_DEPTH}"
    elif isinstance(value, dict):
        for name, each in value.items():
            if not is_unicode(name):
                yield loc, f"has a field whose name holds {half}"
            yield from _faults(each, (*loc, name))
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from _faults(each, (*loc, i))
