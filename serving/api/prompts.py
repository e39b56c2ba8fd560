"""Prompts as token ids: fields of a request that change them, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine
    from weft.serving.engine.sampling_params import SamplingParams

LONGEST = 16
"""A text that is truncated may have this many times the tokens of the context."""


@dataclass(frozen=True)
class PromptOptions:
    """Options for a request's prompts.

    Attributes:
        add_special_tokens: add tokens around a text as the tokenizer says; None is the route's
            default.
        truncate: keep only the last tokens, up to this number; -1 keeps as many as leave room for
            `max_tokens`, or for one token; None keeps all.
        cache_salt: only requests with the same salt share the prefix cache.
    """

    add_special_tokens: bool | None = None
    truncate: int | None = None
    cache_salt: str = ""

    def longest(self, engine: AsyncEngine) -> int:
        """Return a number of tokens; a text with far more is refused."""
        context = engine.info.max_model_len
        return context if self.truncate is None else context * LONGEST

    def encode(
        self,
        engine: AsyncEngine,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        special: bool,
    ) -> list[int]:
        """Return a prompt's token ids.

        Args:
            engine: has the tokenizer and the context's length.
            prompt: a text, or token ids.
            params: the request's settings.
            special: the route's default for `add_special_tokens`.

        Raises:
            RequestError: the text is far too long, or it contains half of a surrogate pair.
        """
        context, tokenizer = engine.info.max_model_len, engine.tokenizer
        beginning: list[int] = []
        if isinstance(prompt, str):
            special = special if self.add_special_tokens is None else self.add_special_tokens
            ids = tokenizer.encode(prompt, add_special_tokens=special, most=self.longest(engine))
            if special and self.truncate is not None:
                beginning = tokenizer.encode("")  # such as a bos_token, which is kept
        else:
            ids = prompt
        if self.truncate is None:
            return ids
        count = self.truncate
        if count == -1:
            count = max(1, context - (params.max_tokens or 1))
        if len(ids) <= count:
            return ids
        if len(beginning) < count and ids[: len(beginning)] == beginning:
            return beginning + ids[len(ids) - count + len(beginning) :]
        return ids[-count:]


AS_USUAL = PromptOptions()
