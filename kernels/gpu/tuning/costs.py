"""The predicted cost of an overlapped op: a roofline of compute, links and launches.

    tiles        the product takes waves of tiles, a tile takes steps of BLOCK_K; a step takes the
                 maximum of its arithmetic, its loads, and the memory latency divided by the stages
                 that hide it, plus a small loop overhead
    link         the bytes that a rank receives (or sends, if more) over its link, times the
                 method's overhead, plus its signals' latency
    overlap      the longer of the two, plus work that cannot be hidden: an all-gather multiplies
                 the last shard after it has arrived; a reduce-scatter computes the first tile
                 before any tile leaves

The costs of collectives are those of "How to Scale Your Model" (Austin et al. 2025, part 3): an
all-gather or reduce-scatter moves the whole array once over the link, an all-reduce twice, for any
number of ranks. Below a hop's latency they cost that latency. The model orders candidates for
tuning (search.py) and chooses where nothing was tuned. It ignores contention between communication
and compute, and power limits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from weft.kernels.gpu.runtime.arguments import KernelError

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


class Config(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """The configuration of an op. Equal on all ranks.

    Attributes:
        method: the way data travels; from `METHODS`.
        block_m, block_n, block_k: sides of a tile; 0 in ops without a product. Attention has no
            block_k. For moe_dispatch, block_m is the number of tokens per signal.
        stages, warps: for compiling the kernel that multiplies; 0 in ops without a product.
        senders: programs that only send, in ops that have them; 0 for the op's own choice.
        splits: programs that share the keys of a tile, in decode attention; 0 elsewhere.
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
        op: a key of `PAYLOADS`.
        rows: M of all ranks together, as they are multiplied.
        n, k: of the weight on one rank; for ops without a product n is the width of a row, k is 0.
        dtype: of the operands, by its torch name.
        groups: number of groups of rows with their own weights: experts, or KV heads.
        top_k: how often a row is multiplied, by weights of different groups; or query heads that
            share a KV head.

    For attention, rows are the queries of the longest request, of all requests if they decode, or
    of all ranks (sequence_parallel_attention); n is the number of keys of the longest request; k is
    the size of a head, or of a latent (mla_decode_attention: `latent_rank`); dtype is the cache's.
    For moe_dispatch, each token counts as one row per expert.
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
        """The bytes of the whole array that is gathered or reduced; in moe_dispatch the maximum
        that a rank receives.
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
        """The number of parts of the rows that begin a new tile: one per rank, or per group."""
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
"""Whether each op's product sends its input or its output; the output in ops without a product."""

SENDING = (
    *("all_gather_matmul", "all_gather_grouped_matmul", "grouped_matmul_reduce_scatter"),
    "sequence_parallel_attention",
)
"""Ops with programs that only send."""


@dataclass(frozen=True, slots=True)
class Method:
    """The cost of a way to communicate.

    Attributes:
        factor: bytes on the link for each byte of data.
        hops: consecutive latencies.
        on_processors: programs of the GPU move the data.
    """

    factor: float = 1.0
    hops: int = 1
    on_processors: bool = True


METHODS = {
    "push": Method(hops=2),  # the data, then its signal
    "pull": Method(hops=3),  # the announcement, the request, the data
    "copy_engine": Method(hops=2, on_processors=False),
    "ll": Method(factor=2.0),  # 4 bytes of data and 4 of flag per store (NCCL's LL)
    "ll128": Method(factor=128 / 120),  # 8 bytes of flag in 128 (NCCL's LL128)
    "multimem": Method(hops=2),
    "one_shot": Method(hops=2),
    "two_shot": Method(hops=4),
    "local": Method(factor=0.0, hops=0),  # within one rank
}
ONE_SHOT = ("one_shot", "ll")
"""All-reduce methods in which every rank receives all data of every other rank."""


