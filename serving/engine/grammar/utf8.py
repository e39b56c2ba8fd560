"""Keeps tokens to valid UTF-8, where xgrammar does not.

A second byte is invalid after some first bytes (Unicode 15, table 3-7). xgrammar 0.2 accepts
surrogates (ED A0 80) in any string, and overlong forms (E0 80 80) in some patterns. Their text
would become replacement characters, three for a character, and break a limit on length.

A first byte never occurs as a later one, so two neighbouring bytes decide.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from weft.models.interface import Int32

INVALID = {0xE0: (0x80, 0x9F), 0xED: (0xA0, 0xBF), 0xF0: (0x80, 0x8F), 0xF4: (0x90, 0xBF)}
"""For some first bytes, the range of invalid second bytes."""

_PAIR = re.compile(
    b"|".join(
        bytes((first, *b"[", low, *b"-", high, *b"]")) for first, (low, high) in INVALID.items()
    )
)


class Utf8Rules:
    """Rules for the next token: text stays valid UTF-8.

    Args:
        words: each token's bytes.
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        starts = np.frombuffer(bytes(word[0] if word else 0 for word in words), np.uint8)
        self._ends = bytes(word[-1] if word and word[-1] in INVALID else 0 for word in words)
        valid = np.fromiter((_PAIR.search(word) is None for word in words), np.bool_, len(words))
        self._masks = {0: _packed(valid)}
        for first, (low, high) in INVALID.items():
            self._masks[first] = _packed(valid & ~((starts >= low) & (starts <= high)))

    def after(self, token: int | None) -> Int32:
        """Return a mask for the tokens after a token, or for the first: int32[ceil(V / 32)]."""
        return self._masks[0 if token is None else self._ends[token]]


def _packed(bits: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int32:
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)
