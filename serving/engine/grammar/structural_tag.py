"""Converts every grammar to one form: a format of xgrammar's structural tags.

So a schema has the same meaning alone, after a thought and as a tool's arguments. Each schema goes
through json_schema.py and has the same limit on white space. A "grammar" may also be in Lark's
syntax, or a regular expression inside a JSON text, unknown to xgrammar: then it has the fields
`syntax` and `writing`. In errors both have the name in their field `of`, or else their place in the
tag.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args

from weft.errors import RequestError, shown
from weft.serving.engine.grammar.characters import Writing
from weft.serving.engine.grammar.expressions import Rules, expression_as_ebnf
from weft.serving.engine.grammar.json_schema import parse, prepare
from weft.serving.engine.grammar.lark_grammar import lark_as_ebnf
from weft.serving.engine.sampling_params import Grammar

Format = dict[str, Any]

MAX_WHITESPACE = 16
"""Maximum number of white space characters between parts of JSON; some models never stop."""
MAX_DEPTH = 128
"""Maximum depth of objects and lists in a structural tag, without schemas."""

FORMATS = {
    *("any_text", "any_tokens", "const_string", "dispatch", "exclude_token", "grammar"),
    *("json_schema", "optional", "or", "plus", "qwen_xml_parameter", "regex", "repeat"),
    *("sequence", "star", "tag", "tags_with_separator", "token", "token_dispatch"),
    *("token_triggered_tags", "triggered_tags"),
}
"""All formats in xgrammar 0.2.8, which guesses the format if the type is missing."""
_UNTYPED = {"tags": "tag", "begin": "token", "end": "token"}
"""Fields with formats that need no type: field -> type."""


def as_format(grammar: Grammar, token_id: Callable[[str | int], int | None]) -> Format:
    """Return a grammar as a format for xgrammar, without the text that comes before it.

    Args:
        grammar: a request's grammar.
        token_id: function from a token's text or id to its id, or to None if grammars must not
            name the token.

    Raises:
        RequestError: the grammar is invalid or not supported.
    """
    forms = [_written(grammar)]
    if grammar.instead:
        forms.append(json.loads(grammar.instead))
    for node, place in (found for form in forms for found in _nodes(form, grammar.param)):
        if node["type"] == "qwen_xml_parameter":  # its older name
            node |= {"type": "json_schema", "style": "qwen_xml"}
        if node["type"] == "json_schema":
            within = f"{place}/json_schema" if grammar.kind == "structural_tag" else place
            where = str(node.pop("of", within))
            markup = node.get("style", "json") != "json"
            node["json_schema"] = prepare(node.get("json_schema"), where, markup=markup)
            node["max_whitespace_cnt"] = MAX_WHITESPACE
        elif node["type"] == "grammar" and "syntax" in node:
            node["grammar"] = _ebnf(node, place)
        else:
            _name_tokens(node, place, token_id)
    forms[0] = preceded(forms[0], grammar.header)
    return {"type": "or", "elements": forms} if grammar.instead else forms[0]


def preceded(form: Format, before: str) -> Format:
    """Put the format from Grammar.before or Grammar.header before a format, if it exists."""
    return {"type": "sequence", "elements": [json.loads(before), form]} if before else form


def tag_of(form: Format) -> str:
    """Return the structural tag that xgrammar compiles."""
    return json.dumps({"type": "structural_tag", "format": form})


def tokens_replaced(form: Format, replace: Callable[[int], int]) -> Format:
    """Return a copy with other token ids, for another vocabulary."""
    copy: Format = json.loads(json.dumps(form))
    for node, _ in _nodes(copy, ""):
        _name_tokens(node, "", lambda token: replace(int(token)))
    return copy


def _ebnf(node: Format, place: str) -> str:
    """Return the EBNF for a grammar in another syntax, and remove that syntax's fields."""
    place = str(node.pop("of", place))[:80]
    convert = _SYNTAXES.get(node.pop("syntax"))
    writing = node.pop("writing", "plain")
    text = node.get("grammar")
    if convert is None or writing not in get_args(Writing) or not isinstance(text, str):
        raise RequestError(
            f"{place} is not a grammar: its syntax is {' or '.join(_SYNTAXES)}, its writing "
            f"{' or '.join(get_args(Writing))}, and grammar is a text"
        )
    try:
        return convert(text, writing)
    except RequestError as error:
        raise RequestError(f"{place}: {error.message}") from None


