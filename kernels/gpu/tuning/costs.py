"""The cost model for overlapped ops: a roofline with compute, links and launches.

It needs no measurement.

    tiles        the product takes waves of tiles, and a tile takes steps along K by BLOCK_K; a step
                 takes the longest of its arithmetic, its loads, and the memory latency divided by
                 the stages that hide it, plus a small overhead for the loop
    link         the bytes that a rank receives (or sends, whichever is more) over its link, times
                 the method's overhead, plus the latency of its signals
    overlap      the longer of the two, plus the part that cannot be hidden: an all-gather's last
                 shard is multiplied after it has arrived, and a reduce-scatter's first tile is
                 computed before anything is sent

The costs for collectives follow "How to Scale Your Model" (Austin et al. 2025, part 3): an
all-gather or reduce-scatter moves the whole array over the link once, an all-reduce twice, for any
number of ranks. Small arrays cost at least the latency of a hop. The model orders the candidates
for tuning (search.py), and selects a configuration for untuned shapes. It ignores contention
between communication and compute, and power limits.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from msgspec.structs import replace

from weft.kernels.devices import DEVICES, GPU_LAUNCH, HOP, SENDERS
from weft.kernels.gpu.runtime.arguments import KernelError

logger = logging.getLogger(__name__)

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class Config(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """Configuration for an op; equal on all ranks.

    Attributes:
        method: communication method; a key in `METHODS`.
        block_m, block_n, block_k: sides of a tile; 0 in ops without a product. Attention has no
            block_k. In moe_dispatch, block_m is the number of tokens with a common signal.
        stages, warps: pipeline stages and warps in the kernel with the product; 0 without one.
        senders: number of programs that only send; 0 lets the op decide, or the op has none.
        splits: number of programs that share the keys of a tile in decode attention; 0 elsewhere.
    """

    method: str
    block_m: int = 0
    block_n: int = 0
    block_k: int = 0
    stages: int = 0
    warps: int = 0
    senders: int = 0
    splits: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(
                f"method is {self.method!r}; it must be one of {', '.join(sorted(METHODS))}"
            )
        for name in ("block_m", "block_n", "block_k", "warps"):
            value = getattr(self, name)
            if value < 0 or value & (value - 1):
                raise ValueError(f"{name} is {value}; it must be a power of two, or 0 for none")
        for name in ("stages", "senders", "splits"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class Problem:
    """One op at one shape.

    Attributes:
        op: a key in `PAYLOADS`.
        rows: number of rows that all ranks together multiply (M).
        n, k: columns and rows of the weight on one rank. For ops without a product, n is the width
            of a row and k is 0.
        dtype: operand dtype, by its torch name.
        groups: number of groups of rows, each with its own weight: experts, or KV heads.
        top_k: how often the same row is multiplied, with weights from different groups. For
            attention, the number of query heads that share a KV head.

    For attention, rows is the number of queries: in the longest request, in all requests (decode),
    or on all ranks (sequence_parallel_attention). n is the number of keys in the longest request.
    k is the head size, or the latent size (mla_decode_attention: `latent_rank`). dtype is the cache
    dtype. For moe_dispatch, each token counts as one row for each of its experts.
    """

    op: str
    world_size: int
    rows: int
    n: int
    k: int
    dtype: str = "bfloat16"
    groups: int = 1
    top_k: int = 1

    def __post_init__(self) -> None:
        if self.op not in PAYLOADS:
            raise KernelError(f"op is {self.op!r}; it must be one of {', '.join(PAYLOADS)}")
        if self.dtype not in DTYPES:
            raise KernelError(
                f"{self.op}: dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}"
            )
        for name in ("world_size", "groups", "top_k"):
            if (value := getattr(self, name)) < 1:
                called = name.replace("_", " ")
                raise KernelError(f"{self.op}: {called} is {value}; it must be at least 1")

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def multiplies(self) -> bool:
        return "matmul" in self.op

    @property
    def attends(self) -> bool:
        return "attention" in self.op

    @property
    def decodes(self) -> bool:
        return "decode" in self.op

    @property
    def payload(self) -> int:
        """Bytes in the whole array that is gathered or reduced.

        For moe_dispatch: the maximum number of bytes that one rank receives.
        """
        if PAYLOADS[self.op] == "nothing":
            return 0
        if self.op == "moe_dispatch":
            return self.rows // self.world_size * self.n * self.itemsize
        if self.attends:  # keys and values
            return 2 * self.rows * self.groups * self.k * self.itemsize
        width = self.k if PAYLOADS[self.op] == "input" else self.n
        return self.rows // self.top_k * width * self.itemsize

    @property
    def parts(self) -> int:
        """Number of row ranges that begin a new tile: one for each rank, or for each group."""
        if "grouped" in self.op:
            return self.groups
        return 1 if self.op == "matmul_all_reduce" else self.world_size


PAYLOADS = {
    "all_gather": "output",
    "reduce_scatter": "output",
    "all_reduce": "output",
    "all_gather_matmul": "input",
    "matmul_reduce_scatter": "output",
    "matmul_all_reduce": "output",
    "grouped_matmul": "nothing",
    "all_gather_grouped_matmul": "input",
    "grouped_matmul_reduce_scatter": "output",
    "moe_dispatch": "output",
    "paged_attention": "nothing",
    "decode_attention": "nothing",
    "mla_decode_attention": "nothing",
    "sequence_parallel_attention": "input",
}
"""The array that travels in each op: the product's input or output. Ops without a product have only
an output."""

SENDING = (
    *("all_gather_matmul", "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter"),
    "sequence_parallel_attention",
)
"""Ops with programs that only send."""


@dataclass(frozen=True, slots=True)
class Method:
    """Costs of a communication method.

    Attributes:
        factor: bytes on the link for each byte of data.
        hops: number of latencies in sequence.
        on_processors: GPU programs move the data.
    """

    factor: float = 1.0
    hops: int = 1
    on_processors: bool = True


METHODS = {
    "push": Method(hops=2),  # the data, then its signal
    "pull": Method(hops=3),  # the signal for ready data, the request, the data
    "copy_engine": Method(hops=2, on_processors=False),
    "ll": Method(factor=2.0),  # a store has 4 data bytes and 4 flag bytes (NCCL's LL)
    "ll128": Method(factor=128 / 120),  # 8 flag bytes in 128 bytes (NCCL's LL128)
    "multimem": Method(hops=2),
    "one_shot": Method(hops=2),
    "two_shot": Method(hops=4),
    "local": Method(factor=0.0, hops=0),  # within one rank
}
ONE_SHOT = ("one_shot", "ll")
"""All-reduce methods in which every rank receives the whole array from every other rank."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures for one GPU, in bytes, bytes per second and operations per second.

    Attributes:
        name: part of the name that the driver gives.
        target: compilation target in aot.py.
        flops: dense operations per second with 2-byte operands.
        memory, l2: bandwidth.
        link: bandwidth to all other GPUs in the node together, in one direction.
        processors: number of SMs or CUs.
        shared: maximum bytes of shared memory for one program.
    """

    name: str
    target: str
    flops: float
    memory: float
    l2: float
    link: float
    processors: int
    shared: int


def _gpu(name: str, target: str, l2: float, processors: int, shared: int) -> Gpu:
    device = DEVICES[name]
    links = device.node - 1 if device.link.reach == "pairs" else 1
    flops, link = device.flops["bfloat16"], links * device.link.bandwidth
    return Gpu(name, target, flops, device.bandwidth, l2, link, processors, shared)


# Shared memory comes from CUDA's programming guide (compute capability table) and AMD's CDNA 3
# paper. No vendor publishes L2 bandwidths: these are rounded read bandwidths from microbenchmarks
# (Chips and Cheese).
GPUS = (
    _gpu("A100", "sm_80", 4.5e12, 108, 163 << 10),
    _gpu("H100", "sm_90", 5.5e12, 132, 227 << 10),
    _gpu("H200", "sm_90", 5.5e12, 132, 227 << 10),
    _gpu("B200", "sm_100", 9.0e12, 148, 227 << 10),
    _gpu("MI300X", "gfx942", 10.0e12, 304, 64 << 10),
    _gpu("L40S", "sm_89", 4.0e12, 142, 99 << 10),
)
UNKNOWN = GPUS[1]
SMALL = re.compile(r"\b(A2|A10G?|A16|A40|L2|L4|L20|L40|RTX)\b")
"""NVIDIA's GPUs with the L40S's shared memory: compute capabilities 8.6, 8.9 and 12.0."""

MEMORY_LATENCY = 0.7e-6  # a load that misses L2; assumed
STEP = 20e-9  # overhead per step along K: a barrier, addresses, a branch; assumed


def device_named(name: str) -> Gpu:
    """Find a GPU by the name that its driver gives.

    An unlisted GPU gets the figures of the L40S if it has as little shared memory, else the H100's.
    """
    unlisted = device_for("sm_89") if SMALL.search(name) else UNKNOWN
    return next((gpu for gpu in GPUS if gpu.name in name), unlisted)


@contextmanager
def meta_device(name: str, processors: int) -> Iterator[None]:
    """Within, torch's meta device stands for a GPU, in all threads.

    Args:
        name: the name that the GPU's driver gives, or part of it.
        processors: number of SMs or CUs.
    """
    global _meta
    before, _meta = _meta, (device_named(name), processors)
    try:
        yield
    finally:
        _meta = before


_meta = UNKNOWN, UNKNOWN.processors


def gpu_of(device: torch.device) -> Gpu:
    """Return the figures of a torch device. In the interpreter, these are the H100's."""
    if device.type == "meta":
        return _meta[0]
    cuda = device.type == "cuda"
    return device_named(torch.cuda.get_device_name(device)) if cuda else UNKNOWN


