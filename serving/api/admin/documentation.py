"""The OpenAPI document: FastAPI describes the requests, msgspec the responses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from weft.serving.api.anthropic import events as anthropic_events
from weft.serving.api.errors import ErrorResponse
from weft.serving.api.openai import replies
from weft.serving.api.responses import events as responses_events
from weft.serving.batch import objects
from weft.serving.engine.sampling_params import RANGES

_REF = "#/components/schemas/{name}"
_STRUCTS = (
    replies.Completion,
    replies.ChatCompletion,
    replies.ChatCompletionChunk,
    replies.EmbeddingList,
    replies.EngineView,
    replies.Model,
    replies.ModelList,
    replies.Tokens,
    replies.DetokenizedText,
    replies.TokenizerInfo,
    replies.Status,
    replies.Health,
    replies.Version,
    objects.FileObject,
    objects.FileList,
    objects.FileDeleted,
    objects.BatchObject,
    objects.BatchList,
    ErrorResponse,
    responses_events.ResponseObject,
    responses_events.ResponseDeleted,
    responses_events.ResponseItems,
    responses_events.InputTokens,
    anthropic_events.MessageOut,
    anthropic_events.TokenCount,
    anthropic_events.MessageBatch,
    anthropic_events.MessageBatchList,
    anthropic_events.MessageBatchDeleted,
    anthropic_events.AnthropicError,
)

_OTHER_NAMES = {"max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}

_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}


def returns(
    struct: type[msgspec.Struct] | None,
    *,
    streams: bool = False,
    or_status: int | None = None,
    error: type[msgspec.Struct] = ErrorResponse,
    media_type: str = "application/json",
) -> dict[str, Any]:
    """Return the arguments for a route that document its responses.

    Args:
        struct: the body of a 200; None is plain text.
        streams: the response may be server-sent events instead.
        or_status: another status with the same body.
        error: the body for all other statuses.
        media_type: the content type of a 200.
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
        content = content | {"text/event-stream": {"itemSchema": _EVENT}}
    answers[200] = {"description": "Success", "content": content}
    return {"response_model": None, "responses": answers}


def install(app: FastAPI, open_paths: Collection[str] | None) -> None:
    """Give the app an OpenAPI document, with the schemas for `returns`.

    Args:
        app: must have all its routes.
        open_paths: paths that need no API key; None if the server has no keys.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=app.description, routes=app.routes
            )
            # Added after FastAPI, which turns limits into floats; a float cannot hold every seed.
            for schema in document["components"]["schemas"].values():
                _add_ranges(schema)
            if open_paths is not None:
                _add_keys(document, open_paths)
            _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_REF)
            document["components"]["schemas"].update(schemas)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_ranges(schema: dict[str, Any]) -> None:
    """Add the ranges of sampling settings, which SamplingParams checks."""
    for name, field in schema.get("properties", {}).items():
        allowed = RANGES.get(_OTHER_NAMES.get(name, name))
        for kind in field.get("anyOf", [field]):
            if allowed is not None and kind.get("type") in ("integer", "number"):
                low = "exclusiveMinimum" if allowed.low_open else "minimum"
                kind.setdefault(low, allowed.low)
                kind.setdefault("maximum", allowed.high)


def _add_keys(document: dict[str, Any], open_paths: Collection[str]) -> None:
    """Document which paths need an API key."""
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{"key": []}]
    for path in document["paths"].keys() & open_paths:
        for operation in document["paths"][path].values():
            operation["security"] = []
