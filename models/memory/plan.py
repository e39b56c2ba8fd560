"""Division of a device's memory, and advice if the model does not fit."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from weft.errors import ConfigError
from weft.models.memory.activations import (
    ActivationBytes,
    LargestStep,
    cpu_activations,
    triton_activations,
)
from weft.models.memory.ledger import MIB, Ledger, human_bytes
from weft.models.spec.spec import DTYPE_BYTES, ModelSpec, MoeSpec, Packed

RECORDING = 8 * MIB
"""Assumed for one CUDA graph with its kernels' arguments: some thousand launches."""

MAX_ADVISED_FRACTION = 0.95
"""Largest fraction of the free memory that is advised; above it, nothing is left for others."""

SMALL_STEP_TOKENS, SMALL_STEP_REQUESTS = 256, 8
"""A step that needs little memory and still runs well; tried if no single change is enough."""


class Recordings(NamedTuple):
    """Sizes of the steps that are recorded as CUDA graphs; see models/torch/graphs.py.

    Attributes:
        decodes: numbers of requests with one token each.
        mixed: numbers of tokens in other steps.
    """

    decodes: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def within(self, max_num_seqs: int, max_num_batched_tokens: int) -> Recordings:
        """Return the sizes for smaller steps: no decodes after the first that has `max_num_seqs`.

        Args:
            max_num_seqs: maximum number of requests in a step.
            max_num_batched_tokens: maximum number of tokens in a step.
        """
        before = (0, *self.decodes)
        needed = (
            size for last, size in zip(before, self.decodes, strict=False) if last < max_num_seqs
        )
        return Recordings(
            tuple(size for size in needed if size <= max_num_batched_tokens),
            tuple(size for size in self.mixed if size <= max_num_batched_tokens),
        )


