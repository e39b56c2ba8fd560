"""The work in a step, as far as its cost depends on it."""

from __future__ import annotations

from dataclasses import dataclass


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

    @property
    def tokens(self) -> int:
        """All tokens in the step."""
        return self.decodes + self.prefill_tokens

    @property
    def requests(self) -> int:
        """All requests in the step."""
        return self.decodes + self.prefills
