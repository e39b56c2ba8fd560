"""Grammars for arguments in Gemma's and Python's syntax, from JSON schemas.

xgrammar knows the other syntaxes. Unsupported schemas are refused by name.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from weft.errors import RequestError
from weft.serving.api.parsing.grammar_parts import (
    Format,
    either,
    literal,
    optional,
    regex,
    sequence,
    star,
)
from weft.serving.engine.grammar.json_schema import prepare

_SCALARS = ("integer", "number", "boolean", "null")
_KEY = "[a-zA-Z_][a-zA-Z0-9_]*"
_ANY_DEPTH = 3
_MAX_DEPTH = 16
_DEFINITIONS = ("$defs", "definitions")


class Arguments:
    """Builds the formats for one tool's arguments.

    Args:
        schema: the arguments' JSON schema.
        place: the schema's name in errors, such as "tools: f".
        tokens: the marks' special tokens, by text.
        quote: the mark around texts in Gemma's syntax.

    Raises:
        RequestError: the schema is invalid or not supported.
    """

    def __init__(
        self, schema: dict[str, Any], place: str, tokens: Mapping[str, int], quote: str = ""
    ) -> None:
        self._root = schema
        self._place = place
        self._tokens = tokens
        self._quote = quote
        prepare(copy.deepcopy(schema), place)  # refuses keywords that xgrammar would ignore

    def gemma(self) -> Format:
        """Return a format for `{key:value,key:value}`."""
        return self._gemma(self._root, "", 0)

    def python(self) -> Format:
        """Return a format for `key=value, key=value`. Values are JSON, for `python_calls`.

        A boolean may also be Python's.
        """

        def member(key: str, schema: Any, place: str) -> Format:
            if not key.isidentifier():
                self._refuse(place, "is no name in Python")
            return sequence(literal(f"{key}=", self._tokens), self._json(schema, place))

        any_member = sequence(regex(_KEY + "="), self._json({}, ""))
        return self._members(self._resolved(self._root, ""), "", ", ", member, any_member)

    def _json(self, schema: Any, place: str) -> Format:
        if isinstance(schema, Mapping):
            shared = {word: self._root[word] for word in _DEFINITIONS if word in self._root}
            schema = dict(schema) | shared
        found: Format = {"type": "json_schema", "json_schema": schema, "of": self._place + place}
        boolean = isinstance(schema, Mapping) and schema.get("type") == "boolean"
        return either(found, regex("True|False")) if boolean else found

    def _gemma(self, schema: Any, place: str, depth: int) -> Format:
        """Return the format for one value."""
        if depth > _MAX_DEPTH:
            self._refuse(place, f"is nested too deeply: over {_MAX_DEPTH}")
        if schema is True or schema == {}:
            return self._any(_ANY_DEPTH)
        schema = self._resolved(schema, place)
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema:
                return either(
                    *(
                        self._gemma(each, f"{place}/{word}/{i}", depth + 1)
                        for i, each in enumerate(schema[word])
                    )
                )
        if "const" in schema or "enum" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return either(*(literal(self._written(value), self._tokens) for value in values))
        kinds = schema.get("type", "object" if "properties" in schema else None)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return either(*(self._typed(kind, schema, place, depth) for kind in kinds))

    def _typed(self, kind: Any, schema: Mapping[str, Any], place: str, depth: int) -> Format:
        if kind in _SCALARS:
            limits = {w: schema[w] for w in _NUMBERS if w in schema and kind != "null"}
            return {"type": "json_schema", "json_schema": {"type": kind, **limits}}
        if kind == "string":
            return self._text(schema, place)
        if kind == "array":
            return self._array(schema, place, depth)
        if kind != "object":
            return self._any(_ANY_DEPTH)

        def member(key: str, inner: Any, there: str) -> Format:
            written = key if re.fullmatch(_KEY, key) else self._quote + key + self._quote
            value = self._gemma(inner, there, depth + 1)
            return sequence(literal(written + ":", self._tokens), value)

        more = schema.get("additionalProperties")
        value = self._gemma({} if more in (None, True) else more, place, depth + 1)
        any_member = sequence(regex(_KEY + ":"), value)
        members = self._members(schema, place, ",", member, any_member)
        return sequence(literal("{", {}), members, literal("}", {}))

    def _members(
        self,
        schema: Mapping[str, Any],
        place: str,
        separator: str,
        member: Callable[[str, Any, str], Format],
        any_member: Format,
    ) -> Format:
        """Return the format for an object's members, in the schema's order."""
        for word in ("patternProperties", "propertyNames", "minProperties", "maxProperties"):
            if word in schema:
                self._refuse(place, f"has {word}, which this format for calls cannot enforce")
        comma = literal(separator, {})
        listed = schema.get("properties") or {}
        required = schema.get("required") or ()
        more = schema.get("additionalProperties", not listed)
        written = [
            (member(key, each, f"{place}/properties/{key}"), key in required)
            for key, each in listed.items()
        ]
        others = star(sequence(comma, any_member)) if more is not False else None

        def after(i: int) -> list[Format]:
            """Return the rule for the text after one member."""
            rest = [
                sequence(comma, form) if must else optional(sequence(comma, form))
                for form, must in written[i:]
            ]
            return [*rest, *([others] if others else [])]

        options: list[Format] = []
        for i, (form, must) in enumerate(written):  # the first member's number
            options.append(sequence(form, *after(i + 1)))
            if must:
                return either(*options)
        if others:
            options.append(sequence(any_member, others))
        return optional(either(*options)) if options else sequence()

    def _array(self, schema: Mapping[str, Any], place: str, depth: int) -> Format:
        if "prefixItems" in schema:
            self._refuse(place, "has prefixItems, which this format for calls cannot enforce")
        least, most = schema.get("minItems", 0), schema.get("maxItems", -1)
        begin, end = literal("[", {}), literal("]", {})
        if most == 0:
            return sequence(begin, end)
        item = self._gemma(schema.get("items", {}), f"{place}/items", depth + 1)
        more = sequence(literal(",", {}), item)
        times = {"min": max(least - 1, 0), "max": most - 1 if most > 0 else -1}
        items = sequence(item, {"type": "repeat", "content": more, **times})
        return sequence(begin, items if least else optional(items), end)

    def _text(self, schema: Mapping[str, Any], place: str) -> Format:
        for word in ("pattern", "format"):
            if word in schema:
                self._refuse(place, f"has {word}, which this format for calls cannot enforce")
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        quote = literal(self._quote, self._tokens)
        inner: Format = {"type": "any_text"}
        if self._quote not in self._tokens:
            inner["excludes"] = [self._quote]
        if most is not None:
            inner["max_chars"] = most - least
        first = (regex(f"[^<]{{{least}}}"),) if least else ()
        return sequence(quote, *first, inner, quote)

    def _any(self, depth: int) -> Format:
        """Return the format for any value up to some depth."""
        simple = [self._typed(kind, {}, "", 0) for kind in _SCALARS]
        forms = [self._text({}, ""), *simple]
        if depth:
            value = self._any(depth - 1)
            item = sequence(value, star(sequence(literal(",", {}), value)))
            member = sequence(regex(_KEY + ":"), value)
            members = sequence(member, star(sequence(literal(",", {}), member)))
            forms.append(sequence(literal("[", {}), optional(item), literal("]", {})))
            forms.append(sequence(literal("{", {}), optional(members), literal("}", {})))
        return either(*forms)

    def _written(self, value: Any) -> str:
        """Write a value in Gemma's syntax."""
        if isinstance(value, str):
            return self._quote + value + self._quote
        if isinstance(value, list):
            return "[" + ",".join(map(self._written, value)) + "]"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{self._written(v)}" for k, v in value.items()) + "}"
        return json.dumps(value)

    def _resolved(self, schema: Any, place: str) -> Mapping[str, Any]:
        """Return a reference's schema."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping):
                self._refuse(place, "allows no value")
            if "$ref" not in schema:
                return schema
            found: Any = self._root
            for part in str(schema["$ref"]).removeprefix("#").split("/")[1:]:
                found = found.get(part) if isinstance(found, Mapping) else None
            schema = found
        return self._refuse(place, "refers to itself")

    def _refuse(self, place: str, what: str) -> NoReturn:
        raise RequestError(f"{self._place}{place} {what}", param="tools")


_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