def count_processors(device: torch.device) -> int:
    """Return the number of programs with a large tile that run at once; 4 in the interpreter."""
    if device.type == "meta":
        return _meta[1]
    return _count_processors(device) if device.type == "cuda" else 4


@functools.cache
def _count_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_for(target: str) -> Gpu:
    """Find the first GPU with this compilation target."""
    return next(gpu for gpu in GPUS if gpu.target == target)


def link_time(problem: Problem, config: Config, device: Gpu) -> float:
    """Estimate the seconds until all data has arrived, if nothing else runs."""
    size, method = problem.world_size, METHODS[config.method]
    if size == 1 or not problem.payload:
        return 0.0
    traffic = float(problem.payload) * (size - 1) / size
    if problem.op.endswith("all_reduce"):
        if config.method in ONE_SHOT:
            traffic *= size
        elif config.method == "multimem":  # the switch adds: one reduced part in, the sums out
            traffic = problem.payload * (1 + 1 / size)
        else:
            traffic *= 2
    bandwidth = device.link
    if method.on_processors and config.senders:
        bandwidth *= min(1.0, config.senders / SENDERS)
    launches = 0.0 if method.on_processors else GPU_LAUNCH * (size - 1)
    return max(traffic * method.factor / bandwidth, launches) + method.hops * HOP


