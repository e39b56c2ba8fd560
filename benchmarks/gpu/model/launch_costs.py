"""Seconds of a recorded launch, by the kernels' cost model (kernels/gpu/tuning/costs.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor

from model.recorded import Launch
from weft.kernels.devices import HOP
from weft.kernels.gpu.tuning.costs import (
    MEMORY_LATENCY,
    Config,
    Gpu,
    Problem,
    attention_time,
    compute_time,
    link_time,
)

Kind = Literal["products", "attention", "exchange", "other"]

IN_GRAPH = 1.2e-6
"""Seconds from a kernel's end to the next one's begin in a CUDA graph; assumed."""

EAGER = 50e-6
"""Seconds of Python for a launch without a graph: checks, Triton's launcher, torch; assumed."""

TORCH_MEMORY, TORCH_FLOPS, TORCH_TAIL = 0.85, 0.75, 1.5e-6
"""torch's products: shares of the bandwidth and of the arithmetic, and seconds more; assumed."""

FENCE, POLL = 1.2e-6, 0.5e-6
"""Seconds of a release at system scope behind stores over NVLink, and of a wait for a signal that
is set; assumed."""


@dataclass(frozen=True)
class Cost:
    """A launch's cost.

    Attributes:
        kind: the column of the table.
        seconds: on the device, without the launch itself.
        exposed: seconds of it in which ranks only exchange.
    """

    kind: Kind
    seconds: float
    exposed: float = 0.0


class Batch(NamedTuple):
    """A rank's decodes.

    Attributes:
        users: their number.
        context: tokens of each.
        top_k: experts of a token; 1 without experts.
        hidden: numbers of a token between layers.
    """

    users: int
    context: int
    top_k: int
    hidden: int


