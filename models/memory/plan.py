"""How a device's memory is divided, and what to change where it is too little."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.models.memory.activations import (
    ActivationBytes,
    Step,
    cpu_activations,
    triton_activations,
)
from weft.models.memory.ledger import MIB, Ledger, human_bytes
from weft.models.spec.spec import DTYPE_BYTES, ModelSpec

MOST_PADDING = 7
"""Requests by which a step is padded to a recorded one, at most."""

MAX_ADVISED_FRACTION = 0.95
"""Of the free memory; above, the machine has nothing left for anything else."""

SMALL_STEP_TOKENS, SMALL_STEP_REQUESTS = 256, 8
"""A step that needs little memory and still runs well: tried when no single change is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Settings, and the memory that follows from them. Sizes are in bytes.

    Attributes:
        spec: the model, or a rank's part of it.
        dtype: of weights, activations and KV cache; "auto" is the checkpoint's.
        quantization: of the matrices: "none" or "int8".
        available: that is free, from `available_memory`.
        memory_fraction: share of it that weft may take.
        kv_cache_memory: for the KV cache; what is left if None.
        block_size: tokens in a block of the KV cache, on each rank that has some of its tokens.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request.
        copies: of attention, each of which may have such a step.
        cp: ranks that share each KV head, by position.
        count: of a step's temporary tensors.
        buffers: symmetric memory.
        recorded: requests of the largest step that is recorded as a CUDA graph; 0 if none is.
    """

    spec: ModelSpec
    dtype: str
    quantization: str = "none"
    available: int
    memory_fraction: float
    kv_cache_memory: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    copies: int = 1
    cp: int = 1
    count: ActivationBytes = cpu_activations
    buffers: int = 0
    recorded: int = 0

    def ledger(self) -> Ledger:
        """Where the memory goes.

        Raises:
            ConfigError: the model does not fit, or one request of full length does not; with what
                to change.
        """
        if not self.fits:
            raise ConfigError(_refusal(self))
        return Ledger(
            budget=self.budget,
            weights=self.weights,
            activations=self.activations,
            kv_cache=self.num_blocks * self.bytes_per_block,
            num_blocks=self.num_blocks,
            block_size=self.cache_block,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            buffers=self.buffers,
            graphs=self.graphs,
        )

    @property
    def budget(self) -> int:
        return int(self.available * self.memory_fraction)

    @property
    def weights(self) -> int:
        return self.spec.weight_bytes(self.dtype, self.quantization)

    @property
    def activations(self) -> int:
        step = self._step(self.max_num_seqs, self.max_num_batched_tokens)
        return self.count(self.spec, self.dtype, step)

    @property
    def graphs(self) -> int:
        """Of the largest, whose memory the others share, and its result, which is apart from it."""
        requests = min(self.recorded, self.max_num_seqs + MOST_PADDING)
        if not requests:
            return 0
        row = self.spec.hidden_size + self.spec.vocab_size
        result = requests * row * DTYPE_BYTES[self.spec.compute_dtype(self.dtype)]
        step = self._step(requests, requests)
        return result + triton_activations(self.spec, self.dtype, step, sampled=False)

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activations + self.buffers + self.graphs

    def _step(self, requests: int, tokens: int) -> Step:
        return Step(requests, tokens, self.max_model_len, self.copies, self.cp)

    @property
    def cache_block(self) -> int:
        """Tokens in a block, of all ranks that have some of them."""
        return self.block_size * self.cp

    @property
    def bytes_per_block(self) -> int:
        """Of this rank's part."""
        return self.block_size * self.spec.kv_bytes_per_token(self.dtype)

    @property
    def request_bytes(self) -> int:
        """KV cache of one request of full length."""
        return -(-self.max_model_len // self.cache_block) * self.bytes_per_block

    @property
    def room(self) -> int:
        """What the KV cache may take; negative when not even the rest fits."""
        return self.budget - self.fixed

    @property
    def num_blocks(self) -> int:
        """No more blocks than all requests at full length can use."""
        size = self.room if self.kv_cache_memory is None else self.kv_cache_memory
        return min(size, self.max_num_seqs * self.request_bytes) // self.bytes_per_block

    @property
    def fits(self) -> bool:
        size = self.num_blocks * self.bytes_per_block
        return self.request_bytes <= size <= self.room


def _refusal(plan: MemoryPlan) -> str:
    """What is needed, what there is, and the changes that would each be enough."""
    request = f"one request of {plan.max_model_len:,} tokens"
    given = plan.kv_cache_memory
    if given is not None and given < plan.request_bytes:
        problem = (
            f"--kv-cache-memory is {human_bytes(given)}, too little for {request}, "
            f"which takes {human_bytes(plan.request_bytes)}"
        )
    else:
        cache, note = plan.request_bytes, f" for {request}"
        if given is not None:
            cache, note = plan.num_blocks * plan.bytes_per_block, ""
        more = (("buffers", plan.buffers), ("CUDA graphs", plan.graphs))
        others = "".join(f", {name} {human_bytes(size)}" for name, size in more if size)
        problem = (
            f"the model does not fit in memory: weights {human_bytes(plan.weights)}, "
            f"activations {human_bytes(plan.activations)}{others} and "
            f"KV cache {human_bytes(cache)}{note} are more than the "
            f"{human_bytes(plan.budget)} that weft may take "
            f"({plan.memory_fraction:g} of the {human_bytes(plan.available)} that are free)"
        )
    changes = _sufficient_changes(plan)
    if not changes:
        return f"{problem}; free some memory or choose a smaller model"
    return f"{problem}; set {', or '.join(changes)}"


def _sufficient_changes(plan: MemoryPlan) -> list[str]:
    """Changes of the settings, as flags, of which each makes the plan fit."""
    changes = []
    if plan.kv_cache_memory is not None:
        # As much as there is room for if that was too much, else as little as is enough.
        too_much = plan.kv_cache_memory >= plan.request_bytes
        mib = plan.room // MIB if too_much else -(-plan.request_bytes // MIB)
        if replace(plan, kv_cache_memory=mib * MIB).fits:
            changes.append(f"--kv-cache-memory {mib}M")
            if too_much:
                return changes
    else:
        needed = plan.fixed + plan.request_bytes
        fraction = math.ceil(needed / max(plan.available, 1) * 100) / 100
        if fraction <= MAX_ADVISED_FRACTION:
            changes.append(f"--memory-fraction {fraction:g}")
    changes += [
        f"{flag} {value}"
        for flag, value in (
            ("--max-model-len", _shorter_requests(plan)),
            ("--max-num-batched-tokens", _smaller_steps(plan)),
            ("--max-num-seqs", _fewer_requests(plan)),
        )
        if value
    ]
    if not changes:
        small = replace(
            plan,
            max_num_batched_tokens=min(plan.max_num_batched_tokens, SMALL_STEP_TOKENS),
            max_num_seqs=min(plan.max_num_seqs, SMALL_STEP_REQUESTS),
        )
        if value := _shorter_requests(small):
            changes.append(
                f"--max-model-len {value} with --max-num-batched-tokens "
                f"{small.max_num_batched_tokens} and --max-num-seqs {small.max_num_seqs}"
            )
    return changes


def _shorter_requests(plan: MemoryPlan) -> int:
    return _largest_that_fits(
        plan.cache_block, plan.max_model_len, lambda n: replace(plan, max_model_len=n)
    )


def _smaller_steps(plan: MemoryPlan) -> int:
    return _largest_that_fits(
        64, plan.max_num_batched_tokens, lambda n: replace(plan, max_num_batched_tokens=n)
    )


def _fewer_requests(plan: MemoryPlan) -> int:
    return _largest_that_fits(1, plan.max_num_seqs, lambda n: replace(plan, max_num_seqs=n))


def _largest_that_fits(step: int, current: int, plan_with: Callable[[int], MemoryPlan]) -> int:
    """The largest multiple of `step` below the current value whose plan fits, or 0."""
    smaller = range(1, -(-current // step))
    return step * bisect_left(smaller, True, key=lambda n: not plan_with(n * step).fits)
