"""Prompts as token ids, changed by request fields with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import RequestError

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
        """Return a limit in tokens; `encode` refuses texts far above it."""
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
            RequestError: the text is far too long, it contains half a surrogate pair, or
                `max_tokens` leaves no room for it.
        """
        context, tokenizer = engine.info.max_model_len, engine.tokenizer
        beginning: list[int] = []
        if isinstance(prompt, str):
            special = special if self.add_special_tokens is None else self.add_special_tokens
            ids = tokenizer.encode(prompt, add_special_tokens=special, most=self.longest(engine))
            if special and self.truncate is not None:
                beginning = tokenizer.encode("")  # such as a bos_token; it stays
        else:
            ids = prompt
        if self.truncate is None:
            return ids
        count = self.truncate
        if count == -1:
            count = context - (params.max_tokens or 1)
            if count < 1:
                raise RequestError(
                    f"truncate_prompt_tokens is -1; {params.max_tokens} tokens of output leave no "
                    f"room for the prompt in the context of {context}: ask for fewer",
                    param="truncate_prompt_tokens",
                )
        if len(ids) <= count:
            return ids
        if len(beginning) < count and ids[: len(beginning)] == beginning:
            return beginning + ids[len(ids) - count + len(beginning) :]
        return ids[-count:]


AS_USUAL = PromptOptions()
