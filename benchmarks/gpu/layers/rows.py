"""Kernels that go row by row: against a copy of as many bytes, or against torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from harness.report import Case, Figure
from harness.timing import copying, interleaved, ratio
from torch import Tensor

from layers.scale import Rows, Scale
from weft.kernels.cpu.rope import Rotation
from weft.kernels.gpu.experts.routing import sort_by_expert
from weft.kernels.gpu.rowwise.activation import quantize, silu_multiply
from weft.kernels.gpu.rowwise.norm import rms_norm
from weft.kernels.gpu.rowwise.rope import rotate_into_cache
from weft.kernels.gpu.rowwise.sampling import How, draw
from weft.kernels.gpu.tuning.clock import Call

GOAL = 1.2


def rows(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Time over that of a copy, or of torch."""
    for of in scale.rows:
        shape = f"{of.rows} x {of.width}"
        for name, make in MOVERS.items():
            yield Case(f"{name} {shape}", partial(_over_copy, scale, make, of, repetitions))
    for count, columns in scale.logits:
        for name, drawing in (("draw", _draw), (f"draw, top_k {scale.top_k}", _draw_top_k)):
            pair = partial(drawing, scale, count, columns)
            yield Case(f"{name} of {count} x {columns}", partial(_over, scale, pair, repetitions))
    tokens, of_each, experts = scale.sorted
    name = f"sort_by_expert {tokens} x {of_each}, {experts} experts"
    yield Case(name, partial(_over, scale, partial(_sort, scale), repetitions))


def _over_copy(
    scale: Scale, make: Callable[[Scale, Rows], tuple[Call, int]], of: Rows, repetitions: int
) -> Figure:
    call, nbytes = make(scale, of)
    calls = {"ours": call, "copy": copying(nbytes, scale.device)}
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    longer = ratio(times["ours"], times["copy"])
    return Figure(
        *longer,
        goal=f"at most {GOAL}",
        good=None if scale.tiny else longer.value <= GOAL,
        details={
            "us": 1e6 * times["ours"].median,
            "GB/s": 1e-9 * nbytes / times["ours"].median,
            "copy's": 1e-9 * nbytes / times["copy"].median,
        },
    )


def _over(scale: Scale, pair: Callable[[], tuple[Call, Call]], repetitions: int) -> Figure:
    ours, theirs = pair()
    calls = {"ours": ours, "torch": theirs}
    times = interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)
    return Figure(
        *ratio(times["ours"], times["torch"]),
        details={f"us {name}": 1e6 * times[name].median for name in times},
    )


def _rms_norm(scale: Scale, of: Rows) -> tuple[Call, int]:
    x, residual = scale.random(of.rows, of.width), scale.random(of.rows, of.width)
    weight = scale.random(of.width)
    return partial(rms_norm, x, weight, 1e-6, residual=residual), 4 * x.nbytes


def _silu_multiply(scale: Scale, of: Rows) -> tuple[Call, int]:
    x = scale.random(of.rows, 2 * of.width)
    return partial(silu_multiply, x), 3 * x.nbytes // 2


def _quantize(scale: Scale, of: Rows) -> tuple[Call, int]:
    x = scale.random(of.rows, of.width)
    return partial(quantize, x), x.nbytes + x.numel()


def _rotate(scale: Scale, of: Rows) -> tuple[Call, int]:
    qkv = scale.random(of.rows, (of.heads + 2 * of.kv_heads) * of.head_dim)
    block = 16
    cache = (-(-of.rows // block), of.kv_heads, block, of.head_dim)
    keys, values = scale.random(*cache), scale.random(*cache)
    at = torch.arange(of.rows, device=scale.device)
    inv_freq = 1e4 ** (-torch.arange(of.head_dim // 2, device=scale.device) / (of.head_dim // 2))
    rotation = Rotation.of(at, inv_freq, torch.float32)
    call = partial(
        rotate_into_cache,
        *(qkv, rotation, keys, values, at // block, at % block),
        heads=of.heads,
    )
    return call, 2 * qkv.nbytes + 2 * rotation.cos.nbytes


MOVERS = {
    "rms_norm": _rms_norm,
    "silu_multiply": _silu_multiply,
    "quantize": _quantize,
    "rotate_into_cache": _rotate,
}


def _how(scale: Scale, count: int, top_k: int) -> How:
    def numbers(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=scale.device)

    u = torch.arange(count, device=scale.device) * (2**48 // max(1, count))
    floats = (numbers(0.7, torch.float32), numbers(-149.0, torch.float32))
    return How(*floats, numbers(top_k, torch.int32), numbers(0, torch.int64), u)


def _draw(scale: Scale, count: int, columns: int) -> tuple[Call, Call]:
    x = scale.random(count, columns)
    rows = torch.arange(count, dtype=torch.int32, device=scale.device)
    how = _how(scale, count, columns)
    return partial(draw, x, rows, how), lambda: x.float().softmax(1).multinomial(1)


def _draw_top_k(scale: Scale, count: int, columns: int) -> tuple[Call, Call]:
    x, k = scale.random(count, columns), min(scale.top_k, columns)
    rows = torch.arange(count, dtype=torch.int32, device=scale.device)

    def theirs() -> Tensor:
        values, ids = x.topk(k)
        return ids.gather(1, values.float().softmax(1).multinomial(1))

    return partial(draw, x, rows, _how(scale, count, k)), theirs


def _sort(scale: Scale) -> tuple[Call, Call]:
    """torch has no op for it: a stable sort, where it puts each pair, and where experts begin."""
    tokens, of_each, experts = scale.sorted
    ids = torch.rand(tokens, experts, device=scale.device).topk(of_each).indices.int()
    first = torch.arange(experts + 1, dtype=torch.int32, device=scale.device)

    def theirs() -> tuple[Tensor, ...]:
        values, order = ids.flatten().sort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return torch.searchsorted(values, first), order, inverse

    return partial(sort_by_expert, ids, experts), theirs
