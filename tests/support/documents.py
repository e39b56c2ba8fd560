"""OpenAI's own descriptions of what is served: the types of its package, and its OpenAPI document
where that is at hand.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

SCHEMAS = Path(__file__).parents[3] / "shared" / "openai" / "response-schemas.json"


# The document's name of a schema: the package's type.
_TYPES: dict[str, Any] = {
    "CreateCompletionResponse": Completion,
    "CreateChatCompletionResponse": ChatCompletion,
    "CreateChatCompletionStreamResponse": ChatCompletionChunk,
    "CreateEmbeddingResponse": CreateEmbeddingResponse,
    "Model": Model,
    "Response": Response,
    "ResponseStreamEvent": ResponseStreamEvent,
}


def check_type(name: str, body: Any) -> None:
    """Fail if a body is not what the openai package takes it for, where that has a type for it."""
    if name in _TYPES:
        TypeAdapter(_TYPES[name]).validate_python(body, strict=True)


def check_documented(name: str, body: Any) -> None:
    """Fail if a body is not what the schema of that name says. Without the document, it passes."""
    if not SCHEMAS.is_file():
        return
    schema = {"$ref": f"#/components/schemas/{name}", "components": _document()["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(body)]
    assert not errors, f"{name}: {errors}"


@cache
def _document() -> Any:
    document = json.loads(SCHEMAS.read_text())
    _nullable_to_null(document)
    return document


def _nullable_to_null(node: Any) -> None:
    """Turn OpenAPI 3.0's `nullable` into JSON schema's type null."""
    if isinstance(node, dict):
        if node.pop("nullable", False) is True:
            plain = dict(node)
            node.clear()
            node["anyOf"] = [plain, {"type": "null"}]
        for value in node.values():
            _nullable_to_null(value)
    elif isinstance(node, list):
        for value in node:
            _nullable_to_null(value)
