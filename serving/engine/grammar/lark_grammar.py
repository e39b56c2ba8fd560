"""Converts grammars in Lark's syntax to xgrammar's EBNF, plain or escaped as in JSON.

Lark reads the grammar. A terminal becomes a rule, and so does each rule. Priorities and aliases do
not matter, because only the set of texts counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import RequestError
from weft.serving.engine.grammar.characters import Writing
from weft.serving.engine.grammar.expressions import expression_as_ebnf

if TYPE_CHECKING:
    from lark.lexer import TerminalDef

START = "start"
_IGNORED = "ignored"
# The end of Lark's own ESCAPED_STRING, and the same without a look-behind.
_QUOTED, _QUOTED_AGAIN = r'.*?(?<!\\)(\\\\)*?"', r'([^"\\\n]|\\.)*"'


def lark_as_ebnf(definition: str, writing: Writing) -> str:
    """Return the EBNF grammar for the texts of a Lark grammar's rule `start`.

    Raises:
        RequestError: the grammar is invalid, or a terminal has no counterpart in EBNF.
    """
    from lark.exceptions import LarkError
    from lark.grammar import NonTerminal
    from lark.load_grammar import load_grammar

    try:
        grammar, _ = load_grammar(definition, "<grammar>", [], False)  # type: ignore[no-untyped-call]
        terminals, rules, ignored = grammar.compile([START], "*")
    except (LarkError, OSError) as error:  # OSError from an import
        raise RequestError(f"it is not a Lark grammar: {_brief(error)}") from None
    names = {symbol: f"rule{i}" for i, symbol in enumerate(dict.fromkeys(r.origin for r in rules))}
    terms = {each.name: f"terminal{i}" for i, each in enumerate(terminals)}
    used = {part.name for rule in rules for part in rule.expansion if part.is_term}
    if missing := used - terms.keys():
        raise RequestError(f"its terminal {min(missing)} is declared without a definition")
    skip = f" {_IGNORED}" if ignored else ""
    bodies: dict[str, list[str]] = {name: [] for name in names.values()}
    for rule in rules:
        parts = [
            terms[part.name] + skip if part.is_term else names[part] for part in rule.expansion
        ]
        bodies[names[rule.origin]].append(" ".join(parts) or '""')
    lines = [f"root ::={skip} {names[NonTerminal(START)]}"]
    lines += [f"{name} ::= {' | '.join(options)}" for name, options in bodies.items()]
    lines += [f"{terms[each.name]} ::= {_terminal(each, writing)}" for each in terminals]
    if ignored:
        lines.append(f"{_IGNORED} ::= ({' | '.join(terms[name] for name in ignored)})*")
    return "\n".join(lines)


def _terminal(terminal: TerminalDef, writing: Writing) -> str:
    pattern = terminal.pattern.to_regexp().replace(_QUOTED, _QUOTED_AGAIN)
    return expression_as_ebnf(pattern, writing)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
