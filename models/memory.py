"""The memory ledger: what a model will take, worked out before anything is loaded.

    weights        988.1 MiB
    activations    372.4 MiB  a step of 2048 tokens, 128 requests
    KV cache         2.25 GiB  12,288 blocks of 16 tokens: 196,608 tokens
    left             4.83 GiB  of the 8.42 GiB that weft may take

On Triton kernels there are up to two rows more: `buffers`, the symmetric memory of the
overlapped ops' workspaces, and `CUDA graphs`, the temporary tensors of recorded steps.

Weights are exact but for padding. Activations are the largest tensors that a
step holds at once, from the shapes. The KV cache gets what is left, but no
more than all requests at full length can use. When a request of full length
does not fit, the error names flags with values that fit.

Not counted: the interpreter and its libraries (they are loaded already, and
so are not in the free memory), file pages that the system can take back, and
the layer in hand while loading (the KV cache's memory is not used yet then).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from weft.errors import ConfigError
from weft.models.spec import DTYPE_BYTES, MlpSpec, ModelSpec

KIB, MIB, GIB = 2**10, 2**20, 2**30

MOST_PADDING = 7
"""Requests by which a step is padded to a recorded one, at most."""

MAX_ADVISED_FRACTION = 0.95
"""Of the free memory; above, the machine has nothing left for anything else."""

SMALL_STEP_TOKENS, SMALL_STEP_REQUESTS = 256, 8
"""A step that needs little memory and still runs well: tried when no single change is enough."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """Where the memory goes. Sizes are in bytes.

    Attributes:
        budget: what weft may take in all.
        weights: of the model.
        activations: temporary tensors of the largest step.
        buffers: in which ranks exchange numbers inside their products.
        graphs: temporary tensors of steps that are recorded as CUDA graphs.
        kv_cache: `num_blocks` x bytes of a block.
        num_blocks: of the KV cache.
        block_size: tokens in a block, of all ranks that have some of them.
        max_num_batched_tokens, max_num_seqs: the step that `activations` is for.
    """

    budget: int
    weights: int
    activations: int
    kv_cache: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    buffers: int = 0
    graphs: int = 0

    def with_blocks(self, num_blocks: int) -> Ledger:
        """With fewer blocks in the KV cache: as many as the rank with least room has."""
        return replace(
            self, num_blocks=num_blocks, kv_cache=self.kv_cache // self.num_blocks * num_blocks
        )

    @property
    def left(self) -> int:
        """What stays unused of the budget."""
        return (
            self.budget
            - (self.weights + self.activations + self.buffers + self.graphs)
            - self.kv_cache
        )

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, of all requests together."""
        return self.num_blocks * self.block_size

    def render(self) -> str:
        """The table, aligned, without a newline at its end."""
        step = f"a step of {self.max_num_batched_tokens} tokens, {self.max_num_seqs} requests"
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens: {self.tokens:,} tokens"
        rows = (
            ("weights", self.weights, ""),
            ("activations", self.activations, step),
            ("buffers", self.buffers, "in which ranks exchange numbers"),
            ("CUDA graphs", self.graphs, "of recorded steps"),
            ("KV cache", self.kv_cache, blocks),
            ("left", self.left, f"of the {human_bytes(self.budget)} that weft may take"),
        )
        return "\n".join(
            f"{name:<12}{human_bytes(size):>10}  {note}".rstrip()
            for name, size, note in rows
            if size or name not in ("buffers", "CUDA graphs")
        )


