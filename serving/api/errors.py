"""Error responses in OpenAI's shape: `{"error": {message, type, param, code}}`.

    RequestError             its own status, usually 400
    EngineError              503, try again later
    DiskError                507
    a body that is not JSON or breaks the schema   400 with the field's name
    an unknown path, a wrong method   404, 405

Any other exception is a bug in weft: a 500 without details, which are in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from http import HTTPMethod, HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from weft.errors import DiskError, EngineError, RequestError, shown
from weft.serving.api.middleware.request_context import current

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's status; no client reads it, but the log shows it

_RETRY_AFTER_SECONDS = {503: 5}  # unless the error has its own estimate
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_MAX_MESSAGE = 2000  # characters
_JSON_WORDS = {"False": "false", "True": "true"}
_MAX_PARAM = 200  # characters; an unknown field may have any name

INTERNAL_ERROR = RequestError("internal error; the server's log has the details", status=500)
"""The error that clients get for a bug in weft."""


class Error(msgspec.Struct):
    """An error; `param` is the field at fault, `code` a short reason for programs."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """The body of every response with an error status."""

    error: Error


def describe(error: RequestError | EngineError) -> tuple[int, ErrorResponse]:
    """Return the HTTP status and the body for an error."""
    if isinstance(error, RequestError):
        return error.status, _body(error.status, error.message, error.param, error.code)
    return 503, _body(503, str(error), None, "engine_unavailable")


def error_body(error: RequestError | EngineError) -> ErrorResponse:
    """Return the body for an error of a request whose status has been sent."""
    _, body = describe(error)
    _note_error(body)
    return body


def _note_error(body: ErrorResponse) -> None:
    """Put the error's code into the request's context, for metrics and logs."""
    if (context := current.get()) is not None:
        context.error = body.error.code or body.error.type


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response with an error, and with Retry-After if a later try makes sense."""
    return _response(status, _body(status, message, param, code), headers)


def install(app: FastAPI) -> None:
    """Make the app respond to every error in this shape."""
    app.add_exception_handler(RequestError, _on_weft_error)
    app.add_exception_handler(EngineError, _on_weft_error)
    app.add_exception_handler(DiskError, _on_disk_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_bug)


def error_reply(
    error: RequestError | EngineError, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the response for an error."""
    all_headers = dict(headers or {})
    if error.retry_after is not None:
        all_headers["retry-after"] = str(error.retry_after)
    return _response(*describe(error), all_headers)


async def _on_weft_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | EngineError)
    return error_reply(error)


async def _on_disk_error(request: Request, error: Exception) -> Response:
    logger.error("%s %s: %s", request.method, request.url.path, error)  # has the disk's path
    message = "the server's disk is full, or fails; try again later"
    return error_response(HTTPStatus.INSUFFICIENT_STORAGE, message)


async def _on_validation_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return _response(*describe(explain(error.errors())))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = error.headers
    match error.status_code:
        case 404:
            message = f"there is no {request.url.path}"
        case 405:
            message = f"{request.url.path} does not take {request.method}"
            headers = {"allow": ", ".join(sorted(_methods(request)))}
        case _:
            message = str(error.detail)
    return error_response(error.status_code, message, headers=headers)


def _methods(request: Request) -> set[str]:
    """Return the methods of a path; each method has its own route."""
    return {
        method
        for method in HTTPMethod
        for route in request.app.routes
        if route.matches({**request.scope, "method": method})[0] is Match.FULL
    }


async def _on_client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_bug(_: Request, error: Exception) -> Response:
    return error_reply(INTERNAL_ERROR)


def explain(errors: Sequence[Mapping[str, Any]]) -> RequestError:
    """Turn pydantic's first complaint into an error that names the field and its value."""
    error = errors[0]
    param = field_name(error["loc"])
    kind, given = error["type"], error.get("input")
    match kind:
        case "missing" if not param:
            return RequestError("the body is empty; send a JSON object", code="invalid_json")
        case "missing":
            return RequestError(f"{param} is missing", param=param, code="missing_parameter")
        case "extra_forbidden":
            message = f"{param} is not a field that this server knows"
            return RequestError(message, param=param, code="unknown_parameter")
        case "value_error":
            return RequestError(
                f"{param or 'the body'}{error['ctx']['error']}", param=param or None
            )
        case "none_required":
            message = f"{param} is not supported; leave it out"
            return RequestError(message, param=param, code="unsupported_parameter")
        case "literal_error":
            expected = error["ctx"]["expected"]
            expected = _JSON_WORDS.get(expected, expected)
            message = f"{param} is {shown(given)}; this server takes {expected}"
            return RequestError(message, param=param, code="unsupported_value")
    if not param:
        return RequestError(f"the body must be a JSON object, not {shown(given)}")
    # pydantic writes "Input should be ..." and "List should have ...".
    reason = "should" + error["msg"].partition("should")[2].replace(" after validation,", ",")
    reason = re.sub("a valid dictionary( or instance of .*)?", "an object", reason)
    return RequestError(f"{param} is {shown(given)}; it {reason}", param=param)


def field_name(loc: Sequence[str | int]) -> str:
    """Name a field: ("body", "messages", 0, "content") -> "messages[0].content"."""
    name = ""
    for part in loc[1:]:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def _body(status: int, message: str, param: str | None, code: str | None) -> ErrorResponse:
    if len(message) > _MAX_MESSAGE:  # such as one with a client's value
        message = message[:_MAX_MESSAGE] + "..."
    if param is not None and len(param) > _MAX_PARAM:
        param = param[:_MAX_PARAM] + "..."
    kind = _TYPES.get(status) or ("server_error" if status >= 500 else "invalid_request_error")
    if code is None and status >= 404:
        code = HTTPStatus(status).phrase.lower().replace(" ", "_")
    return ErrorResponse(Error(message=message, type=kind, param=param, code=code))


class _ErrorReply(Response):
    """A response with an error; when sent, it also puts the error into the request's context."""

    def __init__(self, status: int, body: ErrorResponse, headers: Mapping[str, str]) -> None:
        super().__init__(
            msgspec.json.encode(body), status, headers=headers, media_type="application/json"
        )
        self._error = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _note_error(self._error)
        await super().__call__(scope, receive, send)


def _response(
    status: int, body: ErrorResponse, headers: Mapping[str, str] | None = None
) -> Response:
    all_headers = dict(headers or {})
    if status in _RETRY_AFTER_SECONDS:
        all_headers.setdefault("retry-after", str(_RETRY_AFTER_SECONDS[status]))
    return _ErrorReply(status, body, all_headers)
