"""Bodies of requests: strict JSON objects without unknown fields."""

from __future__ import annotations

import asyncio
import codecs
import json
import math
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Union, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import (
    CoreSchema,
    InitErrorDetails,
    PydanticKnownError,
    core_schema,
    from_json,
)

from weft.errors import RequestError
from weft.serving.api.body_room import LARGE
from weft.serving.api.errors import explain, field_name
from weft.serving.api.json_counts import MOST, Counts, count, limits
from weft.serving.api.middleware.request_context import heavy
from weft.serving.engine.sampling_params import is_unicode

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

    from weft.serving.api.state import ServerState

MAX_DEPTH = 200
"""The maximum nesting of objects and lists in a body; pydantic_core has the same limit."""
MAX_KEYS = 2048
"""Maximum number of keys in an object with checked values, such as metadata."""
_UNKNOWN_FIELDS = 32  # maximum number; each is an error of its own
_EXPLAINED = 1 << 16  # maximum bytes of a body that is searched again for the field at fault
_HEAVY = Counts(containers=1 << 12, values=1 << 17)  # only one heavier body is read at a time
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
        default: the type of a body whose field `type` is absent or null.
    """
    branches: list[Any] = [
        {
            "properties": {"type": {"enum": [kind, None]} if kind == default else {"const": kind}}
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


def _end_early(schema: Any) -> None:
    """Bound the number of errors from a pydantic schema, also from the schemas inside it.

    Literal numbers and booleans become strict, too.
    """
    if isinstance(schema, list | tuple):
        for each in schema:
            _end_early(each)
    if not isinstance(schema, dict):
        return
    function = schema.get("function")
    if isinstance(function, dict):
        check = function.get("function")
        if check is _has_few_keys or (isinstance(check, partial) and check.func is _has_kind):
            return  # complete already, as part of another body
    if schema.get("type") == "list":
        schema["fail_fast"] = True
    elif schema.get("type") == "dict" and schema["values_schema"]["type"] != "any":
        _end_early(schema["values_schema"])
        _check_before(schema, _has_few_keys)
        return
    elif schema.get("type") == "literal" and not isinstance(schema["expected"][0], str):
        _check_before(schema, partial(_has_kind, schema["expected"]))
        return
    for name, each in schema.items():
        # Skip a schema's own metadata. The field `metadata` is in an object without a type.
        if name != "metadata" or not isinstance(schema.get("type"), str):
            _end_early(each)


def _check_before(schema: dict[str, Any], check: Callable[[Any], Any]) -> None:
    inner = schema.copy()
    schema.clear()
    schema |= core_schema.no_info_before_validator_function(check, inner)


def _has_kind(expected: Sequence[Any], value: Any) -> Any:
    if isinstance(value, bool) != isinstance(expected[0], bool):  # for pydantic, 0 is False
        ctx = {"expected": " or ".join(map(repr, expected))}
        raise PydanticKnownError("literal_error", ctx)
    return value


def _has_few_keys(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_KEYS:  # max_length is checked after the values
        raise ValueError(f" has {len(value):,} keys; at most {MAX_KEYS:,}")
    return value


class Body(BaseModel):
    """An object without unknown fields; each value has exactly its field's type.

    Validation ends soon after the first error. pydantic would describe each wrong element, and a
    body of some megabytes would stop the server for seconds.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return pydantic's schema; its lists end at the first error."""
        schema = handler(source)
        _end_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        known = len(cls.model_fields)
        if isinstance(value, dict) and len(value) > known + _UNKNOWN_FIELDS:
            raise ValueError(f" has {len(value):,} fields; this server knows {known}")
        return value


def one_of(
    bodies: Sequence[type[Body]], choose: Callable[[Mapping[str, Any]], type[Body]]
) -> BeforeValidator:
    """Return a validator for an object with several possible forms.

    Errors are about the client's form, and name its fields.

    Args:
        bodies: all forms.
        choose: returns an object's form; it may raise `wrong_choice`.
    """

    def read(value: Any) -> Body:
        body = choose(value) if isinstance(value, dict) else bodies[0]
        return body.model_validate(value)

    return BeforeValidator(read, json_schema_input_type=Union[tuple(bodies)])  # noqa: UP007


def by_field(field: str, bodies: Mapping[str, type[Body]]) -> BeforeValidator:
    """Return a validator for an object; one field's value selects its form."""

    def choose(value: Mapping[str, Any]) -> type[Body]:
        kind = value.get(field)
        if not isinstance(kind, str) or kind not in bodies:
            raise wrong_choice(field, value, bodies)
        return bodies[kind]

    return one_of(list(bodies.values()), choose)


def wrong_choice(field: str, value: Mapping[str, Any], allowed: Iterable[str]) -> ValidationError:
    """Return pydantic's error for a field with another value than the allowed ones."""
    error: InitErrorDetails = {"type": "missing", "loc": (field,), "input": value}
    if field in value:
        expected = ", ".join(map(repr, allowed))
        error = {
            "type": "literal_error",
            "loc": (field,),
            "input": value[field],
            "ctx": {"expected": expected},
        }
    return ValidationError.from_exception_data(field, [error])


class JsonRoute(APIRoute):
    """A route that reads its body with `read_json`, because FastAPI accepts too much.

    A test checks that every route with a body has this class.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with another reader of the body."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        model = cast(type[Body], self.body_field.field_info.annotation)

        async def reading(request: Request) -> Response:
            state: ServerState = request.app.state.server
            body = await _validated(state, model, request)
            return await handle(_ReadRequest(request.scope, request.receive, body))

        return reading


class _ReadRequest(Request):
    """A request with a validated body; FastAPI does not validate an instance again."""

    def __init__(self, scope: Scope, receive: Receive, content: Body | None) -> None:
        super().__init__(scope, receive)
        self._content = content

    async def body(self) -> bytes:
        return b"" if self._content is None else b"{}"  # the bytes themselves are gone

    async def json(self) -> Body | None:
        return self._content


async def _validated(state: ServerState, model: type[Body], request: Request) -> Body | None:
    """Read and validate a body; None if it is empty.

    A large body is read in a thread, and its values are counted first. Its lists and objects are
    validated one by one in Python, so the event loop gets its turn in between. Large bodies are
    counted in turn, because the event loop would wait for each thread that counts.

    Raises:
        RequestError: the body is invalid, or other large bodies take all the room.
    """
    room = state.body_room
    with room.place() as arriving:
        async for chunk in Request(request.scope, request.receive).stream():
            arriving.add(chunk)
        room.arrived(arriving)
        chunks = arriving.chunks
        if not arriving.size:
            return None
        if arriving.size <= LARGE:
            return _valid(model, chunks)
        most = MOST if state.engine is None else limits(state.engine.info.max_model_len)
        async with state.counting:
            counts = await asyncio.to_thread(_join_and_count, chunks, most)
        if counts.containers > _HEAVY.containers or counts.values > _HEAVY.values:
            heavy.set(True)
        return await state.aside(_valid, model, chunks)


def _join_and_count(chunks: list[bytes], most: Counts) -> Counts:
    data = b"".join(chunks)
    chunks[:] = [data]  # the parts would take as much memory as the whole
    return count(data, most)


def _valid(model: type[Body], chunks: list[bytes]) -> Body:
    data = b"".join(chunks)
    chunks.clear()
    content = read_json(data)
    del data
    try:
        return model.model_validate(content)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise explain([{**first, "loc": ("body", *first["loc"])}]) from None


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
