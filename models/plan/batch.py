"""The work in a step, as far as its cost depends on it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.models.interface import StepInput


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens in one step of one engine.

    Attributes:
        decodes: requests with one token each.
        decode_context: mean number of tokens that each of them attends to.
        prefills: requests with more tokens.
        prefill_tokens: their tokens together.
        prefill_context: mean number of tokens that each of these tokens attends to.
    """

    decodes: int = 0
    decode_context: float = 0.0
    prefills: int = 0
    prefill_tokens: int = 0
    prefill_context: float = 0.0

    @classmethod
    def of(cls, inputs: Iterable[StepInput]) -> Batch:
        """Return the work in a step; a prompt with a single token left counts as a decode.

        Args:
            inputs: the step's input for each attention group with tokens.
        """
        decodes = decode_context = prefills = prefill_tokens = 0
        attended = 0.0
        for step in inputs:
            counts = (step.query_start[1:] - step.query_start[:-1]).astype("int64")
            several = counts > 1
            context, tokens = step.context_len[several], counts[several]
            prefills += len(tokens)
            prefill_tokens += int(tokens.sum())
            decodes += len(counts) - len(tokens)
            decode_context += int(step.context_len[~several].sum())
            # A chunk's tokens attend to context - tokens + 1, ..., context tokens.
            attended += int((tokens * (2 * context - tokens + 1)).sum()) / 2
        return cls(
            decodes=decodes,
            decode_context=decode_context / max(1, decodes),
            prefills=prefills,
            prefill_tokens=prefill_tokens,
            prefill_context=attended / max(1, prefill_tokens),
        )

    @property
    def tokens(self) -> int:
        """All tokens in the step."""
        return self.decodes + self.prefill_tokens

    @property
    def requests(self) -> int:
        """All requests in the step."""
        return self.decodes + self.prefills
