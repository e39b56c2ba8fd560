"""Checks JSON schemas for structured output and rewrites them for xgrammar.

xgrammar ignores unknown constraints, and some constraints beside others. This module rejects such
schemas and names the constraint. worker.py handles errors from xgrammar itself.

If a schema lists properties or items, it allows no others by default, as with
`additionalProperties: false`. If it lists none, it allows any.

xgrammar puts a string's pattern between quotes unchanged. If the pattern matched a quote, a
backslash or a control character, the result would be invalid JSON. So `.`, `[^...]` and `\\s` lose
these characters here, and explicit requests for them are rejected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from weft.errors import RequestError

_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Forms of a schema. xgrammar uses the first that it finds, and ignores everything beside it."""

_KEYWORDS = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    },
}
"""Constraints that xgrammar knows, by type."""

_UNKNOWN = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}
"""Other constraints of JSON Schema; any other words mean nothing there either."""

_ASSERTIONS = {*_FORMS, "type", *set().union(*_KEYWORDS.values())}

_TYPES: dict[Any, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}

MAX_DEPTH = 64
"""Maximum depth of schemas in schemas; xgrammar's time grows faster than the square."""
MAX_OPTIONAL = 512
"""Maximum number of optional properties in an object. Each may be followed by any later one, so
xgrammar's time grows with the square: 0.5 s for 512, 5 s for 1,000. It is linear for required ones.
"""

_ESCAPED = '"\\'
_NONE_OF = r"\"\\\x00-\x1f"
PLAIN = f"[^{_NONE_OF}]"
"""A pattern for any character that JSON does not escape."""
MARKUP_PLAIN = f"[^{_NONE_OF}<]"
"""The same without the beginning of a tag."""

FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}


def parse(text: str, param: str) -> Any:
    """Parse JSON; raises RequestError, which names the request's field."""
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_int=_integer, parse_float=_fraction
        )
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"not JSON: {error}"
        raise RequestError(f"{param} is {what}", param=param) from None


def prepare(root: Any, param: str, *, markup: bool = False) -> Any:
    """Check a schema and return it in the form for xgrammar.

    Args:
        root: the schema, which is changed.
        param: the request's field, for errors.
        markup: values stand between tags, so patterns must not match a tag's beginning.

    Raises:
        RequestError: the schema is invalid or not supported.
    """
    todo = [(root, "", 0)]
    while todo:
        schema, place, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"{param} is nested too deeply: over {MAX_DEPTH}", param=param)
        if isinstance(schema, dict):
            _Schema(schema, place, param, markup).check()
            todo += [(each, there, depth + 1) for each, there in _within(schema, place)]
        elif not isinstance(schema, bool):
            raise RequestError(f"{param}{place} must be an object or a boolean", param=param)
    return root


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number in JSON")


def _integer(text: str) -> int:
    _fraction(text)
    return int(text)


