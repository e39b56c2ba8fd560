"""Fields of requests that constrain the answer, with the names of OpenAI, vLLM and SGLang.

| field | origin |
| --- | --- |
| `response_format` | OpenAI; with `structural_tag` also vLLM and SGLang |
| `structured_outputs` | vLLM |
| `guided_json`, `guided_regex`, `guided_choice`, `guided_grammar` | vLLM before 0.12 |
| `regex`, `ebnf`, `json_schema` | SGLang |

All become a Grammar (sampling_params.py). A request may have one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from weft.errors import RequestError
from weft.serving.api.body import Body, by_type
from weft.serving.engine.sampling_params import MAX_CHOICES, MAX_GRAMMAR_LENGTH, Grammar

# Limits for the OpenAPI document; Grammar checks them.
Text = Annotated[
    str,
    WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_LENGTH}),
]
Choices = Annotated[
    list[str],
    WithJsonSchema(
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": MAX_CHOICES,
        }
    ),
]


def _schema(value: Any) -> Any:
    if isinstance(value, str | dict | bool):
        return value
    raise ValueError(" must be a JSON schema, or a text with its JSON")


Schema = Annotated[
    Any, BeforeValidator(_schema, json_schema_input_type=Text | dict[str, Any] | bool)
]


class JsonSchema(Body):
    """A schema with its name. The answer always matches it, whatever `strict` is."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


_OF_TAGS = ("format", "structures", "triggers")


class ResponseFormat(Body):
    """The form of the answer. `format`, `structures` and `triggers` are for a structural tag.

    `value` is the schema of a JSON object, as in Text Generation Inference: Hugging Face's client
    sends a json_schema in this form.
    """

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    value: dict[str, Any] | None = None

    model_config = by_type(
        {"json_schema": ("json_schema",), "text": (), "json_object": (), "structural_tag": ()},
        {
            "json_schema": (*_OF_TAGS, "value"),
            "text": (*_OF_TAGS, "json_schema", "value"),
            "json_object": (*_OF_TAGS, "json_schema"),
            "structural_tag": ("json_schema", "value"),
        },
    )

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the answer; RequestError if the fields do not fit the type."""
        param = "response_format"
        fields = self.model_dump(exclude_none=True, exclude={"type", "json_schema", "value"})
        if (self.type == "structural_tag") != bool(fields):
            field = f"{param}.{min(fields, default='format')}"
            if not fields:
                raise RequestError(f"{field} is missing", param=field, code="missing_parameter")
            raise RequestError(f"{field} is only for type structural_tag", param=field)
        if (self.type == "json_schema") != (self.json_schema is not None):
            param += ".json_schema"
            if self.json_schema is None:
                raise RequestError(f"{param} is missing", param=param, code="missing_parameter")
            raise RequestError(f"{param} is only for type json_schema", param=param)
        if self.value is not None:
            param += ".value"
            if self.type != "json_object":
                raise RequestError(f"{param} is only for type json_object", param=param)
            return Grammar("json_schema", _text(self.value), param)
        match self.type:
            case "text":
                return None
            case "structural_tag":
                return Grammar("structural_tag", _text({"type": self.type} | fields), param)
            case "json_object":
                return Grammar("json_object", param=param)
        assert self.json_schema is not None
        if self.json_schema.schema_ is None:
            return Grammar("json_object", param=param)
        param += ".json_schema.schema"
        return Grammar("json_schema", _text(self.json_schema.schema_), param)


_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(Body):
    """The constraint on the answer: exactly one field; `json_object` must be true if given."""

    json_: Schema | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Text | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": [name], "properties": {name: {"not": {"enum": [None, False]}}}}
                for name in _KINDS
            ]
        }
    )


class GuidedRequest(Body):
    """The fields of a request that constrain its answer."""

    ebnf: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def grammar(self) -> Grammar | None:
        """The constraint on the answer, if there is one; RequestError if there are several."""
        given = list(self._grammars())
        if len(given) > 1:
            names = [grammar.param for grammar in given]
            raise RequestError(
                f"{' and '.join(names)} each constrain the answer; give one of them",
                param=names[1],
            )
        return given[0] if given else None

    def _grammars(self) -> Iterator[Grammar]:
        if self.response_format is not None and (grammar := self.response_format.grammar):
            yield grammar
        for field in ("guided_json", "json_schema"):
            if (schema := getattr(self, field)) is not None:
                yield Grammar("json_schema", _text(schema), field)
        for field in ("guided_regex", "regex"):
            if (text := getattr(self, field)) is not None:
                yield Grammar("regex", text, field)
        for field in ("guided_grammar", "ebnf"):
            if (text := getattr(self, field)) is not None:
                yield Grammar("ebnf", text, field)
        if self.guided_choice is not None:
            yield Grammar("choice", _text(self.guided_choice), "guided_choice")
        if self.structured_outputs is not None:
            given = list(self._structured(self.structured_outputs))
            if not given:
                raise RequestError(
                    f"structured_outputs is empty; give it one of {', '.join(_KINDS)}",
                    param="structured_outputs",
                    code="missing_parameter",
                )
            yield from given

    def _structured(self, outputs: StructuredOutputs) -> Iterator[Grammar]:
        if outputs.json_ is not None:
            param = "structured_outputs.json"
            yield Grammar("json_schema", _text(outputs.json_), param)
        if outputs.regex is not None:
            yield Grammar("regex", outputs.regex, "structured_outputs.regex")
        if outputs.choice is not None:
            param = "structured_outputs.choice"
            yield Grammar("choice", _text(outputs.choice), param)
        if outputs.grammar is not None:
            yield Grammar("ebnf", outputs.grammar, "structured_outputs.grammar")
        if outputs.json_object:
            yield Grammar("json_object", param="structured_outputs.json_object")
        if outputs.structural_tag is not None:
            param = "structured_outputs.structural_tag"
            yield Grammar("structural_tag", outputs.structural_tag, param)


def _text(value: Any) -> str:
    """Return a value as JSON; a text is JSON already."""
    return value if isinstance(value, str) else json.dumps(value)
