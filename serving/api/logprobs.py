"""Log probabilities in OpenAI's two forms: one for texts, another for chats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.errors import RequestError
from weft.serving.api.openai.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from weft.serving.engine.protocol import TokenLogprob

if TYPE_CHECKING:
    from weft.serving.engine.tokenizer import Tokenizer

_LOWEST = -9999.0  # JSON has no infinity
MAX_SCORES = 1 << 19
"""Maximum log probabilities of prompts in one request."""


def check_scores(tokens: int, top: int, param: str) -> None:
    """Refuse prompt log probabilities if they would take too much time and memory.

    Args:
        tokens: number of prompt tokens, for each answer.
        top: number of likeliest tokens, besides the prompt's own.
        param: the request's field, for the error.

    Raises:
        RequestError: there are more than `MAX_SCORES`.
    """
    if (count := tokens * (top + 1)) > MAX_SCORES:
        raise RequestError(
            f"{param} is {top}; for {tokens:,} tokens in the prompts of all answers these are "
            f"{count:,} log probabilities: ask for at most {MAX_SCORES:,} in one request",
            param=param,
        )


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Write tokens with their bytes and the most likely alternatives."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=tokenizer.token_text(entry.token_id),
                logprob=max(entry.logprob, _LOWEST),
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=tokenizer.token_text(token_id),
                        logprob=max(logprob, _LOWEST),
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in entry.top
                ],
            )
            for entry in logprobs
        ]
    )


def prompt_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], top: int
) -> PromptLogprobs:
    """Write a prompt's log probabilities in vLLM's form.

    Args:
        tokenizer: names the tokens.
        logprobs: one for each prompt token from the second on.
        top: number of likeliest tokens; the prompt's own token comes first.
    """

    def named(entry: TokenLogprob) -> dict[str, PromptLogprob]:
        ranked = [(entry.token_id, entry.logprob, entry.rank)]
        ranked += [(token, value, i) for i, (token, value) in enumerate(entry.top[:top], 1)]
        return {
            str(token): PromptLogprob(max(value, _LOWEST), rank, tokenizer.token_text(token))
            for token, value, rank in ranked
        }

    return [None, *map(named, logprobs)]


class TextLogprobs:
    """Writes the parallel lists for one text, piece by piece; offsets continue between pieces.

    Args:
        tokenizer: names the tokens.
        top: number of likeliest tokens.
        skip_special_tokens: special tokens are not in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, top: int = 0, *, skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]
    ) -> CompletionLogprobs:
        """Write an echoed prompt, whose first token has no log probability."""
        first, *rest = token_ids
        # A token that the tokenizer adds, such as a bos_token, is not in the text.
        shown = text.encode().startswith(self._tokenizer.token_bytes(first))
        start = self._advance(first) if shown else 0
        lists = CompletionLogprobs([self._name(first)], [None], [None], [start])
        return joined(lists, self._lists(logprobs, [self._advance(token) for token in rest]))

    def output(self, logprobs: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Write the next output tokens."""
        tokens = [entry.token_id for entry in logprobs]
        return self._lists(
            logprobs, [self._offset if t in self._skipped else self._advance(t) for t in tokens]
        )

    def _lists(
        self, logprobs: Sequence[TokenLogprob], text_offset: list[int]
    ) -> CompletionLogprobs:
        lists = CompletionLogprobs([], [], [], text_offset)
        for entry in logprobs:
            # As in OpenAI's API, the chosen token is always among the alternatives.
            top = dict(entry.top[: self._top]) | {entry.token_id: entry.logprob}
            lists.tokens.append(self._name(entry.token_id))
            lists.token_logprobs.append(max(entry.logprob, _LOWEST))
            lists.top_logprobs.append(
                {self._name(token_id): max(logprob, _LOWEST) for token_id, logprob in top.items()}
            )
        return lists

    def _advance(self, token_id: int) -> int:
        """Return the token's offset in the text, in characters, and go past the token."""
        offset = self._offset
        self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token_id)))
        return offset

    def _name(self, token_id: int) -> str:
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Join two pieces."""
    return CompletionLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )
