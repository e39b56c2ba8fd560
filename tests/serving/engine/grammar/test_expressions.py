"""Regular expressions and Lark grammars as EBNF for xgrammar."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import RequestError
from weft.serving.engine.grammar.characters import LAST, Characters, Writing
from weft.serving.engine.grammar.lark_grammar import lark_as_ebnf
from weft.serving.engine.grammar.structural_tag import as_format
from weft.serving.engine.sampling_params import Grammar

END = 256
PATTERNS = [
    r"a*b+c?",
    r"(ab|c){2,3}",
    r"[^a-c\n]+",
    r"[\w.-]+@\d{2,}",
    r"\s\S\D\W",
    r".+",
    r"(?s).+",
    r"(?i)straße|x[b-d]",
    r"^line$",
    r"\"quoted\\\"|\t\x07?",
    r"(?:é|日本|😀)+?",
    r"",
]
TEXTS = st.text(st.sampled_from('aAbBcd12 .-@_\n\t"\\é日本😀xX\x07ßline'), max_size=6)
LIST = r"""
start: item ("," item)*
?item: NUMBER -> number | list | ESCAPED_STRING
list: "[" [item ("," item)*] "]"
%import common.NUMBER
%import common.ESCAPED_STRING
%import common.WS
%ignore WS
"""


def matcher(ebnf: str) -> xgrammar.GrammarMatcher:
    """A byte matcher."""
    tokens = [*(bytes([i]) for i in range(END)), b""]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    return xgrammar.GrammarMatcher(compiler.compile_grammar(ebnf))


def admits(found: xgrammar.GrammarMatcher, text: str) -> bool:
    """Whether a text matches as a whole."""
    found.reset()
    return all(found.accept_token(token) for token in [*text.encode(), END])


def regex_ebnf(pattern: str, writing: Writing) -> str:
    """The grammar for an expression alone."""
    node = {"type": "grammar", "grammar": pattern, "syntax": "regex", "writing": writing}
    tag = json.dumps({"type": "structural_tag", "format": node})
    ebnf: str = as_format(Grammar("structural_tag", tag), lambda _: None)["grammar"]
    return ebnf


def written(text: str, writing: Writing) -> str:
    """The text as a JSON string holds it."""
    return text if writing == "plain" else json.dumps(text, ensure_ascii=False)[1:-1]


@pytest.mark.parametrize("writing", ["plain", "json"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_expression_admits_what_python_s_own_matches(pattern: str, writing: Writing) -> None:
    found = matcher(regex_ebnf(pattern, writing))
    expected = re.compile(pattern, re.ASCII)
    seen: set[bool] = set()

    @settings(max_examples=150, deadline=None, database=None)
    @given(st.one_of(TEXTS, st.from_regex(expected, fullmatch=True)))
    def compare(text: str) -> None:
        if any("\ud800" <= c <= "\udfff" for c in text):
            return  # UTF-8 cannot write it
        good = expected.fullmatch(text) is not None and not (
            pattern.startswith("^") and text.endswith("\n")
        )
        seen.add(good)
        assert admits(found, written(text, writing)) == good, text

    compare()
    assert any(seen), "no example matched"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "is no regular expression"),
        ("a(?=b)", "look-ahead"),
        ("(?<!b)a", "look-ahead or look-behind"),
        (r"(a)\1", "back reference"),
        ("a$b", "an anchor inside"),
        (r"\bword", "an anchor inside"),
        ("a++", "possessive"),
        ("(?>a)", "atomic"),
        (r"(a)?(?(1)b|c)", "conditional"),
    ],
)
def test_what_ebnf_cannot_say_is_named(pattern: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        regex_ebnf(pattern, "plain")


def test_an_empty_set() -> None:
    with pytest.raises(RequestError, match="empty set"):
        regex_ebnf(r"[^\s\S]", "plain")


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted)))
def test_sets_of_characters(pairs: list[list[int]]) -> None:
    found = Characters((low, high) for low, high in pairs)
    expected = {code for low, high in pairs for code in range(low, high + 1)}
    assert {code for code in range(50) if code in found} == expected
    assert {code for code in range(50) if code in ~found} == set(range(50)) - expected
    assert LAST in ~found
    assert 3 not in found - Characters([(3, 3)])


@pytest.mark.parametrize("writing", ["plain", "json"])
@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("1", True),
        (' [1, "a\\"b" ,[]],2 ', True),
        ("[1", False),
        ("1 2", False),
        ("", False),
    ],
)
def test_a_lark_grammar(writing: Writing, text: str, good: bool) -> None:
    """Imports, ignored terminals, optional parts, aliases and recursion."""
    assert admits(matcher(lark_as_ebnf(LIST, writing)), written(text, writing)) == good


def test_templates_ranges_and_flags() -> None:
    grammar = """
        start: _separated{word, ";"} "!"~2..3
        _separated{x, sep}: x (sep x)*
        word: /[a-c]+/i | LETTER
        LETTER.2: "x".."z"
    """
    found = matcher(lark_as_ebnf(grammar, "plain"))
    assert admits(found, "aB;x!!")
    assert admits(found, "z!!!")
    assert not admits(found, "z!")
    assert not admits(found, "zz!!")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: (", "is not a Lark grammar"),
        ("begin: A", "is not a Lark grammar"),
        ("start: missing", "is not a Lark grammar.*missing"),
        ("%import nowhere.A\nstart: A", "not in Lark's library"),
        ("%declare A\nstart: A", "A is declared without a definition"),
        ("start: /a(?=b)/", "look-ahead"),
    ],
)
def test_a_lark_grammar_that_cannot_be_converted(grammar: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        lark_as_ebnf(grammar, "plain")


def test_a_lark_grammar_cannot_import_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.lark").write_text('A: "a"\n')
    monkeypatch.chdir(tmp_path)
    for name in ("mine", ".mine"):
        with pytest.raises(RequestError, match="its import 'mine' is not in Lark's library"):
            lark_as_ebnf(f"%import {name}.A\nstart: A", "plain")
