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


class Rules:
    """Further rules for a grammar.

    Attributes:
        lines: an EBNF line for each rule.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []

    def repeated(self, options: list[str]) -> str:
        """Return a new rule's name, for zero or more repetitions of some options.

        The rule calls itself. xgrammar then knows the allowed tokens in advance, as for a JSON
        string. For a repeated group it would have to try most tokens; this takes long.
        """
        name = f"repeated{len(self.lines)}"
        self.lines.append(f'{name} ::= "" | {" | ".join(f"{each} {name}" for each in options)}')
        return name


def expression_as_ebnf(pattern: str, writing: Writing, rules: Rules) -> str:
    """Return the EBNF expression for a regular expression's full matches.

    Args:
        pattern: the regular expression.
        writing: how the text is written.
        rules: gets the expression's own rules.

    Raises:
        RequestError: the expression is invalid, or a part has no counterpart in EBNF.
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
    return _Converter(pattern, writing, rules).sequence(nodes, parsed.state.flags)


class _Converter:
    """Converts one expression's parts."""

    def __init__(self, pattern: str, writing: Writing, rules: Rules) -> None:
        self._pattern = pattern
        self._writing: Writing = writing
        self._rules = rules

    def sequence(self, nodes: Any, flags: int) -> str:
        """Return the expression for some parts in this order."""
        parts: list[str] = []
        text = ""
        for op, value in nodes:
            if op is ops.LITERAL and not flags & re.IGNORECASE:
                text += chr(value)
                continue
            if text:
                parts.append(literal(text, self._writing))
                text = ""
            if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
                least, most, inner = value
                parts.append(self._repeat(least, most, inner, flags))
            else:
                parts.append(_one_of(self._options(op, value, flags)))
        if text or not parts:
            parts.append(literal(text, self._writing))
        return " ".join(parts)

    def _repeat(self, least: int, most: Any, inner: Any, flags: int) -> str:
        options = self._alternatives(inner, flags)
        one = _one_of(options)
        if most is not ops.MAXREPEAT:
            return f"({one}){{{least},{most}}}"
        any_number = self._rules.repeated(options)
        return {0: any_number, 1: f"{one} {any_number}"}.get(
            least, f"({one}){{{least}}} {any_number}"
        )

    def _alternatives(self, nodes: Any, flags: int) -> list[str]:
        """Return a single part's options, or else the sequence."""
        if len(nodes) == 1 and nodes[0][0] not in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            op, value = nodes[0]
            return self._options(op, value, flags)
        return [self.sequence(nodes, flags)]

    def _options(self, op: Any, value: Any, flags: int) -> list[str]:
        match op:
            case ops.BRANCH:
                return [self.sequence(each, flags) for each in value[1]]
            case ops.SUBPATTERN:
                _, added, removed, inner = value
                return self._alternatives(inner, (flags | added) & ~removed)
        if op in _NAMES:
            raise RequestError(f"{self._pattern[:80]!r} has {_NAMES[op]}, which is not supported")
        return self._set(op, value, flags).options(self._writing)

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


def _one_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"
