"""One request as the scheduler sees it: its tokens, its progress and its pending results."""

from __future__ import annotations

from array import array

import numpy as np

from weft.models.interface import Float32, Logprobs, SlotSampling
from weft.serving.engine.grammar.matcher import Matcher
from weft.serving.engine.prefix_keys import block_keys
from weft.serving.engine.protocol import Add, TokenLogprob


class Request:
    """A live request.

    Args:
        add: the API process's message.
        number: number of requests that arrived before.
        max_model_len: maximum number of tokens in a request.
        matcher: restricts the tokens, if the request has a grammar or a token filter.

    Attributes:
        order: (priority, arrival); lower is served first, and higher is preempted first.
        token_ids: int32 tokens of the prompt, followed by the tokens that have come back.
        prompt_length: number of tokens in the prompt.
        limit: number of tokens at which the request ends with "length".
        slot: the request's slot; -1 while it waits.
        computed: tokens whose keys and values are computed by the steps submitted so far.
        scored: prompt tokens whose log probability is computed by the steps submitted so far.
        prompt_logprobs: log probabilities that have come back; None if nobody asked, or once sent.
        prompt_top: number of most likely tokens that go with each of them.
        pooling: which hidden states make the embedding; None for requests that generate tokens.
        pooled: prompt tokens whose hidden states are summed by the steps submitted so far, or are
            not needed.
        hidden_sum: float32[hidden]; the sum of the hidden states that have come back.
        cached_tokens: prompt tokens found in the prefix cache at the first admission; -1 before.
        known_keys: prefix-cache keys of the first blocks, as far as they were needed.
        wants_logprobs: the request asked for log probabilities of its tokens or of its prompt.
        matcher: restricts the tokens; it has accepted all returned tokens.
        arrival: time.monotonic() at the request's arrival.
        queued: seconds until the first admission; None before, and once sent.
        ended: no further output is sent; a step in flight may still name the slot.
    """

    __slots__ = (
        "_pooled_tokens",
        "_root_key",
        "arrival",
        "cached_tokens",
        "computed",
        "end_token_ids",
        "ended",
        "hidden_sum",
        "id",
        "known_keys",
        "limit",
        "matcher",
        "order",
        "params",
        "pooled",
        "pooling",
        "prompt_length",
        "prompt_logprobs",
        "prompt_top",
        "queued",
        "scored",
        "slot",
        "token_ids",
        "wants_logprobs",
    )

    def __init__(
        self, add: Add, number: int, max_model_len: int, matcher: Matcher | None = None
    ) -> None:
        assert add.params.max_tokens is not None, "the API process fills max_tokens in"
        self.id = add.request_id
        self.order = (add.priority, number)
        self.params = add.params
        self.token_ids = array("i", add.prompt.tokens)
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
        self.matcher = matcher
        self.known_keys = add.prompt.block_keys()
        self._root_key = add.prompt.root

    def __len__(self) -> int:
        """Number of known tokens: the prompt, and results from finished steps."""
        return len(self.token_ids)

    def keys(self, count: int, block_size: int) -> list[bytes]:
        """Return prefix-cache keys for the first `count` blocks; their tokens must be known."""
        keys = self.known_keys
        if len(keys) < count:
            tokens = self.token_ids[len(keys) * block_size : count * block_size]
            keys += block_keys(tokens.tobytes(), block_size, keys[-1] if keys else self._root_key)
        return keys if len(keys) == count else keys[:count]

    @property
    def reusable(self) -> int:
        """Maximum number of tokens to take from the prefix cache.

        The last token is always computed, because the request needs its logits or hidden state.
        A prompt token is computed too if its successor's log probability is still missing, or if
        its hidden state is needed.
        """
        count = len(self) - 1
        if self.prompt_logprobs is not None:
            count = min(count, self.scored)
        if self.pooling is not None:
            count = min(count, self.pooled)
        return count

    @property
    def embedding(self) -> bytes:
        """The pooled hidden states' mean, float32[hidden]; all steps must have finished."""
        mean = np.asarray(self.hidden_sum / self._pooled_tokens, np.float32)
        return mean.tobytes()

    def sampling(self) -> SlotSampling:
        """Return the runner's sampling settings for this request."""
        p = self.params
        assert p.seed is not None, "the API process fills the seed in"
        chosen = p.chosen()
        history = (
            chosen.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        )
        return SlotSampling(
            slot=self.slot,
            temperature=chosen.temperature if chosen.top_p > 0 else 0.0,
            top_k=max(0, chosen.top_k),
            top_p=chosen.top_p or 1.0,
            min_p=chosen.min_p,
            repetition_penalty=chosen.repetition_penalty,
            presence_penalty=p.presence_penalty,
            frequency_penalty=p.frequency_penalty,
            seed=p.seed,
            logit_bias=p.logit_bias,
            logprobs=-1 if p.logprobs is None else p.logprobs,
            # A matcher applies min_tokens itself.
            min_tokens=p.min_tokens if self.matcher is None else 0,
            end_token_ids=tuple(sorted(self.end_token_ids)),
            prompt_token_ids=tuple(self.token_ids[: self.prompt_length]) if history else (),
            output_token_ids=tuple(self.token_ids[self.prompt_length :]) if history else (),
        )


def token_logprob(logprobs: Logprobs, row: int, token_id: int, top: int) -> TokenLogprob:
    """Return row `row` as a message: for `token_id`, with the `top` most likely alternatives."""
    ids = logprobs.top_ids[row, :top].tolist()
    values = logprobs.top[row, :top].tolist()
    return TokenLogprob(
        token_id=token_id,
        logprob=float(logprobs.chosen[row]),
        rank=int(logprobs.rank[row]),
        top=tuple(zip(ids, values, strict=True)),
    )
