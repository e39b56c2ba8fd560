"""What a model runner is given for one step, and what it gives back.

Everything here is NumPy, flat and ragged, and the same for every backend: the
scheduler never sees a torch or JAX array. A batch holds B requests with T
tokens in all; a request's tokens in this step may be a whole prompt, a chunk
of one, or a single token to decode: the runner does not care which.

A step is dispatched before the one ahead of it has come back, so the newest
token of a request may not be known on the host yet. It is then named by
where it will be on the device: `token_ids[t] = -1 - slot` stands for "the
token that was sampled last for the request in `slot`".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

FINITE = 0
NOT_FINITE = 1

NONE: Int32 = np.empty(0, np.int32)
"""Of no tokens, requests or rows."""
NO_MASK: Int32 = np.empty((0, 0), np.int32)
NO_VECTORS: Float32 = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """How the request in a slot is sampled; sent once, with its first sampled step.

    It is sent again when the request comes back after a preemption, then with
    the tokens that it has produced so far in `output_token_ids`.

    Attributes:
        slot: the request's place in the runner's state, in [0, max_num_seqs).
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than min_p x the most likely one, in [0, 1].
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens that
            occur in the prompt or output; 1 does nothing (Keskar et al. 2019, section 4.1).
        presence_penalty: subtracted from logits of tokens that occur in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        seed: 64-bit key of the request's own random stream: the n-th token depends on (seed, n)
            and the logits alone, never on the rest of the batch.
        logit_bias: token id -> added to its logit.
        logprobs: -1 none; 0 the sampled token's; n > 0 also those of the n most likely tokens.
        min_tokens: `end_token_ids` cannot be sampled before this many output tokens.
        end_token_ids: tokens that end the request.
        prompt_token_ids: the prompt, where a penalty needs it; else empty.
        output_token_ids: tokens produced so far, where a penalty needs them; else empty.
    """

    slot: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()

    @property
    def needs_history(self) -> bool:
        """Whether any penalty looks at the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Size(NamedTuple):
    """Of a step, for one copy of attention.

    Attributes:
        tokens: T.
        rows: of them, how many are sampled, scored or pooled.
    """

    tokens: int
    rows: int


class StepInput(msgspec.Struct, frozen=True):
    """One step of a ragged batch of B requests and T tokens, S of which are sampled.

    Attributes:
        step: counts up by one, in each copy of attention; every rank receives the steps in this
            order.
        token_ids: int32[T]; a negative entry is `-1 - slot` (see the module's text).
        positions: int32[T]; place of each token in its request, from 0.
        query_start: int32[B + 1]; request b owns tokens query_start[b]:query_start[b + 1].
        context_len: int32[B]; tokens of the request in the cache once this step is done.
        block_table: int32[B, n]; the request's cache blocks in order, padded with 0. Ranks
            that share KV heads by position (--cp) have a part of each, under the same number.
        slot: int32[B]; each request's slot.
        sample_index: int32[S]; rows of T whose next token is sampled, at most one a request.
        sample_slot: int32[S]; the slot of each sampled row.
        output_index: int32[S]; how many tokens the request has sampled before this one.
        new_slots: sampling settings of requests that are sampled for the first time.
        prompt_logprob_index: int32[P]; rows of T whose next *prompt* token is scored; none of
            them is sampled.
        prompt_logprob_target: int32[P]; that next prompt token.
        prompt_logprob_top: how many of the most likely tokens go with each score.
        pool_index: int32[Q]; rows of T whose hidden states are summed, request by request; none of
            them is sampled or scored.
        pool_count: int32[E]; how many of them each of E sums is of.
        masked: int32[M]; which of the S rows may not have just any token.
        token_mask: int32[M, ceil(V / 32)]; for each of them, bit t % 32 of number t // 32 says
            whether it may have token t. At least one is set.
        copies: where there are several copies of attention, how large the step is for each, in
            their order; this input is of one of them.
    """

    step: int
    token_ids: Int32
    positions: Int32
    query_start: Int32
    context_len: Int32
    block_table: Int32
    slot: Int32
    sample_index: Int32
    sample_slot: Int32
    output_index: Int32
    new_slots: tuple[SlotSampling, ...] = ()
    prompt_logprob_index: Int32 = msgspec.field(default_factory=lambda: NONE)
    prompt_logprob_target: Int32 = msgspec.field(default_factory=lambda: NONE)
    prompt_logprob_top: int = 0
    pool_index: Int32 = msgspec.field(default_factory=lambda: NONE)
    pool_count: Int32 = msgspec.field(default_factory=lambda: NONE)
    masked: Int32 = msgspec.field(default_factory=lambda: NONE)
    token_mask: Int32 = msgspec.field(default_factory=lambda: NO_MASK)
    copies: tuple[Size, ...] = ()

    @property
    def size(self) -> Size:
        """How large it is."""
        rows = len(self.sample_index) + len(self.prompt_logprob_index) + len(self.pool_index)
        return Size(len(self.token_ids), rows)