def cost_of(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Return a launch's cost."""
    if launch.is_torch and launch.name == "linear":
        return _torch_product(launch, gpu)
    known = COSTS.get(launch.name)
    if known is not None and not launch.is_torch:
        return known(launch, gpu, batch)
    seconds = max(_bytes(launch) / gpu.memory, 2 * MEMORY_LATENCY)
    return Cost("other", seconds)


def _torch_product(launch: Launch, gpu: Gpu) -> Cost:
    x, w, *_, out = launch.arguments.values()
    flops = 2 * x.shape[0] * w.shape[0] * w.shape[1]
    read = (x.nbytes + w.nbytes + out.nbytes) / (TORCH_MEMORY * gpu.memory)
    return Cost("products", max(read, flops / (TORCH_FLOPS * gpu.flops)) + TORCH_TAIL)


def _product(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    given = launch.arguments
    rows, depth = given["M"], given["K"]
    return Cost("products", _product_time(launch, gpu, rows, sum(given["widths"]), depth))


def _product_time(
    launch: Launch, gpu: Gpu, rows: int, columns: int, depth: int, groups: int = 1
) -> float:
    form, given = launch.arguments["FORM"], launch.arguments
    pair = form.silu and form.weights == 2
    config = Config(
        "local",
        form.block_m,
        form.block_n * (2 if pair else 1),  # gate and up have a tile each
        form.block_k,
        given.get("num_stages", 3),
        given.get("num_warps", 4),
    )
    op = "grouped_matmul" if groups > 1 else "all_gather_matmul"
    return compute_time(Problem(op, 1, rows, columns, depth, groups=groups), config, gpu)


def _all_reduce(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """A product whose tiles go to all ranks, which add them."""
    given = launch.arguments
    rows, columns, depth, world = given["m"], given["N"], given["K"], given["WORLD"]
    product = _product_time(launch, gpu, rows, columns, depth)
    problem = Problem("matmul_all_reduce", world, rows, columns, depth)
    link = link_time(problem, Config("one_shot", 16, 16, 16), gpu)
    exposed = link + FENCE + POLL  # signals leave together, and are read together
    return Cost("products", product + exposed, exposed)


def _pushed(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """A tensor's chunks that go to the other ranks, whole or a part to each."""
    x, numel, world = (launch.arguments[name] for name in ("x", "numel", "WORLD"))
    sent = numel * x.itemsize * (world - 1)
    seconds = max(sent / gpu.link, x.nbytes / gpu.memory) + 2 * MEMORY_LATENCY + FENCE
    return Cost("exchange", seconds, seconds)


def _summed(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Chunks of all ranks that have come, added."""
    out, rows = launch.arguments["out"], launch.arguments["COUNT"]
    seconds = POLL + max((rows + 1) * out.nbytes / gpu.memory, 2 * MEMORY_LATENCY)
    return Cost("exchange", seconds, seconds)


def _summed_and_sent(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """A part of the sum, which goes to all ranks."""
    numel, world, dtype = (launch.arguments[name] for name in ("numel", "WORLD", "dtype"))
    part = numel * dtype.primitive_bitwidth // 8
    moved = max(part * (world - 1) / gpu.link, part * world / gpu.memory)
    seconds = POLL + moved + 2 * MEMORY_LATENCY + FENCE
    return Cost("exchange", seconds, seconds)


def _collected(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Parts that have come, copied."""
    out = launch.arguments["out"]
    seconds = POLL + max(2 * out.nbytes / gpu.memory, 2 * MEMORY_LATENCY)
    return Cost("exchange", seconds, seconds)


def _low_latency(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """An all-reduce of words that carry their own flag: no signal, and no fence."""
    x, world = launch.arguments["x"], launch.arguments["WORLD"]
    seconds = 2 * x.nbytes * (world - 1) / gpu.link + 2 * MEMORY_LATENCY + HOP + POLL
    return Cost("exchange", seconds, seconds)


def _gathered(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    given = launch.arguments
    rows, world = given["m"] * given["WORLD"], given["WORLD"]
    columns, depth = sum(given["widths"]), given["K"]
    product = _product_time(launch, gpu, rows, columns, depth)
    problem = Problem("all_gather_matmul", world, rows, columns, depth)
    link = link_time(problem, Config("push", 16, 16, 16), gpu)
    total = max(product, link + product / world)
    return Cost("products", total, total - product)


def _partial(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    given = launch.arguments
    rows, columns, depth, world = (
        given["m"] * given["WORLD"],
        given["N"],
        given["K"],
        given["WORLD"],
    )
    product = _product_time(launch, gpu, rows, columns, depth)
    problem = Problem("matmul_reduce_scatter", world, rows, columns, depth)
    link = link_time(problem, Config("push", 16, 16, 16), gpu)
    total = max(product, product / world + link)
    return Cost("products", total, total - product)


def _groups(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Experts: only those that get tokens are read, as many as are expected."""
    given = launch.arguments
    weights = [x for x in _tensors(given) if x.dim() == 3]
    experts, depth = weights[0].shape[0], weights[0].shape[1]
    columns = sum(w.shape[2] for w in weights)
    rows = batch.users * batch.top_k  # so many come on average, also from other ranks
    distinct = experts * (1 - (1 - 1 / experts) ** rows)
    groups = max(1, round(distinct))
    return Cost("products", _product_time(launch, gpu, max(rows, groups), columns, depth, groups))


def _dispatched(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Rows of tokens that go to their experts' ranks or come back; a program has one signal."""
    rounds = -(-launch.grid // gpu.processors)
    sent = 2 * batch.users * batch.top_k * batch.hidden
    seconds = max(sent / gpu.link, rounds * (2 * MEMORY_LATENCY + FENCE)) + POLL
    return Cost("exchange", seconds, seconds)


def _placed(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    """Rows of tokens that are copied or added on their rank."""
    moved = 4 * batch.users * batch.top_k * batch.hidden
    rounds = -(-launch.grid // gpu.processors)
    seconds = max(moved / gpu.memory, rounds * 4 * MEMORY_LATENCY) + POLL
    return Cost("exchange", seconds, seconds)


def _attend(launch: Launch, gpu: Gpu, batch: Batch) -> Cost:
    given = launch.arguments
    form, requests = given["FORM"], given["requests"]
    problem = Problem(
        *("decode_attention", 1, requests, batch.context, form.dim),
        groups=form.kv_heads,
        top_k=form.group,
    )
    blocks = (form.block_m, form.block_n, 0)
    config = Config("local", *blocks, given["num_stages"], given["num_warps"], 0, given["SPLITS"])
    return Cost("attention", attention_time(problem, config, gpu))


COSTS: dict[str, Callable[[Launch, Gpu, Batch], Cost]] = {
    "multiply": _product,
    "multiply_all_reduce": _all_reduce,
    "push_chunks": _pushed,
    "reduce_chunks": _summed,
    "reduce_and_send": _summed_and_sent,
    "collect_parts": _collected,
    "reduce_ll": _low_latency,
    "multiply_gathered": _gathered,
    "multiply_partial": _partial,
    "multiply_groups": _groups,
    "attend": _attend,
    "exchange_tokens": _dispatched,
    "return_tokens": _dispatched,
    "place_tokens": _placed,
    "sum_tokens": _placed,
}
"""Kernels with more than a copy's work, by name."""


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif hasattr(value, "base"):  # a TMA descriptor
        yield value.base
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _bytes(launch: Launch) -> int:
    """Bytes that a kernel reads and writes, without caches and tables."""
    skipped = ("cache", "keys", "values", "batch", "peers", "scales")
    given = {name: x for name, x in launch.arguments.items() if name not in skipped}
    found = list(_tensors(given))
    if launch.name == "embedding":  # reads as many rows as it writes
        found = [found[-1], found[-1]]
    return sum(x.nbytes for x in found)
