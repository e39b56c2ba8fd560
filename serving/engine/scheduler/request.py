"""One request as the scheduler sees it: its tokens, and what is still to be said about them."""

from __future__ import annotations

from array import array

import numpy as np

from weft.models.interface import Float32, Logprobs, SlotSampling
from weft.serving.engine.grammar.matcher import GrammarMatcher
from weft.serving.engine.protocol import Add, TokenLogprob
from weft.serving.engine.scheduler.block_manager import block_keys, new_prefix_hash


class Request:
    """A live request.

    Attributes:
        rank: (priority, order of arrival); lower is served first, and higher preempted first.
        token_ids: int32 tokens of the prompt, and after it those that have come back.
        prompt_length: how many of them are the prompt's.
        limit: how many there are when it ends with "length".
        slot: where it runs; -1 while it waits.
        computed: tokens whose keys and values are computed by the steps submitted so far.
        scored: prompt tokens whose log probability is computed by the steps submitted so far.
        prompt_logprobs: those that have come back; None when not asked for, or already sent.
        prompt_top: how many of the most likely tokens go with each of them.
        pooling: what is made of its hidden states in the place of tokens; None for tokens.
        pooled: prompt tokens whose hidden states are summed by the steps submitted so far, or are
            not wanted.
        hidden_sum: float32[hidden]; the sum of those that have come back.
        cached_tokens: prompt tokens found in the prefix cache when it first ran; -1 before.
        known_keys: prefix-cache keys of its first blocks, as far as they were asked for.
        wants_logprobs: of its tokens or of its prompt.
        guide: where it is in its grammar, if it has one; all tokens that have come back are taken.
        arrival: time.monotonic() when it came.
        queued: seconds that it waited until it first ran; None before, and when they were told.
        ended: nothing more is told about it; its slot may still be in a step under way.
    """

    __slots__ = (
        "_pooled_tokens",
        "_prefix_hash",
        "arrival",
        "cached_tokens",
        "computed",
        "end_token_ids",
        "ended",
        "guide",
        "hidden_sum",
        "id",
        "known_keys",
        "limit",
        "params",
        "pooled",
        "pooling",
        "prompt_length",
        "prompt_logprobs",
        "prompt_top",
        "queued",
        "rank",
        "scored",
        "slot",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(
        self, add: Add, order: int, max_model_len: int, guide: GrammarMatcher | None = None
    ) -> None:
        assert add.params.max_tokens is not None, "the front fills max_tokens in"
        self.id = add.request_id
        self.rank = (add.priority, order)
        self.params = add.params
        self.token_ids = array("i", add.prompt_token_ids)
        self.prompt_length = len(self.token_ids)
        self.end_token_ids = frozenset(add.end_token_ids)
        self.limit = min(self.prompt_length + add.params.max_tokens, max_model_len)
        self.pooling = add.pooling
        self.pooled = 0
        if self.pooling is not None:
            self.limit = min(self.prompt_length, max_model_len) + 1
        if self.pooling == "last":
            self.pooled = self.prompt_length - 1
        self._pooled_tokens = self.prompt_length - self.pooled
        self.hidden_sum: Float32 | float = 0.0
        self.slot = -1
        self.computed = 0
        self.scored = 0
        self.prompt_logprobs: list[TokenLogprob] | None = None
        if add.params.prompt_logprobs is not None:
            self.prompt_logprobs = []
        self.prompt_top = add.params.prompt_logprobs or 0
        self.wants_logprobs = add.params.logprobs is not None or self.prompt_logprobs is not None
        self.cached_tokens = -1
        self.arrival = add.arrival
        self.queued: float | None = None
        self.ended = False
        self.guide = guide
        self.known_keys: list[bytes] = []
        self._prefix_hash = new_prefix_hash()

    def __len__(self) -> int:
        """Tokens that the host knows."""
        return len(self.token_ids)

    def keys(self, count: int, block_size: int) -> list[bytes]:
        """Prefix-cache keys of its first `count` blocks, whose tokens must be known."""
        keys = self.known_keys
        if len(keys) < count:
            tokens = self.token_ids[len(keys) * block_size : count * block_size]
            keys += block_keys(self._prefix_hash, tokens, block_size)
        return keys if len(keys) == count else keys[:count]

    @property
    def reusable(self) -> int:
        """Most tokens that may come from the prefix cache.

        The last one is always computed, because its logits or its hidden state are wanted; and so
        is a prompt token whose successor has no log probability yet, or whose hidden state is
        wanted.
        """
        most = len(self) - 1
        if self.prompt_logprobs is not None:
            most = min(most, self.scored)
        if self.pooling is not None:
            most = min(most, self.pooled)
        return most

    @property
    def embedding(self) -> bytes:
        """The mean of the hidden states that were wanted, all of which have come back."""
        mean = np.asarray(self.hidden_sum / self._pooled_tokens, np.float32)
        return mean.tobytes()

    def sampling(self) -> SlotSampling:
        """What the runner must know before it samples for this request."""
        p = self.params
        assert p.seed is not None, "the front fills the seed in"
        history = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        return SlotSampling(
            slot=self.slot,
            temperature=p.temperature,
            top_k=p.top_k,
            top_p=p.top_p,
            min_p=p.min_p,
            repetition_penalty=p.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            seed=p.seed,
            logit_bias=p.logit_bias,
            logprobs=-1 if p.logprobs is None else p.logprobs,
            min_tokens=p.min_tokens if self.guide is None else 0,  # it sees to that
            end_token_ids=tuple(sorted(self.end_token_ids)),
            prompt_token_ids=tuple(self.token_ids[: self.prompt_length]) if history else (),
            output_token_ids=tuple(self.token_ids[self.prompt_length :]) if history else (),
        )


def token_logprob(logprobs: Logprobs, row: int, token_id: int, top: int) -> TokenLogprob:
    """Row `row` as a message: of `token_id`, with the `top` most likely alternatives."""
    ids = logprobs.top_ids[row, :top].tolist()
    values = logprobs.top[row, :top].tolist()
    return TokenLogprob(
        token_id=token_id,
        logprob=float(logprobs.chosen[row]),
        rank=int(logprobs.rank[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
