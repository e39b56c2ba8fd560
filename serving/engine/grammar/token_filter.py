"""Token filters: requests with `allowed_token_ids` or `bad_words`.

Like a grammar matcher, a filter gives a mask with the allowed next tokens, and it can go with a
grammar matcher. A bad word is a token sequence: after all its tokens but the last, the filter
forbids the last token. Source for this rule: vLLM's `apply_bad_words`. The same text from other
tokens is still possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

import numpy as np

from weft.errors import RequestError
from weft.models.interface import Int32
from weft.serving.engine.grammar.matcher import Matcher, mask_of
from weft.serving.engine.protocol import Add


class TokenFilter:
    """Follows a request with allowed tokens or bad words; see Matcher.

    Args:
        vocab_size: V, number of columns in the model's logits.
        allowed: int32[ceil(V / 32)], a mask with the allowed tokens; None allows all.
        banned: forbidden token sequences.
        end_token_ids: the request's end tokens.
        min_tokens: minimum number of tokens before an end token, unless nothing else can follow.
        matcher: the request's grammar matcher; it applies `min_tokens` itself.

    Raises:
        RequestError: no token can come first.
    """

    def __init__(
        self,
        vocab_size: int,
        allowed: Int32 | None,
        banned: Collection[Sequence[int]],
        end_token_ids: Collection[int] = (),
        min_tokens: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        alone = [sequence[0] for sequence in banned if len(sequence) == 1]
        everything = mask_of(range(vocab_size), vocab_size) if allowed is None else allowed
        self._static = everything & ~mask_of(alone, vocab_size)
        self._but_ends = ~mask_of(end_token_ids, vocab_size)
        self._min_tokens = 0 if matcher is not None else min_tokens
        self._matcher = matcher
        given = {
            "allowed_token_ids": allowed is not None,
            "bad_words": bool(banned),
            "the grammar": matcher is not None,
        }
        self._limits = [name for name, is_given in given.items() if is_given]
        # A sequence waits under its last token but one, which is cheap to look up.
        self._banned: dict[int, list[Sequence[int]]] = defaultdict(list)
        for sequence in banned:
            if len(sequence) > 1:
                self._banned[sequence[-2]].append(sequence)
        self._tail = max(map(len, banned), default=1) - 1
        self._output: list[int] = []
        self._count = 0
        self.mask: Int32
        self._fill()

    @property
    def ended(self) -> bool:
        """True if the grammar allows nothing more."""
        return self._matcher is not None and self._matcher.ended

    def advance(self, token: int) -> str | None:
        """Accept the next token; see Matcher."""
        self._count += 1
        self._output = [*self._output, token][-self._tail :] if self._tail else []
        if self._matcher is not None and (error := self._matcher.advance(token)) is not None:
            return error
        try:
            if not self.ended:
                self._fill()
        except RequestError as error:
            return error.message
        return None

    def _fill(self) -> None:
        mask = self._static if self._matcher is None else self._static & self._matcher.mask
        if ends := self._banned_now():
            mask = mask & ~mask_of(ends, self._vocab_size)
        if not mask.any():
            verb = "leaves" if len(self._limits) == 1 else "leave"
            raise RequestError(f"{' and '.join(self._limits)} {verb} no token that can follow")
        if self._count < self._min_tokens and (longer := mask & self._but_ends).any():
            mask = longer
        self.mask = mask

    def _banned_now(self) -> list[int]:
        """Return the last tokens of all sequences that lack only this token."""
        if not self._output:
            return []
        return [
            sequence[-1]
            for sequence in self._banned.get(self._output[-1], ())
            if self._output[1 - len(sequence) :] == list(sequence[:-1])
        ]


def filtered(add: Add, vocab_size: int, matcher: Matcher | None = None) -> Matcher | None:
    """Return a request's matcher, with its token filter if it needs one.

    Raises:
        RequestError: no token can come first.
    """
    if not (add.allowed or add.banned):
        return matcher
    allowed = np.frombuffer(add.allowed, np.int32) if add.allowed else None
    return TokenFilter(
        vocab_size, allowed, add.banned, add.end_token_ids, add.params.min_tokens, matcher
    )