NO_RECORDINGS = Recordings()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Settings and the memory that follows from them. Sizes are in bytes.

    Attributes:
        spec: the model, or a rank's part.
        dtype: dtype for weights and activations; "auto" is the checkpoint's.
        kv_dtype: the KV cache's; None is `dtype`.
        quantization: of the matrices: "none", "int8" or "int4".
        available: free memory, from `available_memory`.
        memory_fraction: fraction that weft may take.
        kv_cache_memory: memory for the KV cache; None takes the rest.
        block_size: tokens in a KV cache block, on each rank that shares it.
        max_num_seqs: maximum number of requests in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        dp_size: data-parallel attention groups; each may have such a step.
        cp: ranks that share each KV head by position.
        count_activations: counts the temporary tensors' bytes in a step.
        buffers: symmetric memory.
        recordings: steps that are recorded as CUDA graphs.
        copies: bytes for copies of experts, beside the rank's part of the model.
        packed: where quantised checkpoints' weights stay as they are stored; see
            ModelSpec.weight_bytes.
        sharded: ranks hold some tokens each between products.
        saved: weight bytes without memory, such as by lossless compression; known after loading.
    """

    spec: ModelSpec
    dtype: str
    kv_dtype: str | None = None
    quantization: str = "none"
    available: int
    memory_fraction: float
    kv_cache_memory: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    dp_size: int = 1
    cp: int = 1
    count_activations: ActivationBytes = cpu_activations
    buffers: int = 0
    recordings: Recordings = NO_RECORDINGS
    copies: int = 0
    packed: Packed = None
    sharded: bool = False
    saved: int = 0

    def ledger(self) -> Ledger:
        """Divide the memory.

        Raises:
            ConfigError: the model or one request at full length does not fit; with changes to make.
        """
        if not self.fits:
            raise ConfigError(_explain_misfit(self))
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
        own = self.spec.weight_bytes(self.dtype, self.quantization, packed=self.packed)
        if self.packed == "gpu":
            rounded = self.quantization != "none"
            own += dequantized_bytes(self.spec, self.dtype, experts=self.sharded, rounded=rounded)
        return own - self.saved + self.copies

    @property
    def activations(self) -> int:
        step = self._step(self.max_num_seqs, self.max_num_batched_tokens)
        return self.count_activations(self.spec, self.dtype, step)

    @property
    def graphs(self) -> int:
        """Memory for the largest graph's tensors, which the others share, and for each recording.

        A result and the block tables lie outside the recordings.
        """
        decodes, mixed = self.recordings.within(self.max_num_seqs, self.max_num_batched_tokens)
        count = len(decodes) + len(mixed)
        if not count:
            return 0
        requests, tokens = max(decodes, default=0), max(mixed, default=0)
        rows = max(requests, min(tokens, self.max_num_seqs) + 1)
        numbers = max(requests, tokens) * self.spec.hidden_size + requests * self.spec.vocab_size
        result = numbers * DTYPE_BYTES[self.spec.compute_dtype(self.dtype)]
        tables = 4 * rows * -(-self.max_model_len // self.block_size)  # int32
        steps = (self._step(requests, requests), self._step(1, tokens))
        activations = max(
            triton_activations(self.spec, self.dtype, step, sampled=False) for step in steps
        )
        return result + tables + activations + count * RECORDING

    @property
    def fixed(self) -> int:
        """All memory except the KV cache."""
        return self.weights + self.activations + self.buffers + self.graphs

    def _step(self, requests: int, tokens: int) -> LargestStep:
        return LargestStep(requests, tokens, self.max_model_len, self.dp_size, self.cp)

    @property
    def cache_block(self) -> int:
        """Tokens in a block, over all ranks that share it."""
        return self.block_size * self.cp

    @property
    def bytes_per_block(self) -> int:
        """This rank's bytes per block."""
        return self.block_size * self.spec.kv_bytes_per_token(self.kv_dtype or self.dtype)

    @property
    def request_bytes(self) -> int:
        """KV cache for one request at full length."""
        return -(-self.max_model_len // self.cache_block) * self.bytes_per_block

    @property
    def room(self) -> int:
        """Memory for the KV cache; negative if the rest alone does not fit."""
        return self.budget - self.fixed

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV cache; never more than all requests can use at full length."""
        size = self.room if self.kv_cache_memory is None else self.kv_cache_memory
        return min(size, self.max_num_seqs * self.request_bytes) // self.bytes_per_block

    @property
    def fits(self) -> bool:
        size = self.num_blocks * self.bytes_per_block
        return self.request_bytes <= size <= self.room


def copies_bytes(spec: ModelSpec, dtype: str, copies: int, quantization: str = "none") -> int:
    """Count the bytes for copies of experts, and for the buffer in which experts move.

    Args:
        spec: a rank's part of the model.
        dtype: dtype of the weights.
        copies: number of copies in each layer with experts.
        quantization: how weights are rounded that the checkpoint does not quantise.
    """
    total = buffer = 0
    item = DTYPE_BYTES[spec.compute_dtype(dtype)]
    for layer in spec.layers if copies else ():
        if isinstance(moe := layer.feed_forward, MoeSpec):
            weights = (moe.gate, moe.up, moe.down)
            each = [one.packed_bytes(one.shape[1:], item, quantization) for one in weights]
            total += copies * sum(each)
            buffer = max(buffer, (moe.gate.shape[0] + copies) * max(each))
    return total + buffer


def dequantized_bytes(spec: ModelSpec, dtype: str, *, experts: bool, rounded: bool) -> int:
    """Count the bytes of the buffer for dequantised weights (models/torch/gpu_layers.py).

    Args:
        spec: a rank's part of the model.
        dtype: dtype of the buffer.
        experts: products of experts take plain weights, because ranks exchange beside them.
        rounded: weights are quantised when loading, unless the checkpoint's are.
    """
    largest = 0
    for layer in spec.layers:
        attention, block = layer.attention, layer.feed_forward
        products = [[attention.q.weight, attention.k.weight, attention.v.weight]]
        products.append([attention.o.weight])
        mlp = block.shared if isinstance(block, MoeSpec) else block
        if mlp is not None:
            products += [[mlp.gate.weight, mlp.up.weight], [mlp.down.weight]]
        if experts and isinstance(block, MoeSpec):
            products += [[block.gate, block.up], [block.down]]
        for weights in products:
            if rounded or any(weight.stored is not None for weight in weights):
                largest = max(largest, sum(weight.size for weight in weights))
    return largest * DTYPE_BYTES[spec.compute_dtype(dtype)]


def _explain_misfit(plan: MemoryPlan) -> str:
    """Describe the need, the available memory, and changes that are each sufficient."""
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
    """List changes to the flags, each of which makes the plan fit."""
    changes = []
    if plan.kv_cache_memory is not None:
        # Advise the largest size that fits if the size was too large, else the smallest
        # sufficient one.
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
    """Return the largest multiple of `step` below the current value that fits, or 0."""
    smaller = range(1, -(-current // step))
    return step * bisect_left(smaller, True, key=lambda n: not plan_with(n * step).fits)
