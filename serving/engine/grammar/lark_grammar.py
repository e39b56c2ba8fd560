"""Converts grammars in Lark's syntax to xgrammar's EBNF, plain or escaped as in JSON.

Lark reads the grammar. Each use of a terminal becomes a separate expression, so that xgrammar knows
the characters after it. Priorities and aliases do not matter, because they do not change the
matching texts.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from weft.errors import RequestError
from weft.serving.engine.grammar.characters import Writing
from weft.serving.engine.grammar.expressions import Rules, expression_as_ebnf

if TYPE_CHECKING:
    from lark.grammar import Symbol
    from lark.lexer import TerminalDef
    from lark.load_grammar import PackageResource

START = "start"
# The end in Lark's own ESCAPED_STRING, and the same without a look-behind.
_QUOTED, _QUOTED_AGAIN = r'.*?(?<!\\)(\\\\)*?"', r'([^"\\\n]|\\.)*"'


def lark_as_ebnf(definition: str, writing: Writing) -> str:
    """Return the EBNF grammar for a Lark grammar, from its rule `start`.

    Raises:
        RequestError: the grammar is invalid, or a terminal has no counterpart in EBNF.
    """
    from lark.exceptions import LarkError
    from lark.grammar import NonTerminal
    from lark.load_grammar import load_grammar

    try:
        grammar, _ = load_grammar(definition, "<grammar>", [_from_library], False)  # type: ignore[no-untyped-call]
        terminals, rules, ignored = grammar.compile([START], "*")
    except LarkError as error:
        raise RequestError(f"it is not a Lark grammar: {_brief(error)}") from None
    names = {symbol: f"rule{i}" for i, symbol in enumerate(dict.fromkeys(r.origin for r in rules))}
    definitions = {each.name: each for each in terminals}
    more = Rules()
    skip = " ignored" if ignored else ""

    def written(part: Symbol) -> str:
        if not part.is_term:
            return names[part]
        if part.name not in definitions:
            raise RequestError(f"its terminal {part.name} is declared without a definition")
        return f"({_terminal(definitions[part.name], writing, more)}){skip}"

    bodies: dict[str, list[str]] = {name: [] for name in names.values()}
    for rule in rules:
        bodies[names[rule.origin]].append(" ".join(map(written, rule.expansion)) or '""')
    lines = [f"root ::={skip} {names[NonTerminal(START)]}"]
    lines += [f"{name} ::= {' | '.join(options)}" for name, options in bodies.items()]
    if ignored:
        unread = [f"({_terminal(definitions[name], writing, more)})" for name in ignored]
        lines.append(f"ignored ::= {more.repeated(unread)}")
    return "\n".join([*lines, *more.lines])


def _from_library(place: PackageResource | str | None, name: str) -> tuple[PackageResource, str]:
    """Find an imported grammar in Lark's library, where the imports of its grammars also are.

    Args:
        place: folder of the importing grammar if the import is relative; a text for the request's.
        name: the file's name in this folder, or in the library.

    Raises:
        RequestError: the library has no such grammar. Without an error, Lark would look for a file.
    """
    from lark.load_grammar import stdlib_loader

    if not isinstance(place, str):
        with suppress(OSError):
            return stdlib_loader(place, name)
    raise RequestError(f"its import {name.removesuffix('.lark')!r} is not in Lark's library")


def _terminal(terminal: TerminalDef, writing: Writing, rules: Rules) -> str:
    pattern = terminal.pattern.to_regexp().replace(_QUOTED, _QUOTED_AGAIN)
    return expression_as_ebnf(pattern, writing, rules)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
