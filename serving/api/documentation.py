"""The OpenAPI document: FastAPI describes the requests, msgspec the responses."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from weft.serving.api import anthropic_events, responses, responses_events
from weft.serving.api.errors import ErrorResponse
from weft.serving.batch import objects

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    responses.Completion,
    responses.ChatCompletion,
    responses.ChatCompletionChunk,
    responses.EmbeddingList,
    responses.EngineView,
    responses.Model,
    responses.ModelList,
    responses.Tokens,
    responses.DetokenizedText,
    responses.TokenizerInfo,
    responses.Status,
    responses.Health,
    responses.Version,
    objects.FileObject,
    objects.FileList,
    objects.FileDeleted,
    objects.BatchObject,
    objects.BatchList,
    ErrorResponse,
    responses_events.ResponseObject,
    anthropic_events.MessageOut,
    anthropic_events.TokenCount,
    anthropic_events.AnthropicError,
)


def returns(
    struct: type[msgspec.Struct] | None,
    *,
    streams: bool = False,
    or_status: int | None = None,
    error: type[msgspec.Struct] = ErrorResponse,
    media_type: str = "application/json",
) -> dict[str, Any]:
    """A route's arguments that say what it answers.

    Args:
        struct: the body of a 200; None is plain text.
        streams: it may be server-sent events instead.
        or_status: another status that has the same body.
        error: the body of all others.
        media_type: of a 200.
    """
    schema = {"type": "string"} if struct is None else {"$ref": _REF.format(name=struct.__name__)}
    content: dict[str, Any] = {media_type: {"schema": schema}}
    errors = {"application/json": {"schema": {"$ref": _REF.format(name=error.__name__)}}}
    answers: dict[int | str, Any] = {
        "4XX": {"description": "The request is at fault", "content": errors},
        "5XX": {"description": "The server is at fault", "content": errors},
    }
    if or_status is not None:
        answers[or_status] = {"description": "Not now", "content": content}
    if streams:
        content = content | {"text/event-stream": {"schema": {"type": "string"}}}
    answers[200] = {"description": "Success", "content": content}
    return {"response_model": None, "responses": answers}


def install(app: FastAPI) -> None:
    """Give the app's OpenAPI document the schemas that `returns` refers to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
            document.setdefault("components", {}).setdefault("schemas", {}).update(schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