@dataclass(frozen=True, slots=True)
class Device:
    """Figures of one GPU, in bytes, seconds and operations per second.

    Attributes:
        name: part of the driver's name for it.
        target: the target of check/aot.py.
        flops: dense, with 2-byte operands.
        memory, l2: bandwidth.
        link: bandwidth to the other GPUs of the node, in one direction.
        processors: SMs or CUs.
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


# Peaks as the makers publish them (data sheets: NVIDIA A100 80 GB SXM, H100 SXM, H200 SXM, DGX
# B200; AMD Instinct MI300X), NVLink and Infinity Fabric halved to one way; shared memory from
# CUDA's programming guide (compute capability table) and AMD's CDNA 3 paper. L2 is published by
# nobody: read bandwidths that microbenchmarks report (Chips and Cheese), rounded.
DEVICES = (
    Device("A100", "sm_80", 312e12, 2.0e12, 4.5e12, 300e9, 108, 163 << 10),
    Device("H100", "sm_90", 989e12, 3.35e12, 5.5e12, 450e9, 132, 227 << 10),
    Device("H200", "sm_90", 989e12, 4.8e12, 5.5e12, 450e9, 132, 227 << 10),
    Device("B200", "sm_100", 2250e12, 8.0e12, 9.0e12, 900e9, 148, 227 << 10),
    Device("MI300X", "gfx942", 1307e12, 5.3e12, 10.0e12, 448e9, 304, 64 << 10),
)
UNKNOWN = DEVICES[1]

HOP = 1e-6  # "How to Scale Your Model", part 3: about 1 us a hop, on ICI and NVLink alike
LAUNCH = 4e-6  # for a kernel or a copy that follows another; assumed
MEMORY_LATENCY = 0.7e-6  # for a load that misses L2; assumed
STEP = 20e-9  # overhead of a step along K: a barrier, addresses, a branch; assumed
SATURATING_SENDERS = 16  # programs that fill a link; assumed (DeepEP gives 20 to all traffic)


def device_named(name: str) -> Device:
    """Return the figures of a GPU by its driver's name; an H100's for an unknown GPU."""
    return next((device for device in DEVICES if device.name in name), UNKNOWN)


def device_for(target: str) -> Device:
    """Return the figures of the first GPU with this target of check/aot.py."""
    return next(device for device in DEVICES if device.target == target)


def link_time(problem: Problem, config: Config, device: Device) -> float:
    """Return the seconds until all data has arrived, if nothing else ran."""
    size, method = problem.world_size, METHODS[config.method]
    if size == 1 or not problem.payload:
        return 0.0
    traffic = float(problem.payload) * (size - 1) / size
    if problem.op.endswith("all_reduce"):
        if config.method in ONE_SHOT:
            traffic *= size
        elif config.method == "multimem":  # the switch adds: one reduced part in, the sums back
            traffic = problem.payload * (1 + 1 / size)
        else:
            traffic *= 2
    bandwidth = device.link
    if method.on_processors and config.senders:
        bandwidth *= min(1.0, config.senders / SATURATING_SENDERS)
    launches = 0.0 if method.on_processors else LAUNCH * (size - 1)
    return max(traffic * method.factor / bandwidth, launches) + method.hops * HOP


def compute_time(problem: Problem, config: Config, device: Device) -> float:
    """Return the seconds of the product alone, on the processors that communication leaves."""
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


def attention_time(problem: Problem, config: Config, device: Device) -> float:
    """Return the seconds of attention, with a product's steps: a block of keys counts as one
    BLOCK_K.
    """
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
        total += LAUNCH + 2 * 4 * parts / device.memory
    return total


def exchange_time(problem: Problem, config: Config, device: Device) -> float:
    """Return the seconds for sending and placing tokens, in chunks of block_m tokens.

    Before it places a chunk, a program reads each chunk's number of tokens for each expert. With
    many small chunks it reads more. With few large ones there are not enough for all processors.
    """
    tokens = -(-problem.rows // (problem.top_k * problem.world_size))
    chunks = problem.world_size * -(-tokens // config.block_m)
    row = problem.n * problem.itemsize
    counts = chunks * -(-problem.groups // problem.world_size) * 4
    send = config.block_m * 2 * row / device.memory
    place = config.block_m * 2 * row / device.memory + counts / device.l2
    rounds = -(-chunks // device.processors)
    return rounds * (device.processors * (send + place) + 2 * MEMORY_LATENCY)


def cost(problem: Problem, config: Config, device: Device) -> float:
    """Return the seconds of one call."""
    link = link_time(problem, config, device)
    if problem.attends:
        alone = attention_time(problem, config, device)
        return max(alone, link + alone / problem.world_size if link else 0.0) + LAUNCH
    if problem.op == "moe_dispatch":
        return link + exchange_time(problem, config, device) + 3 * LAUNCH
    compute = compute_time(problem, config, device)
    size = problem.world_size
    if problem.multiplies and PAYLOADS[problem.op] == "input":
        total = max(compute, link + compute / size)
    elif problem.op.endswith("matmul_reduce_scatter"):
        total = max(compute, compute / size + link)
    elif problem.op == "matmul_all_reduce":
        total = compute + link  # few rows: the tiles finish at about the same time
    else:
        total = link + compute  # of which it has one
    if problem.op == "grouped_matmul_reduce_scatter":  # writes the rows, and reads them for the sum
        total += 2 * problem.rows * problem.n * problem.itemsize / device.memory
    if "reduce" in problem.op:  # reads the parts, and writes their sum
        parts = size if problem.op.endswith("all_reduce") and config.method in ONE_SHOT else 1
        total += problem.payload * parts * (1 + 1 / size) / device.memory
    return total + 3 * LAUNCH


TILES = (
    *((16, 64), (16, 128), (32, 64), (32, 128), (64, 64), (64, 128), (64, 256)),
    *((128, 64), (128, 128), (128, 256), (256, 128)),
)
BLOCKS_K = (32, 64, 128)
STAGES = (2, 3, 4, 5)
WARPS = (4, 8)
SENDERS = (0, 8, 16, 32)
MAX_ACCUMULATORS = 128
"""Maximum numbers of the result that one thread keeps in registers; more would spill."""
FEW_ACCUMULATORS = 64
"""Maximum number with which blocks of K may exceed 128 bytes per row; more would spill too."""
APART = ("all_gather_grouped_matmul", "grouped_matmul_reduce_scatter")
"""Ops that multiply rows which are apart: the address of each row takes registers too."""

ATTENTION_M, ATTENTION_N = (16, 64, 128), (16, 32, 64, 128)
ATTENTION_STAGES = (1, 2, 3, 4)
SPLITS = (1, 2, 4, 8, 16, 32, 64)
ATTENTION_ACCUMULATORS = 96
"""Maximum sums and scores that one thread of attention keeps in registers."""
FEW_ATTENTION_ACCUMULATORS = 80
"""The same if tokens of several ranks are counted beside them (`choose_part_tile`)."""
ATTENTION_BLOCK = 8192
"""Maximum numbers in a block of keys for AMD's registers, beside 64 rows or more."""