def _fraction(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        shown = text if len(text) < 20 else f"{text[:16]}... ({len(text)} characters)"
        raise ValueError(f"{shown} is too large a number")
    return value


def _within(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas inside a schema, and their places."""
    for word in ("items", "additionalProperties", "propertyNames"):
        if word in schema:
            yield schema[word], f"{place}/{word}"
    for word in ("anyOf", "oneOf", "allOf", "prefixItems"):
        for i, each in enumerate(_of(list, schema.get(word))):
            yield each, f"{place}/{word}/{i}"
    for word in ("properties", "patternProperties", "$defs", "definitions"):
        for name, each in _of(dict, schema.get(word)).items():
            yield each, f"{place}/{word}/{name}"


def _of(kind: Any, value: Any) -> Any:
    """Return the value, or an empty one if its type is wrong; xgrammar rejects wrong types."""
    return value if isinstance(value, kind) else kind()


class _Schema:
    """One object in a schema.

    Args:
        schema: the object, which `check` changes.
        place: its place in the whole schema, such as /properties/name.
        param: the request's field.
        markup: see `prepare`.
    """

    def __init__(self, schema: dict[str, Any], place: str, param: str, markup: bool) -> None:
        self._schema = schema
        self._place = place
        self._param = param
        self._markup = markup

    def check(self) -> None:
        """Complete the object for xgrammar; raises RequestError for parts it would ignore."""
        schema = self._schema
        for word in sorted(_UNKNOWN & schema.keys()):
            if schema[word] is not False or not word.startswith("un"):
                self._reject(word, "is not supported")
        for word in ("unevaluatedItems", "unevaluatedProperties", "uniqueItems"):
            schema.pop(word, None)  # false: the default
        form = next((word for word in _FORMS if word in schema), None)
        if form is not None:
            self._check_form(form)
            return
        types = schema.get("type")
        types = types if isinstance(types, list) else [types] if types is not None else []
        if not types:
            self._check_untyped()
        self._check_string()
        if types == ["array"] and not {"items", "prefixItems"} & schema.keys():
            schema["items"] = {}
        if "object" in types or _KEYWORDS["object"] & schema.keys():
            self._check_object()

    def _check_form(self, form: str) -> None:
        schema = self._schema
        beside = (_ASSERTIONS - {form}) & schema.keys()
        if form in ("const", "enum") and beside == {"type"}:
            self._keep_typed(form)
        elif beside:
            self._reject(min(beside), f"beside {form} is not supported")
        if form == "allOf" and len(_of(list, schema["allOf"])) != 1:
            self._reject("allOf", "of more than one schema is not supported")

    def _keep_typed(self, form: str) -> None:
        """Drop values with another type."""
        schema = self._schema
        named = schema.pop("type")
        names = named if isinstance(named, list) else [named]
        values = [schema.pop("const")] if form == "const" else schema["enum"]
        kept = [value for value in _of(list, values) if any(_is(value, name) for name in names)]
        if not kept:
            self._reject(form, f"has no value of type {named}")
        schema["enum"] = kept

    def _check_untyped(self) -> None:
        """Add the implied type; xgrammar would guess it or allow anything."""
        schema = self._schema
        if {"properties", "additionalProperties"} & schema.keys():
            schema["type"] = "object"
        elif {"items", "prefixItems"} & schema.keys():
            schema["type"] = "array"
        elif words := set().union(*_KEYWORDS.values()) & schema.keys():
            self._reject(min(words), "without a type is not supported")

    def _check_string(self) -> None:
        words = {"format", "pattern"} & self._schema.keys()
        lengths = {"minLength", "maxLength"} & self._schema.keys()
        if "format" in words and self._schema["format"] not in FORMATS:
            self._reject("format", f"{self._schema['format']!r} is not supported")
        if len(words) > 1 or (words and lengths):
            self._reject(min(words | lengths), f"beside {max(words)} is not supported")
        if "pattern" in words:
            try:
                self._schema["pattern"] = plain(str(self._schema["pattern"]), markup=self._markup)
            except ValueError as error:
                self._reject("pattern", f"asks for {error}, which JSON escapes")
        elif lengths:
            self._bound_length()

    def _bound_length(self) -> None:
        """Write length bounds as a pattern; xgrammar's own bounds admit control characters."""
        least, most = self._schema.pop("minLength", 0), self._schema.pop("maxLength", "")
        if not all(type(n) is int and n >= 0 for n in (least, most) if n != ""):
            self._reject("minLength or maxLength", "is not a number of characters")
        if most != "" and most < least:
            self._reject("maxLength", f"is {most}, below minLength, which is {least}")
        char = PLAIN
        if self._markup:
            direct = re.fullmatch("/properties/[^/]*", self._place)  # text without escapes
            char = MARKUP_PLAIN if not direct else "[^<]" if most != "" else "([^<]|<[^/])"
        self._schema["pattern"] = f"^{char}{{{least},{most}}}$"

    def _check_object(self) -> None:
        schema = self._schema
        listed = _of(dict, schema.get("properties"))
        names = _of(dict, schema.get("propertyNames"))
        if not {"type", *_FORMS} & names.keys():
            names["type"] = "string"  # a name is always a string
        for name in _of(list, schema.get("required")):
            if name not in listed:
                self._reject("required", f"names {name!r}, which properties does not list")
        optional = len(listed.keys() - set(map(str, _of(list, schema.get("required")))))
        if optional > MAX_OPTIONAL:
            self._reject(
                "properties",
                f"has {optional} optional properties; the maximum is {MAX_OPTIONAL}, and required "
                "properties have no limit",
            )
        if "propertyNames" in schema and (listed or "patternProperties" in schema):
            self._reject("propertyNames", "beside listed properties is not supported")
        if "patternProperties" in schema and listed:
            self._reject("patternProperties", "beside properties is not supported")
        if not {"properties", "patternProperties", "propertyNames"} & schema.keys():
            schema.setdefault("additionalProperties", True)

    def _reject(self, word: str, what: str) -> NoReturn:
        place = self._place if len(self._place) < 200 else "/..." + self._place[-200:]
        raise RequestError(f"{self._param}{place}: {word} {what[:200]}", param=self._param)


def _is(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))


def plain(pattern: str, *, markup: bool = False) -> str:
    """Restrict a pattern to characters without an escape in JSON.

    With `markup`, dots and negated classes do not match a tag's beginning either.

    Raises:
        ValueError: the pattern asks for other characters; the message names them.
    """
    written: list[str] = []
    none_of, dot = (_NONE_OF + "<", MARKUP_PLAIN) if markup else (_NONE_OF, PLAIN)
    in_class = False
    place = 0
    while place < len(pattern):
        char = pattern[place]
        place += 1
        if char == "\\" and place < len(pattern):
            written.append(_escape(pattern[place]))
            place += 1
        elif char == '"' or ord(char) < 0x20:
            raise ValueError(repr(char))
        elif in_class:
            if char == "-" and _spans(pattern[place - 2], pattern[place : place + 1]):
                raise ValueError(f"a range with {_ESCAPED[0]!r}, {_ESCAPED[1]!r} or control codes")
            in_class = char != "]"
            written.append(char)
        elif char == "[":
            in_class = True
            negated = pattern.startswith("^", place)
            written.append(f"[^{none_of}" if negated else "[")
            place += negated
        else:
            written.append(dot if char == "." else char)
    return "".join(written)


def _escape(char: str) -> str:
    if char == "s":
        return " "
    if char in 'SWDnrtfvxuc0"\\':
        raise ValueError(f"\\{char}")
    return f"\\{char}"


def _spans(first: str, last: str) -> bool:
    """Return whether JSON escapes a character in the range."""
    if last in ("", "]"):  # a hyphen
        return False
    return first < " " or any(first <= char <= last for char in _ESCAPED)
