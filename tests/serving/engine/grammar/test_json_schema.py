"""Schemas that xgrammar would not keep to are refused by name; the others keep their meaning."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.errors import RequestError
from weft.serving.engine.grammar.json_schema import parse, prepare


def refusal(schema: Any) -> str:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(RequestError) as error:
        prepare(parse(text, "guided_json"), "guided_json")
    assert error.value.param == "guided_json"
    return error.value.message


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"not": {"type": "string"}}, "guided_json: not is not supported"),
        ({"type": "array", "uniqueItems": True}, "guided_json: uniqueItems is not"),
        ({"type": "array", "contains": {}}, "guided_json: contains is not"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired is not"),
        ({"type": "object", "properties": {"a": {"if": {}}}}, "guided_json/properties/a: if is"),
        ({"anyOf": [{"type": "array", "items": {"not": {}}}]}, "guided_json/anyOf/0/items: not"),
        ({"$defs": {"x": {"not": {}}}, "$ref": "#/$defs/x"}, "guided_json/$defs/x: not"),
        ({"type": "object", "anyOf": [{}]}, "type beside anyOf is not supported"),
        ({"$ref": "#/$defs/x", "minLength": 3}, "minLength beside $ref is not supported"),
        ({"allOf": [{}, {}]}, "allOf of more than one schema is not supported"),
        ({"minLength": 3}, "minLength without a type is not supported"),
        ({"type": "string", "format": "colour"}, "format 'colour' is not supported"),
        ({"type": "string", "pattern": "a", "maxLength": 1}, "maxLength beside pattern is not"),
        ({"type": "string", "pattern": 'a"b'}, "pattern asks for '\"', which JSON escapes"),
        ({"type": "string", "pattern": r"a\S"}, r"pattern asks for \S, which"),
        ({"type": "string", "pattern": "[A-z]"}, "pattern asks for a range with"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength is 2, below minLength"),
        ({"type": "object", "required": ["a"]}, "required names 'a', which properties does not"),
        ({"type": "string", "enum": [1, 2]}, "enum has no value of type string"),
        ({"type": "array", "items": 5}, "guided_json/items must be an object or a boolean"),
        ([], "guided_json must be an object or a boolean"),
        ("{", "guided_json is not JSON"),
        ('{"type": "number", "minimum": NaN}', "guided_json is not JSON: NaN is not a number"),
        ('{"const": 1e400}', "guided_json is not JSON: 1e400 is too large a number"),
        ('{"const": 1' + "0" * 400 + "}", "1000000000000000... (401 characters) is too large"),
        (
            {"type": "object", "properties": {f"p{i}": {} for i in range(600)}, "required": ["p7"]},
            "properties has 599 optional properties; the maximum is 512",
        ),
        ('{"items":' * 100_000 + "{}" + "}" * 100_000, "guided_json is nested too deeply"),
    ],
)
def test_what_cannot_be_kept_to_is_named(schema: Any, said: str) -> None:
    assert said in refusal(schema)


@pytest.mark.parametrize(
    ("schema", "prepared"),
    [
        ({"type": "string", "enum": ["a", 1]}, {"enum": ["a"]}),
        ({"type": ["integer", "null"], "enum": [1.0, None, "a"]}, {"enum": [1.0, None]}),
        ({"type": "integer", "const": 3}, {"enum": [3]}),
        ({"type": "boolean", "enum": [True, 1]}, {"enum": [True]}),
        ({"type": "object"}, {"type": "object", "additionalProperties": True}),
        ({"type": "array"}, {"type": "array", "items": {}}),
        ({"properties": {"a": {}}}, {"properties": {"a": {}}, "type": "object"}),
        ({"type": "array", "items": {}, "uniqueItems": False}, {"type": "array", "items": {}}),
        ({"title": "T", "default": 3, "x-mine": [1]}, {"title": "T", "default": 3, "x-mine": [1]}),
        (True, True),
    ],
)
def test_what_is_meant_is_said_in_its_terms(schema: Any, prepared: Any) -> None:
    assert prepare(schema, "guided_json") == prepared
