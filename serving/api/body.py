"""What every request's body is: strict JSON, of an object whose every field is known."""

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
"""Of objects and lists in a body; pydantic_core's limit."""
_EXPLAINED = 1 << 16  # bytes of a body in which a fault is looked for a second time
_MAX_NAME = 80  # characters of a field's name in an error


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


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is read by `read_json`: FastAPI itself is lax.

    Every route with a body is one; a test sees to that.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler of a request that is read."""
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
    """What a body says, of whose strings and keys each can be written again.

    That is JSON as of RFC 8259, in UTF-8, no deeper than MAX_DEPTH, without halves of surrogate
    pairs and integers of more than 4300 digits. Of fields with one name the last one counts; a
    mark of byte order is passed over, and 1e999 is infinite.

    Raises:
        RequestError: it is something else; the message names the field, or the place.
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
    """The first fault that Python's own reader lets pass."""
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