NOTHING = StepInput(
    0,
    token_ids=NONE,
    positions=NONE,
    query_start=np.zeros(1, np.int32),
    context_len=NONE,
    block_table=np.empty((0, 0), np.int32),
    slot=NONE,
    sample_index=NONE,
    sample_slot=NONE,
    output_index=NONE,
)
"""Of a copy of attention that has no tokens in a step."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of N tokens, from the model's distribution before any sampling setting.

    Attributes:
        chosen: float32[N]; of the token itself.
        rank: int32[N]; 1 for the most likely token.
        top_ids: int32[N, k]; the k most likely tokens, most likely first.
        top: float32[N, k]; their log probabilities.
    """

    chosen: Float32
    rank: Int32
    top_ids: Int32
    top: Float32


class StepOutput(msgspec.Struct, frozen=True):
    """What one step produced.

    Attributes:
        step: the `StepInput.step` that this answers.
        token_ids: int32[S]; the sampled tokens, if there are any.
        status: int32[S]; FINITE, or NOT_FINITE when a row's logits held NaN or only
            infinities: that request has failed, the others have not.
        logprobs: of the S sampled tokens, when any request of the step asked; k is the largest
            number asked for.
        prompt_logprobs: of the P scored prompt tokens, when there are any.
        pooled: float32[E, hidden]; sums of hidden states after the final norm.
        seconds: time that the step took on the device; of a model in stages, in the last one, what
            it waits for others left out.
    """

    step: int
    token_ids: Int32 = msgspec.field(default_factory=lambda: NONE)
    status: Int32 = msgspec.field(default_factory=lambda: NONE)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: Float32 = msgspec.field(default_factory=lambda: NO_VECTORS)
    seconds: float = 0.0


Step = tuple[StepInput | None, ...]
"""What all ranks do at one time: the input of each copy of attention, None if it has no tokens."""

Result = tuple[StepOutput | None, ...]
"""What a Step produced, copy by copy."""


class ModelRunner(Protocol):
    """Runs one model, or one rank's part of it. Not thread-safe: one thread calls `step`."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block of the KV cache takes over all layers on this rank."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make the cache; called once, before the first step."""

    def warm_up(self) -> None:
        """Run what the first request should not have to wait for."""

    def step(self, batch: StepInput) -> StepOutput:
        """Run the model over the batch, write its keys and values, sample; blocks till done.

        With a batch of no tokens it only takes part in what the copies of attention share. A stage
        that has not the last layers samples nothing.
        """

    def close(self) -> None:
        """Release the memory."""


@runtime_checkable
class DispatchingRunner(ModelRunner, Protocol):
    """A runner whose devices work on their own: a step can begin before the last one is read."""

    def dispatch(self, batch: StepInput) -> Callable[[], StepOutput]:
        """Begin a step; what is returned blocks till it is done, and may be called by a thread.

        Steps are dispatched in their order by one thread, and waited for in their order.
        """
