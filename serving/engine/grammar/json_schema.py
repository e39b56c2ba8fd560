"""Which JSON schemas are taken for structured output, and in which form xgrammar is given them.

xgrammar leaves out what it does not know, and looks at one of a schema's constraints where
others stand beside it. So what it would leave out is refused here, by name. Of what it
reports itself, see worker.py.

A schema that does not speak of more properties or items than it lists allows no more (as with
`additionalProperties: false`), unless it lists none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NoReturn

from weft.errors import RequestError

_FORMS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Of these xgrammar looks at the first, and at nothing beside it."""

_KEYWORDS = {
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "object": {
        *("properties", "required", "additionalProperties", "patternProperties"),
        *("propertyNames", "minProperties", "maxProperties"),
    },
}
"""What xgrammar knows, by type."""

_UNKNOWN = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "additionalItems"),
    *("unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}
"""What JSON Schema has besides; other words mean nothing there either."""

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
"""Of schemas in schemas: xgrammar's time grows with more than its square."""

_ESCAPED = '"\\'
_NONE_OF = r"\"\\\x00-\x1f"
PLAIN = f"[^{_NONE_OF}]"
"""Any character that stands for itself."""

FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
    *("uri", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer"),
}


def parse(text: str, param: str) -> Any:
    """What JSON says; RequestError, naming the request's field, if it is none."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else f"no JSON: {error}"
        raise RequestError(f"{param} is {what}", param=param) from None


def prepare(root: Any, param: str) -> Any:
    """A schema as xgrammar is to have it.

    Args:
        root: the schema, which is changed.
        param: the request's field, which errors name.

    Raises:
        RequestError: it is no schema, or asks for what cannot be done.
    """
    todo = [(root, "", 0)]
    while todo:
        schema, place, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"{param} is nested too deeply: over {MAX_DEPTH}", param=param)
        if isinstance(schema, dict):
            _Schema(schema, place, param).check()
            todo += [(each, there, depth + 1) for each, there in _within(schema, place)]
        elif not isinstance(schema, bool):
            raise RequestError(f"{param}{place} must be an object or a boolean", param=param)
    return root


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number in JSON")


def _within(schema: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """The schemas of which it is made, and where they are."""
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
    """The value, or an empty one of its kind: what is of the wrong kind xgrammar refuses."""
    return value if isinstance(value, kind) else kind()


class _Schema:
    """One object of a schema, which `check` completes.

    Args:
        schema: as it was given.
        place: in the whole, such as /properties/name.
        param: the request's field.
    """

    def __init__(self, schema: dict[str, Any], place: str, param: str) -> None:
        self._schema = schema
        self._place = place
        self._param = param

    def check(self) -> None:
        """Raise RequestError for what would be left out."""
        schema = self._schema
        for word in sorted(_UNKNOWN & schema.keys()):
            if schema[word] is not False or not word.startswith("un"):
                self._refuse(word, "is not supported")
        for word in ("unevaluatedItems", "unevaluatedProperties", "uniqueItems"):
            schema.pop(word, None)  # false: nothing more than is allowed anyway
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
            self._refuse(min(beside), f"beside {form} is not supported")
        if form == "allOf" and len(_of(list, schema["allOf"])) != 1:
            self._refuse("allOf", "of more than one schema is not supported")

    def _keep_typed(self, form: str) -> None:
        """Leave out the values that are not of the type."""
        schema = self._schema
        named = schema.pop("type")
        names = named if isinstance(named, list) else [named]
        values = [schema.pop("const")] if form == "const" else schema["enum"]
        kept = [value for value in _of(list, values) if any(_is(value, name) for name in names)]
        if not kept:
            self._refuse(form, f"has no value of type {named}")
        schema["enum"] = kept

    def _check_untyped(self) -> None:
        """Without a type xgrammar takes an object or a list for meant, or anything."""
        schema = self._schema
        if {"properties", "additionalProperties"} & schema.keys():
            schema["type"] = "object"
        elif {"items", "prefixItems"} & schema.keys():
            schema["type"] = "array"
        elif words := set().union(*_KEYWORDS.values()) & schema.keys():
            self._refuse(min(words), "without a type is not supported")

    def _check_string(self) -> None:
        words = {"format", "pattern"} & self._schema.keys()
        lengths = {"minLength", "maxLength"} & self._schema.keys()
        if "format" in words and self._schema["format"] not in FORMATS:
            self._refuse("format", f"{self._schema['format']!r} is not supported")
        if len(words) > 1 or (words and lengths):
            self._refuse(min(words | lengths), f"beside {max(words)} is not supported")
        if "pattern" in words:
            try:
                self._schema["pattern"] = plain(str(self._schema["pattern"]))
            except ValueError as error:
                self._refuse("pattern", f"asks for {error}, which JSON escapes")
        elif lengths:
            self._bound_length()

    def _bound_length(self) -> None:
        """As a pattern: the strings that xgrammar bounds itself may have control characters."""
        least, most = self._schema.pop("minLength", 0), self._schema.pop("maxLength", "")
        if not all(type(n) is int and n >= 0 for n in (least, most) if n != ""):
            self._refuse("minLength or maxLength", "is no number of characters")
        if most != "" and most < least:
            self._refuse("maxLength", f"is {most}, below minLength, which is {least}")
        self._schema["pattern"] = f"^{PLAIN}{{{least},{most}}}$"

    def _check_object(self) -> None:
        schema = self._schema
        listed = _of(dict, schema.get("properties"))
        names = _of(dict, schema.get("propertyNames"))
        if not {"type", *_FORMS} & names.keys():
            names["type"] = "string"  # what else can a name be
        for name in _of(list, schema.get("required")):
            if name not in listed:
                self._refuse("required", f"names {name!r}, which properties does not list")
        if "propertyNames" in schema and (listed or "patternProperties" in schema):
            self._refuse("propertyNames", "beside listed properties is not supported")
        if "patternProperties" in schema and listed:
            self._refuse("patternProperties", "beside properties is not supported")
        if not {"properties", "patternProperties", "propertyNames"} & schema.keys():
            schema.setdefault("additionalProperties", True)

    def _refuse(self, word: str, what: str) -> NoReturn:
        place = self._place if len(self._place) < 200 else "/..." + self._place[-200:]
        raise RequestError(f"{self._param}{place}: {word} {what[:200]}", param=self._param)


def _is(value: Any, name: Any) -> bool:
    if isinstance(value, bool):
        return bool(name == "boolean")
    if isinstance(value, float) and name == "integer":
        return value.is_integer()
    return isinstance(value, _TYPES.get(name, ()))


def plain(pattern: str) -> str:
    """A pattern that matches a part of what the given one does, all of it plain.

    Raises:
        ValueError: it asks for other characters; the message says for which.
    """
    written: list[str] = []
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
            written.append(f"[^{_NONE_OF}" if negated else "[")
            place += negated
        else:
            written.append(PLAIN if char == "." else char)
    return "".join(written)


def _escape(char: str) -> str:
    if char == "s":
        return " "
    if char in 'SWDnrtfvxuc0"\\':
        raise ValueError(f"\\{char}")
    return f"\\{char}"


def _spans(first: str, last: str) -> bool:
    """Whether a range has a character that JSON would escape."""
    if last in ("", "]"):  # a hyphen
        return False
    return first < " " or any(first <= char <= last for char in _ESCAPED)