def plan_memory(
    spec: ModelSpec,
    *,
    dtype: str,
    quantization: str = "none",
    available: int,
    memory_fraction: float,
    kv_cache_memory: int | None,
    block_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int | None,
    copies: int = 1,
    cp: int = 1,
    triton: bool = False,
    buffers: int = 0,
    recorded: int = 0,
) -> Ledger:
    """Divide the memory, or say what to change.

    Args:
        spec: the model, or a rank's part of it.
        dtype: of weights, activations and KV cache; "auto" is the checkpoint's.
        quantization: of the matrices: "none" or "int8".
        available: bytes that are free, from `available_memory`.
        memory_fraction: share of them that weft may take.
        kv_cache_memory: bytes for the KV cache; what is left if None.
        block_size: tokens in a block of the KV cache, on each rank that has some of its tokens.
        max_num_seqs: most requests in a step.
        max_num_batched_tokens: most tokens in a step.
        max_model_len: most tokens of a request; the model's own limit if None.
        copies: of attention, each of which may have such a step.
        cp: ranks that share each KV head, by position.
        triton: the model runs on the kernels of a GPU, and not on those for CPUs.
        buffers: bytes of symmetric memory.
        recorded: requests of the largest step that is recorded as a CUDA graph; 0 if none is.

    Raises:
        ConfigError: the model does not fit, or one request of full length does not.
    """
    plan = _Plan(
        spec=spec,
        dtype=dtype,
        quantization=quantization,
        available=available,
        memory_fraction=memory_fraction,
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len or spec.max_model_len,
        copies=copies,
        cp=cp,
        triton=triton,
        buffers=buffers,
        recorded=recorded,
    )
    if not plan.fits:
        raise ConfigError(_refusal(plan))
    return Ledger(
        budget=plan.budget,
        weights=plan.weights,
        activations=plan.activations,
        kv_cache=plan.num_blocks * plan.bytes_per_block,
        num_blocks=plan.num_blocks,
        block_size=plan.cache_block,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        buffers=buffers,
        graphs=plan.graphs,
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """The arguments of `plan_memory`, and what follows from them."""

    spec: ModelSpec
    dtype: str
    quantization: str
    available: int
    memory_fraction: float
    kv_cache_memory: int | None
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    copies: int
    cp: int
    triton: bool
    buffers: int
    recorded: int

    @property
    def budget(self) -> int:
        return int(self.available * self.memory_fraction)

    @property
    def weights(self) -> int:
        return self.spec.weight_bytes(self.dtype, self.quantization)

    @property
    def activations(self) -> int:
        return self._activations(self.max_num_seqs, self.max_num_batched_tokens)

    @property
    def graphs(self) -> int:
        """Of the largest, whose memory the others share, and its result, which is apart from it."""
        requests = min(self.recorded, self.max_num_seqs + MOST_PADDING)
        if not requests:
            return 0
        row = self.spec.hidden_size + self.spec.vocab_size
        result = requests * row * DTYPE_BYTES[self.spec.compute_dtype(self.dtype)]
        return result + triton_activation_bytes(
            self.spec,
            dtype=self.dtype,
            max_num_seqs=requests,
            max_num_batched_tokens=requests,
            max_model_len=self.max_model_len,
            copies=self.copies,
            cp=self.cp,
            sampled=False,
        )

    @property
    def fixed(self) -> int:
        """All but the KV cache."""
        return self.weights + self.activations + self.buffers + self.graphs

    def _activations(self, requests: int, tokens: int) -> int:
        count = triton_activation_bytes if self.triton else activation_bytes
        return count(
            self.spec,
            dtype=self.dtype,
            max_num_seqs=requests,
            max_num_batched_tokens=tokens,
            max_model_len=self.max_model_len,
            copies=self.copies,
            cp=self.cp,
        )

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


def activation_bytes(
    spec: ModelSpec,
    *,
    dtype: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    copies: int = 1,
    cp: int = 1,
) -> int:
    """Bytes of the temporary tensors that the largest step of a model holds at once on the CPU.

    The residual stream and its norm live all along; attention, the feed-forward and the sampler
    come one after the other, so that the largest of them counts.
    Experts have the tokens of all copies of attention. With cp, a rank attends with as many times
    the heads, to a part of the keys.
    """
    # torch is not needed to read this module, only here.
    from weft.kernels.cpu.attention import BY_HEAD_SCORES, MAX_TILE_NUMBERS
    from weft.models.torch.sampler import CHUNK_NUMBERS

    item = DTYPE_BYTES[spec.compute_dtype(dtype)]
    tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    heads, keys = spec.num_heads * cp, -(-max_model_len // cp)
    q, kv = heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    scores = max(MAX_TILE_NUMBERS, spec.num_kv_heads * BY_HEAD_SCORES)
    scores = min(max(scores, q // kv * keys), tokens * heads * keys)
    gathered = max(min(MAX_TILE_NUMBERS, max_num_seqs * keys * kv), keys * kv)
    attention = tokens * (4 * q + 4 * kv) * item  # projection, rotated, result
    attention += scores * (4 + 4 + item)  # scores, softmax, in the type of the values
    attention += gathered * (item + 4 + item)  # keys, in float32, values
    if cp > 1:  # all heads' results in float32, as they are sent, and as they come
        attention += tokens * 4 * (q + heads) * 4

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * 3 * mlp.gate.weight.shape[0] * item  # gate and up, their product
        else:  # inputs and results in expert order, float32 sum, one expert with all tokens
            rows = copies * tokens
            size = rows * (2 * mlp.top_k * spec.hidden_size + 3 * mlp.gate.shape[1]) * item
            size += rows * spec.hidden_size * 4
            if copies > 1:  # what comes from the other ranks, what goes back
                size += rows * 4 * spec.hidden_size * item
        feed_forward = max(feed_forward, size)

    # Logits, and those whose log probabilities are wanted; the rest is done in chunks of rows.
    sampler = 0
    if spec.is_last:
        sampler = min(max_num_seqs, tokens) * spec.vocab_size * 2 * item
        sampler += 4 * 7 * max(CHUNK_NUMBERS["cpu"], spec.vocab_size)
    return tokens * 3 * spec.hidden_size * item + max(attention, feed_forward, sampler)


def triton_activation_bytes(
    spec: ModelSpec,
    *,
    dtype: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    copies: int = 1,
    cp: int = 1,
    sampled: bool = True,
) -> int:
    """`activation_bytes` of Triton kernels, which keep scores in registers.

    Without the sampler's, unless `sampled`.

    Not counted are the parts of decodes whose keys are split, a few MiB: the fewer requests there
    are, the more are their parts.
    """
    from weft.models.torch.sampler import CHUNK_NUMBERS

    item = DTYPE_BYTES[spec.compute_dtype(dtype)]
    tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = tokens * (3 * q + 2 * kv) * item  # projection, rotated, result
    if cp > 1:  # all heads' queries, twice; results, in float32, as they are sent, and as they come
        attention += tokens * cp * q * (3 * item + 4 * 4)

    feed_forward = 0
    for layer in spec.layers:
        mlp = layer.feed_forward
        if isinstance(mlp, MlpSpec):
            size = tokens * mlp.gate.weight.shape[0] * item
        else:  # rows in expert order, their results; both in float32, weighted
            rows = copies * tokens * mlp.top_k
            size = rows * (2 * spec.hidden_size + mlp.gate.shape[1]) * item
            size += rows * 2 * spec.hidden_size * 4
        feed_forward = max(feed_forward, size)

    sampler = 0
    if spec.is_last:
        logits = min(max_num_seqs, tokens) * spec.vocab_size
        sampler = logits * item
        if sampled:
            sampler += logits * item
            sampler += 4 * 7 * max(min(CHUNK_NUMBERS["cuda"], logits), spec.vocab_size)
    return tokens * 3 * spec.hidden_size * item + max(attention, feed_forward, sampler)


def _refusal(plan: _Plan) -> str:
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


def _sufficient_changes(plan: _Plan) -> list[str]:
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


def _shorter_requests(plan: _Plan) -> int:
    return _largest_that_fits(
        plan.cache_block, plan.max_model_len, lambda n: replace(plan, max_model_len=n)
    )


def _smaller_steps(plan: _Plan) -> int:
    return _largest_that_fits(
        64, plan.max_num_batched_tokens, lambda n: replace(plan, max_num_batched_tokens=n)
    )


def _fewer_requests(plan: _Plan) -> int:
    return _largest_that_fits(1, plan.max_num_seqs, lambda n: replace(plan, max_num_seqs=n))


def _largest_that_fits(step: int, current: int, plan_with: Callable[[int], _Plan]) -> int:
    """The largest multiple of `step` below the current value whose plan fits, or 0."""
    smaller = range(1, -(-current // step))
    return step * bisect_left(smaller, True, key=lambda n: not plan_with(n * step).fits)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: free memory of the machine and of its cgroups.

    A container's limit is its cgroup's, version 1 or 2, or that of a cgroup further up. File
    pages that the kernel can drop count as free, as in /proc/meminfo's MemAvailable.

    Args:
        root: where /proc and /sys are; for tests.
    """
    import psutil

    free = [int(psutil.virtual_memory().available)]
    for group, limit_file, usage_file, file_pages in _memory_cgroups(root):
        limit, usage = _read_number(group / limit_file), _read_number(group / usage_file)
        if limit is not None and usage is not None:
            free.append(limit - usage + _read_stat(group / "memory.stat", file_pages))
    return max(0, min(free))


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """This process's cgroups that may limit memory: folder, and names of its files and fields."""
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mount = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the end of it, or
        # nothing, is mounted: folders that are not there have no files to read.
        own = mount / path.lstrip("/")
        for group in (own, *own.parents):
            yield group, *names
            if group == mount:
                break


def _read_number(path: Path) -> int | None:
    """The number in a file; None when there is no file, or it says that there is no limit."""
    if not path.exists():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _read_stat(path: Path, field: str) -> int:
    """One field of a cgroup's memory.stat; 0 when it has none."""
    if not path.exists():
        return 0
    fields = dict(line.split() for line in path.read_text().splitlines())
    return int(fields.get(field, 0))


def human_bytes(size: int) -> str:
    """`12.0 KiB`, `942.3 MiB` or `5.21 GiB`."""
    if size < MIB:
        return f"{size / KIB:.1f} KiB"
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
