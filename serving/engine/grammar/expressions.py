"""Converts regular expressions to xgrammar's EBNF, plain or escaped as in JSON.

Python's own parser reads the expression. `\\d`, `\\s` and `\\w` are ASCII, as in JSON schemas.
"""

from __future__ import annotations

import re
from re import _constants as ops
from re import _parser as parser
from typing import Any

from weft.errors import RequestError
from weft.serving.engine.grammar.characters import LAST, Characters, Writing, literal

_DIGITS = Characters.of("0123456789")
_SPACE = Characters.of(" \t\n\r\f\v")
_WORD = Characters([(ord("0"), ord("9")), (ord("A"), ord("Z")), (ord("a"), ord("z"))])
_CATEGORIES = {
    ops.CATEGORY_DIGIT: _DIGITS,
    ops.CATEGORY_NOT_DIGIT: ~_DIGITS,
    ops.CATEGORY_SPACE: _SPACE,
    ops.CATEGORY_NOT_SPACE: ~_SPACE,
    ops.CATEGORY_WORD: _WORD | Characters.of("_"),
    ops.CATEGORY_NOT_WORD: ~(_WORD | Characters.of("_")),
}
_NAMES = {
    ops.ASSERT: "look-ahead or look-behind",
    ops.ASSERT_NOT: "look-ahead or look-behind",
    ops.AT: "an anchor inside the expression",
    ops.GROUPREF: "a back reference",
    ops.GROUPREF_EXISTS: "a conditional group",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive quantifier",
}
_BEGINNINGS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)


def expression_as_ebnf(pattern: str, writing: Writing) -> str:
    """Return the EBNF expression for the texts that match a regular expression as a whole.

    Raises:
        RequestError: the expression is invalid, or EBNF has nothing like one of its parts.
    """
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise RequestError(f"{pattern[:80]!r} is no regular expression: {error}") from None
    nodes = list(parsed)
    if nodes and nodes[0][0] is ops.AT and nodes[0][1] in _BEGINNINGS:
        nodes = nodes[1:]
    if nodes and nodes[-1][0] is ops.AT and nodes[-1][1] in _ENDS:
        nodes = nodes[:-1]
    return _Converter(pattern, writing).sequence(nodes, parsed.state.flags)


class _Converter:
    """Converts the parts of one expression."""

    def __init__(self, pattern: str, writing: Writing) -> None:
        self._pattern = pattern
        self._writing: Writing = writing

    def sequence(self, nodes: Any, flags: int) -> str:
        parts: list[str] = []
        text = ""
        for op, value in nodes:
            if op is ops.LITERAL and not flags & re.IGNORECASE:
                text += chr(value)
                continue
            if text:
                parts.append(literal(text, self._writing))
                text = ""
            parts.append(self._node(op, value, flags))
        if text or not parts:
            parts.append(literal(text, self._writing))
        return " ".join(parts)

    def _node(self, op: Any, value: Any, flags: int) -> str:
        match op:
            case ops.BRANCH:
                return f"({' | '.join(self.sequence(each, flags) for each in value[1])})"
            case ops.SUBPATTERN:
                _, added, removed, inner = value
                return f"({self.sequence(inner, (flags | added) & ~removed)})"
            case ops.MAX_REPEAT | ops.MIN_REPEAT:
                least, most, inner = value
                bound = "" if most is ops.MAXREPEAT else most
                return f"({self.sequence(inner, flags)}){{{least},{bound}}}"
        if op in _NAMES:
            raise RequestError(f"{self._pattern[:80]!r} has {_NAMES[op]}, which is not supported")
        return self._set(op, value, flags).ebnf(self._writing)

    def _set(self, op: Any, value: Any, flags: int) -> Characters:
        match op:
            case ops.ANY:
                return Characters([(0, LAST)] if flags & re.DOTALL else [(0, 9), (11, LAST)])
            case ops.LITERAL | ops.NOT_LITERAL:
                found, negated = Characters([(value, value)]), op is ops.NOT_LITERAL
            case ops.IN:
                negated = bool(value) and value[0][0] is ops.NEGATE
                found = Characters([])
                for kind, each in value[negated:]:
                    found |= self._member(kind, each)
            case _:
                raise RequestError(f"{self._pattern[:80]!r} has {op}, which is not supported")
        if flags & re.IGNORECASE:
            found = found.both_cases()
        return ~found if negated else found

    def _member(self, kind: Any, value: Any) -> Characters:
        if kind is ops.CATEGORY:
            return _CATEGORIES[value]
        return Characters([(value, value) if kind is ops.LITERAL else value])