def _regex_as_ebnf(pattern: str, writing: Writing) -> str:
    rules = Rules()
    return "\n".join([f"root ::= {expression_as_ebnf(pattern, writing, rules)}", *rules.lines])


_SYNTAXES: dict[Any, Callable[[str, Writing], str]] = {
    "lark": lark_as_ebnf,
    "regex": _regex_as_ebnf,
}

_TOKENS = {"token", "exclude_tokens", "trigger_tokens"}


def _name_tokens(node: Format, place: str, token_id: Callable[[str | int], int | None]) -> None:
    """Replace tokens that are named by their text by their ids."""

    def found(token: Any) -> int:
        number = token_id(token) if isinstance(token, str | int) else None
        if number is None:
            raise RequestError(f"{place} must not name the token {shown(token)}")
        return number

    for word in _TOKENS & node.keys():
        value = node[word]
        if isinstance(value, list):
            node[word] = [found(each) for each in value]
        elif not isinstance(value, dict):
            node[word] = found(value)
    if node["type"] == "token_dispatch":
        for rule in node["rules"] if isinstance(node.get("rules"), list) else ():
            if isinstance(rule, list) and rule:
                rule[0] = found(rule[0])


def _written(grammar: Grammar) -> Format:
    match grammar.kind:
        case "json_object":
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "json_schema":
            return {"type": "json_schema", "json_schema": parse(grammar.text, grammar.param)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "ebnf":
            return {"type": "grammar", "grammar": grammar.text}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in grammar.choices]
            return {"type": "or", "elements": texts}
        case "structural_tag":
            return _tag(grammar)


def _tag(grammar: Grammar) -> Format:
    """Return the format of a structural tag in either the present or the older form."""
    tag = parse(grammar.text, grammar.param)
    match tag:
        case {"type": "structural_tag", "format": dict(form)}:
            return form
        case {"type": "structural_tag", "structures": list(structures), "triggers": list(triggers)}:
            return {
                "type": "triggered_tags",
                "triggers": triggers,
                "tags": [_older(each, grammar.param) for each in structures],
            }
    raise RequestError(
        f'{grammar.param} is not a structural tag; it needs the type "structural_tag" and a format'
    )


def _older(structure: Any, param: str) -> Format:
    match structure:
        case {"begin": str(begin), "schema": schema, "end": str(end)}:
            content = {"type": "json_schema", "json_schema": schema}
            return {"type": "tag", "begin": begin, "content": content, "end": end}
    raise RequestError(f"{param}: each entry of structures must have begin, schema and end")


def _nodes(form: Format, place: str) -> Iterator[tuple[Format, str]]:
    """Yield every format in a format, with its type filled in, and its place; skip schemas."""
    todo: list[tuple[Any, str, int, str | None]] = [(form, place, 0, None)]
    while todo:
        node, place, depth, kind = todo.pop()
        if depth > MAX_DEPTH:
            raise RequestError(f"{place[:80]} is nested too deeply: over {MAX_DEPTH}")
        if isinstance(node, list):
            todo += [(each, f"{place}/{i}", depth + 1, kind) for i, each in enumerate(node)]
        elif isinstance(node, dict):
            kind = node.setdefault("type", kind)
            if not isinstance(kind, str) or kind not in FORMATS:
                raise RequestError(
                    f"{place[:80]} has the type {shown(kind)}; a format's type is one of "
                    f"{', '.join(sorted(FORMATS))}"
                )
            yield node, place
            if node["type"] != "json_schema":
                todo += [
                    (each, f"{place}/{key}", depth + 1, _UNTYPED.get(key))
                    for key, each in node.items()
                ]
