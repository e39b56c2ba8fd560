"""The interface between the scheduler and a model runner: one step's input and output.

Everything here is NumPy, flat and ragged, and the same for every backend: the scheduler never sees
a torch or JAX array. A batch holds B requests with T tokens in total. A request's tokens in this
step may be a whole prompt, a part of one, or a single token to decode. The runner treats them
alike.

With data-parallel attention, the attention weights exist several times. Each *attention group*
has its own requests, slots and KV cache, and all instances run a step at the same time.

A step is dispatched before the previous step has come back, so a request's newest token may not
have reached the host yet. The step then names the token by its place on the device:
`token_ids[t] = -1 - slot` stands for "the last token sampled for the request in `slot`".
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
"""An empty array of tokens, requests or rows."""
NO_MASK: Int32 = np.empty((0, 0), np.int32)
NO_VECTORS: Float32 = np.empty((0, 0), np.float32)


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """Sampling settings for the request in a slot, sent once with its first sampled step.

    They are sent again when the request returns after a preemption. `output_token_ids` then holds
    the tokens that it has produced so far.

    Attributes:
        slot: the request's row in the runner's state, in [0, max_num_seqs).
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        min_p: drop tokens less likely than min_p x the most likely one, in [0, 1].
        repetition_penalty: divides (multiplies) positive (negative) logits of tokens in the
            prompt or output; 1 does nothing (Keskar et al. 2019, section 4.1).
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted once for each occurrence in the output.
        seed: 64-bit key of the request's own random stream. The n-th token depends on (seed, n)
            and the logits alone, never on the rest of the batch.
        logit_bias: token id -> value to add to its logit.
        logprobs: -1 for none; 0 for the sampled token; n > 0 also for the n most likely tokens.
        min_tokens: `end_token_ids` cannot be sampled before this many output tokens.
        end_token_ids: tokens that end the request.
        prompt_token_ids: the prompt if a penalty needs it; else empty.
        output_token_ids: tokens produced so far if a penalty needs them; else empty.
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
        """Return whether a penalty needs earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class Size(NamedTuple):
    """A step's size for one attention group.

    Attributes:
        tokens: T.
        rows: number of tokens that are sampled, scored or pooled.
    """

    tokens: int
    rows: int


class StepInput(msgspec.Struct, frozen=True):
    """One step: a ragged batch of B requests with T tokens. S of its rows are sampled.

    Attributes:
        step: the step's number. It counts up by one in each attention group, and
            every rank receives the steps in this order.
        token_ids: int32[T]; a negative entry is `-1 - slot` (see the module's text).
        positions: int32[T]; position of each token in its request, from 0.
        query_start: int32[B + 1]; request b owns tokens query_start[b]:query_start[b + 1].
        context_len: int32[B]; number of the request's tokens in the cache after this step.
        block_table: int32[B, n]; the request's cache blocks in order, padded with 0. Ranks
            that share KV heads by position (--cp) hold a part of each block under the same number.
        slot: int32[B]; each request's slot.
        sample_index: int32[S]; rows of T whose next token is sampled, at most one a request.
        sample_slot: int32[S]; the slot of each sampled row.
        output_index: int32[S]; number of tokens that the request has sampled before this one.
        new_slots: sampling settings of requests that are sampled for the first time.
        prompt_logprob_index: int32[P]; rows of T whose next *prompt* token is scored. These rows
            are not sampled.
        prompt_logprob_target: int32[P]; the next prompt token.
        prompt_logprob_top: number of most likely tokens that go with each score.
        pool_index: int32[Q]; rows of T whose hidden states are summed, request by request. These
            rows are neither sampled nor scored.
        pool_count: int32[E]; number of rows in each of E sums.
        masked: int32[M]; indices of sampled rows that have a token mask.
        token_mask: int32[M, ceil(V / 32)]; bit t % 32 of number t // 32 is set if the row may
            sample token t. At least one bit is set in each row.
        group_sizes: with several attention groups, the step's size in each group. This
            input belongs to one of the groups.
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
    group_sizes: tuple[Size, ...] = ()

    @property
    def size(self) -> Size:
        """Number of tokens, and of rows with a result."""
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
"""The input for an attention group without tokens in a step."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of N tokens in the model's distribution, before any sampling setting.

    Attributes:
        chosen: float32[N]; the token's own log probability.
        rank: int32[N]; the token's rank in the distribution, 1 for the most likely token.
        top_ids: int32[N, k]; the k most likely tokens, most likely first.
        top: float32[N, k]; their log probabilities.
    """

    chosen: Float32
    rank: Int32
    top_ids: Int32
    top: Float32


class StepOutput(msgspec.Struct, frozen=True):
    """A step's result.

    Attributes:
        step: number of the step, `StepInput.step`.
        token_ids: int32[S]; the sampled tokens.
        status: int32[S]; FINITE, or NOT_FINITE if a row's logits held NaN or only infinities. Then
            this request has failed; the others have not.
        logprobs: log probabilities of the S sampled tokens, if any request of the step asked for
            them; k is the largest number requested.
        prompt_logprobs: log probabilities of the P scored prompt tokens, if there are any.
        pooled: float32[E, hidden]; sums of hidden states after the final norm.
        seconds: time that the step took on the device. With pipeline stages, time in the last
            stage, without waiting for other stages.
        compilations: kernels or programs compiled meanwhile; the step waited for them.
        expert_rows: rows for experts on the rank with the most, and on a rank on average; summed
            over layers, and over the steps in which they were counted.
    """

    step: int
    token_ids: Int32 = msgspec.field(default_factory=lambda: NONE)
    status: Int32 = msgspec.field(default_factory=lambda: NONE)
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    pooled: Float32 = msgspec.field(default_factory=lambda: NO_VECTORS)
    seconds: float = 0.0
    compilations: int = 0
    expert_rows: tuple[float, float] = (0.0, 0.0)


Step = tuple[StepInput | None, ...]
"""One input for each attention group; None for a group without tokens."""

Result = tuple[StepOutput | None, ...]
"""One output for each attention group; None for a group without tokens."""


class ModelRunner(Protocol):
    """Runs a model, or one rank's part of it. Not thread-safe: one thread calls `step`."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a KV cache block takes on this rank, in all layers together."""

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache; called once, before the first step."""

    def warm_up(self) -> None:
        """Do slow work that the first request should not wait for."""

    def step(self, batch: StepInput) -> StepOutput:
        """Run the model over the batch, write keys and values, and sample; blocks until done.

        With an empty batch, a rank only takes part in work that attention groups share. A
        pipeline stage without the last layers samples nothing.
        """

    def close(self) -> None:
        """Release the memory."""


@runtime_checkable
class DispatchingRunner(ModelRunner, Protocol):
    """A runner with asynchronous devices: a step can begin before the last one is read."""

    def dispatch(self, batch: StepInput) -> Callable[[], StepOutput]:
        """Begin a step; the returned function blocks until it is done.

        One thread dispatches the steps in order. Any thread may wait for them, in the same order.
        """
