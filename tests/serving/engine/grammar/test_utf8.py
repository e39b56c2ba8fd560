"""Tokens that make invalid UTF-8 never follow."""

from __future__ import annotations

import random

import numpy as np
import pytest
import xgrammar

from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.grammar.utf8 import Utf8Rules

PAIRS = [b"\xed\xa0", b"\xed\x9f", b"\xe0\x80", b"\xa0\x80", b"a\xed", b"\xf0\x90", b"\x80\x80\xf4"]
WORDS = [*(bytes([i]) for i in range(256)), *PAIRS, b""]
END = len(WORDS) - 1
RULES = Utf8Rules(WORDS)


def allowed(mask: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[int]:
    return list(map(int, np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))


def is_valid(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def test_each_pair_of_bytes_is_as_python_decodes_it() -> None:
    for first in range(256):
        follows = set(allowed(RULES.after(first)))
        for second in range(0x80, 0xC0):
            if first >= 0xC2 and first < 0xF5:
                assert (second in follows) == is_valid(bytes([first, second]))


def test_a_token_with_an_invalid_pair_never_follows() -> None:
    first = set(allowed(RULES.after(None)))
    assert 256 + PAIRS.index(b"\xed\xa0") not in first
    assert 256 + PAIRS.index(b"\xe0\x80") not in first
    assert first.issuperset({256 + PAIRS.index(b"\xed\x9f"), 256 + PAIRS.index(b"\xf0\x90"), END})
    assert 256 + PAIRS.index(b"\xa0\x80") in allowed(RULES.after(0xE0))
    assert 256 + PAIRS.index(b"\xa0\x80") not in allowed(RULES.after(256 + PAIRS.index(b"a\xed")))


@pytest.mark.parametrize(
    "schema",
    ['{"type":"string","minLength":3,"maxLength":7}', '{"type":"string","pattern":"^.{1,6}$"}'],
)
def test_all_texts_of_a_grammar_are_valid(schema: str) -> None:
    info = xgrammar.TokenizerInfo(WORDS, xgrammar.VocabType.RAW, stop_token_ids=[END])
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(schema)
    invalid = 0
    for seed in range(300):
        rng = random.Random(seed)
        for rules in (RULES, None):
            inner = xgrammar.GrammarMatcher(grammar)
            matcher = GrammarMatcher(inner, len(WORDS), [END], utf8=rules)
            text = b""
            while END not in (follows := allowed(matcher.mask)) and not matcher.ended:
                rare = [token for token in follows if token >= 256 or token in (0xE0, 0xED, 0xF0)]
                token = rng.choice(rare if rare and rng.random() < 0.5 else follows)
                assert matcher.advance(token) is None
                text += WORDS[token]
            if rules is not None:
                text.decode()
            else:
                invalid += not is_valid(text)
    assert invalid > 30, "without the rules"