def compute_time(problem: Problem, config: Config, device: Gpu) -> float:
    """Estimate the seconds for the product alone, on the processors without senders."""
    if not problem.multiplies:
        return 0.0
    rows = -(-problem.rows // problem.parts)
    tiles = problem.parts * -(-rows // config.block_m) * -(-problem.n // config.block_n)
    processors = max(1, device.processors - config.senders)
    area = config.block_m * config.block_n
    loaded = (config.block_m + config.block_n) * config.block_k * problem.itemsize
    flops = device.flops * 2 / problem.itemsize  # half the bytes, twice the rate
    step = max(
        2 * area * config.block_k * device.processors / flops,
        loaded * device.processors / device.l2,
        MEMORY_LATENCY / max(1, config.stages - 1),
    )
    tile = -(-problem.k // config.block_k) * (step + STEP) + MEMORY_LATENCY
    weights = problem.groups * problem.k * problem.n
    arrays = problem.rows * problem.k + weights + problem.rows * problem.n
    return max(-(-tiles // processors) * tile, arrays * problem.itemsize / device.memory)


def attention_time(problem: Problem, config: Config, device: Gpu) -> float:
    """Estimate the seconds for attention. A block of keys is a step, like BLOCK_K in a product."""
    of_rank = -(-problem.rows // problem.world_size) if problem.payload else problem.rows
    requests, queries = (problem.rows, 1) if problem.decodes else (1, of_rank)
    splits, width = max(1, config.splits), 1 << (problem.k - 1).bit_length()
    tiles = requests * -(-queries * problem.top_k // config.block_m) * problem.groups * splits
    processors = max(1, device.processors - config.senders)
    flops = device.flops * 2 / max(2, problem.itemsize)  # narrower keys are cast
    step = max(
        4 * config.block_m * config.block_n * width * device.processors / flops,
        2 * config.block_n * width * problem.itemsize * device.processors / device.l2,
        MEMORY_LATENCY / max(1, config.stages - 1),
    )
    tile = -(-problem.n // (config.block_n * splits)) * (step + STEP) + MEMORY_LATENCY
    loads = 1 if problem.op == "mla_decode_attention" else 2  # latents are keys and values
    read = loads * requests * problem.groups * problem.n * problem.k * problem.itemsize
    total = max(-(-tiles // processors) * tile, read / device.memory)
    if splits > 1:  # writes float32 parts, and reads them for the merge
        parts = problem.rows * problem.groups * problem.top_k * problem.k * splits
        total += GPU_LAUNCH + 2 * 4 * parts / device.memory
    return total


@functools.lru_cache(maxsize=1 << 12)
def best_splits(problem: Problem, config: Config, device: Gpu) -> int:
    """Return the number of splits for decode attention that takes the fewest seconds.

    With more splits, more processors share the keys, but the parts must be merged. At equal cost,
    fewer splits win.

    Args:
        problem: the batch; each tile of queries counts as one row.
        config: the tile; its splits do not count.
        device: the GPU.
    """
    costs = {
        splits: attention_time(problem, replace(config, splits=splits), device)
        for splits in split_counts(problem)
    }
    best = min(costs, key=costs.__getitem__)
    logger.debug(
        "%s: %d programs share the keys of each tile, for %d rows with %d keys, %d KV heads: %s",
        *(problem.op, best, problem.rows, problem.n, problem.groups),
        ", ".join(f"{splits} take {cost * 1e6:.3g} us" for splits, cost in costs.items()),
    )
    return best


def exchange_time(problem: Problem, config: Config, device: Gpu) -> float:
    """Estimate the seconds to send tokens and place them, in chunks with block_m tokens.

    Before a program places a chunk, it reads the number of tokens for each expert in each chunk.
    With many small chunks it reads more. With few large chunks some processors have no work.
    """
    tokens = -(-problem.rows // (problem.top_k * problem.world_size))
    chunks = problem.world_size * -(-tokens // config.block_m)
    row = problem.n * problem.itemsize
    counts = chunks * -(-problem.groups // problem.world_size) * 4
    send = config.block_m * 2 * row / device.memory
    place = config.block_m * 2 * row / device.memory + counts / device.l2
    rounds = -(-chunks // device.processors)
    return rounds * (device.processors * (send + place) + 2 * MEMORY_LATENCY)


def cost(problem: Problem, config: Config, device: Gpu) -> float:
    """Estimate the seconds for one call."""
    link = link_time(problem, config, device)
    if problem.attends:
        alone = attention_time(problem, config, device)
        return max(alone, link + alone / problem.world_size if link else 0.0) + GPU_LAUNCH
    if problem.op == "moe_dispatch":
        return link + exchange_time(problem, config, device) + 3 * GPU_LAUNCH
    compute = compute_time(problem, config, device)
    size = problem.world_size
    if problem.multiplies and PAYLOADS[problem.op] == "input":
        total = max(compute, link + compute / size)
    elif problem.op.endswith("matmul_reduce_scatter"):
        total = max(compute, compute / size + link)
    elif problem.op == "matmul_all_reduce":
        total = compute + link  # few rows: all tiles finish at about the same time
    else:
        total = link + compute  # one of the two is 0
    if problem.op == "grouped_matmul_reduce_scatter":  # the rows are written, and read to be added
        total += 2 * problem.rows * problem.n * problem.itemsize / device.memory
    if "reduce" in problem.op:  # reads the parts, and writes their sum
        parts = size if problem.op.endswith("all_reduce") and config.method in ONE_SHOT else 1
        total += problem.payload * parts * (1 + 1 / size) / device.memory
    return total + 3 * GPU_LAUNCH


TILES = (
    *((16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128), (64, 256)),
    *((128, 64), (128, 128), (128, 256), (256, 128)),
)
BLOCKS_K = (32, 64, 128)
STAGES = (2, 3, 4, 5)
WARPS = (4, 8)
SENDER_COUNTS = (SENDERS // 2, SENDERS, 2 * SENDERS)
MAX_ACCUMULATORS = 128
"""Maximum number of accumulators in a thread's registers; more would spill."""
FEW_ACCUMULATORS = 64
"""Maximum number of accumulators if a row in a block along K has more than 128 bytes. More would
spill."""
APART = ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter")
"""Ops whose rows are not contiguous: the addresses of the rows take registers, too."""

ATTENTION_M, ATTENTION_N = (16, 64, 128), (16, 32, 64, 128)
ATTENTION_STAGES = (1, 2, 3, 4)
SPLITS = (1, 2, 4, 8, 16, 32, 64)
ATTENTION_ACCUMULATORS = 96
"""Maximum number of sums and scores in a thread's registers in attention."""
FEW_ATTENTION_ACCUMULATORS = 80
"""The same maximum if the kernel also counts tokens from several ranks (`choose_part_tile`)."""
ATTENTION_BLOCK = 8192
"""Maximum number of elements in a block of keys that fit AMD's registers with 64 rows or more."""

CHUNKS = (4, 8, 16, 32)
"""Numbers of tokens with a common signal in moe_dispatch."""
MAX_CHOICES = 512
"""Maximum number of (token, expert) pairs in a chunk. A program keeps their slots in registers."""


def space(problem: Problem, device: Gpu, methods: Sequence[str]) -> list[Config]:
    """List every configuration that fits the device, the cheapest first. The order is total.

    At equal cost, configurations near the usual one come first. The usual one has 8 warps for tiles
    with 128 rows or more, else 4 warps, and 3 stages (2 on AMD).

    Args:
        methods: methods that the op has; keys in `METHODS`.

    Raises:
        KernelError: a method is unknown, or no tile fits.
    """
    if unknown := [name for name in methods if name not in METHODS]:
        raise KernelError(
            f"{problem.op}: method is {unknown[0]!r}; it must be one of {', '.join(METHODS)}"
        )
    tiles = [(0, 0, 0, 0, 0)]
    if problem.multiplies:
        tiles = _tiles(problem, device)
    elif problem.attends:
        tiles = _attention_tiles(problem, device)
    elif problem.op == "moe_dispatch":
        tiles = [(chunk, 0, 0, 0, 0) for chunk in _chunks(problem)]
    sends = problem.op in SENDING and problem.world_size > 1
    configs = [
        Config(method, *tile, senders, splits)
        for method in methods
        for tile in tiles
        for senders in (SENDER_COUNTS if sends else (0,))
        for splits in (split_counts(problem) if problem.decodes else (0,))
    ]
    if not configs:
        raise KernelError(f"{problem.op}: no tile fits {device.shared} bytes of shared memory")
    usual_stages = 2 if device.target.startswith("gfx") else 3  # AMD: next block in registers

    def order(config: Config) -> tuple[float, bool, int, Config]:
        unusual = config.warps != (8 if config.block_m >= 128 else 4)
        away = abs(config.stages - usual_stages)
        return (cost(problem, config, device), unusual, away, config)

    return sorted(configs, key=order)


def _tiles(problem: Problem, device: Gpu) -> list[tuple[int, int, int, int, int]]:
    """List (block_m, block_n, block_k, stages, warps) that fit and suit the problem's size."""
    most_m = max(16, 2 * -(-problem.rows // problem.parts) - 1)
    return [
        (m, n, k, stages, warps)
        for m, n in TILES
        for k in BLOCKS_K
        for stages in STAGES
        for warps in WARPS
        if m <= most_m
        and (m + n) * k * stages * problem.itemsize <= device.shared
        and _has_registers(problem, device, m * n / (32 * warps), m, k, stages)
    ]


def _has_registers(
    problem: Problem, device: Gpu, accumulators: float, m: int, k: int, stages: int
) -> bool:
    """Tell if no register spills. The limits come from `weft check aot --all`."""
    if problem.op in APART:
        row = k * max(2, problem.itemsize)
        narrow = k == min(BLOCKS_K) or row <= (128 if m >= 64 else 64)
        most_stages = 2 if device.target == "sm_100" and m >= 128 and row > 64 else 3
        return narrow and stages <= most_stages and accumulators <= FEW_ACCUMULATORS
    few = accumulators <= FEW_ACCUMULATORS or k * problem.itemsize <= 128
    return few and accumulators <= MAX_ACCUMULATORS


def _attention_tiles(problem: Problem, device: Gpu) -> list[tuple[int, int, int, int, int]]:
    """List the same tuples for attention, with block_k = 0."""
    if problem.op == "mla_decode_attention":
        return _latent_tiles(problem, device)
    queries = 1 if problem.decodes else problem.rows
    most_m = max(16, 2 * queries * problem.top_k - 1)
    lowest = next(m for m in ATTENTION_M if m >= min(problem.top_k, ATTENTION_M[-1]))
    width = 1 << (problem.k - 1).bit_length()
    block = 2 * width * max(2, problem.itemsize)  # key and value bytes for each of n tokens
    fewest = (lowest, ATTENTION_N[0], WARPS[-1])
    most = ATTENTION_ACCUMULATORS
    if problem.payload and width > 64 and device.target in ("sm_100", "gfx942"):
        most = FEW_ATTENTION_ACCUMULATORS
    return [
        (m, n, 0, stages, warps)
        for m in ATTENTION_M
        for n in ATTENTION_N
        for stages in ATTENTION_STAGES
        for warps in WARPS
        if m == lowest or lowest < m <= most_m
        if n * block * stages <= device.shared
        if m < 64 or n * width <= ATTENTION_BLOCK or not device.target.startswith("gfx")
        if (m, n, warps) == fewest or m * (width + n) <= 32 * warps * most
    ]


def _latent_tiles(problem: Problem, device: Gpu) -> list[tuple[int, int, int, int, int]]:
    """List the same tuples for latent attention.

    They leave registers for a row's R sums, as in `choose_latent_tile`.
    """
    amd, cast = device.target.startswith("gfx"), problem.itemsize == 1
    most = 256 if amd and problem.itemsize == 4 else 512
    wide = latent_rank(problem.k) * max(1, problem.itemsize // 2) > most
    tiles = [(16, 16, 4)]
    if not wide and not cast:
        tiles += [(16, 32, 4), (64, 16, 8)]
    elif not wide and not amd:
        tiles.append((32, 16, 8))
    return [
        (m, n, 0, stages, warps)
        for m, n, warps in tiles
        for stages in ((1,) if amd else ATTENTION_STAGES[:2])
        if m == 16 or m < 2 * problem.top_k
        if n * problem.k * max(2, problem.itemsize) * stages <= device.shared
    ]


def latent_rank(k: int) -> int:
    """Return R for a latent with k = R + P elements: k rounded down to a power of two, max. 512."""
    return min(512, 1 << (k.bit_length() - 1))


def split_counts(problem: Problem) -> list[int]:
    """List the numbers of splits to compare: powers of two, with at least 64 keys in a split."""
    return [splits for splits in SPLITS if splits == 1 or splits * 64 <= problem.n]


def _chunks(problem: Problem) -> list[int]:
    tokens = -(-problem.rows // (problem.top_k * problem.world_size))
    choices = 1 << (problem.top_k - 1).bit_length()
    return [
        chunk
        for chunk in CHUNKS
        if chunk == CHUNKS[0] or (chunk < 2 * tokens and chunk * choices <= MAX_CHOICES)
    ]