CHUNKS = (4, 8, 16, 32)
"""Tokens of moe_dispatch per signal."""
MAX_CHOICES = 512
"""Maximum choices of a chunk's tokens, whose slots a program keeps in registers."""


def space(problem: Problem, device: Device, methods: Sequence[str]) -> list[Config]:
    """Return every configuration that fits the device, the cheapest first; the order is total.

    Equal costs are ordered by their distance from what suits most products: 8 warps for tiles of
    128 rows or more and 4 for others, 3 blocks of K in shared memory.

    Args:
        methods: the op's methods, from `METHODS`.

    Raises:
        KernelError: a method is unknown, or nothing fits.
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
    configs = [
        Config(method, *tile, senders, splits)
        for method in methods
        for tile in tiles
        for senders in (SENDERS if problem.op in SENDING else (0,))
        for splits in (_splits(problem) if problem.decodes else (0,))
    ]
    if not configs:
        raise KernelError(f"{problem.op}: no tile fits {device.shared} bytes of shared memory")
    usual_stages = 2 if device.target.startswith("gfx") else 3  # AMD keeps the next in registers

    def order(config: Config) -> tuple[float, bool, int, Config]:
        unusual = config.warps != (8 if config.block_m >= 128 else 4)
        away = abs(config.stages - usual_stages)
        return (cost(problem, config, device), unusual, away, config)

    return sorted(configs, key=order)


def _tiles(problem: Problem, device: Device) -> list[tuple[int, int, int, int, int]]:
    """Return fitting block_m, block_n, block_k, stages and warps, none much larger than the
    problem.
    """
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
    problem: Problem, device: Device, accumulators: float, m: int, k: int, stages: int
) -> bool:
    """Return whether nothing spills, according to a compilation of all tiles (`weft check aot
    --all`).
    """
    if problem.op in APART:
        row = k * max(2, problem.itemsize)
        narrow = k == min(BLOCKS_K) or row <= (128 if m >= 64 else 64)
        most_stages = 2 if device.target == "sm_100" and m >= 128 and row > 64 else 3
        return narrow and stages <= most_stages and accumulators <= FEW_ACCUMULATORS
    few = accumulators <= FEW_ACCUMULATORS or k * problem.itemsize <= 128
    return few and accumulators <= MAX_ACCUMULATORS


def _attention_tiles(problem: Problem, device: Device) -> list[tuple[int, int, int, int, int]]:
    """Return the same for attention, whose block_k is 0."""
    if problem.op == "mla_decode_attention":
        return _latent_tiles(problem, device)
    queries = 1 if problem.decodes else problem.rows
    most_m = max(16, 2 * queries * problem.top_k - 1)
    lowest = next(m for m in ATTENTION_M if m >= min(problem.top_k, ATTENTION_M[-1]))
    width = 1 << (problem.k - 1).bit_length()
    block = 2 * width * max(2, problem.itemsize)  # of keys and values, for each of n
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


def _latent_tiles(problem: Problem, device: Device) -> list[tuple[int, int, int, int, int]]:
    """Return the same for latents, with registers left for R sums of a row, like
    `choose_latent_tile`.
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
    """Return R for a latent of k = R + P numbers: the largest power of two up to k, at most 512."""
    return min(512, 1 << (k.bit_length() - 1))


def _splits(problem: Problem) -> list[int]:
    """Return numbers of splits with at least 64 keys each."""
    return [splits for splits in SPLITS if splits == 1 or splits * 64 <= problem.n]


def _chunks(problem: Problem) -> list[int]:
    tokens = -(-problem.rows // (problem.top_k * problem.world_size))
    choices = 1 << (problem.top_k - 1).bit_length()
    return [
        chunk
        for chunk in CHUNKS
        if chunk == CHUNKS[0] or (chunk < 2 * tokens and chunk * choices <= MAX_CHOICES)
    ]
