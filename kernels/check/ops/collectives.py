"""Check entries for collectives, which only move and add."""

from __future__ import annotations

from weft.kernels import reference
from weft.kernels.check.ops.op import HOPPER, NVIDIA, Op, node_size
from weft.kernels.gpu.collectives.all_gather import METHODS as GATHERS
from weft.kernels.gpu.collectives.all_gather import all_gather, all_gather_workspace
from weft.kernels.gpu.collectives.all_reduce import METHODS as REDUCES
from weft.kernels.gpu.collectives.all_reduce import all_reduce, all_reduce_workspace
from weft.kernels.gpu.collectives.reduce_scatter import METHODS as SCATTERS
from weft.kernels.gpu.collectives.reduce_scatter import reduce_scatter, reduce_scatter_workspace

METHOD_TARGETS = {"ll128": NVIDIA, "multimem": HOPPER}


def _whole_units(numel: int) -> int:
    """Round up to whole units of 16 bytes."""
    return -(-numel // 8) * 8


def _name(op: str, method: str, far: bool) -> str:
    return op + (f"_{method}" if method != "push" else "") + ("_far" if far else "")


def _all_gather(method: str, *, far: bool = False) -> Op:
    return Op(
        _name("all_gather", method, far),
        all_gather,
        reference.all_gather,
        lambda s: [(s.m, _whole_units(s.k))],
        lambda home, s: all_gather_workspace(
            home,
            s.m * _whole_units(s.k),
            s.dtype,
            [method],
            ranks_per_node=node_size(s.world),
            **s.chunks,
        ),
        options={} if method == "push" else {"method": method},
        targets=NVIDIA if far else METHOD_TARGETS.get(method, ()),
        far=far,
    )


def _reduce_scatter(method: str, *, far: bool = False) -> Op:
    return Op(
        _name("reduce_scatter", method, far),
        reduce_scatter,
        reference.reduce_scatter,
        lambda s: [(s.world * s.m, s.k)],
        lambda home, s: reduce_scatter_workspace(
            home, s.m * s.k, s.dtype, [method], ranks_per_node=node_size(s.world), **s.chunks
        ),
        options={"method": method},
        targets=NVIDIA if far else (),
        far=far,
    )


def _all_reduce(method: str) -> Op:
    return Op(
        f"all_reduce_{method}",
        all_reduce,
        reference.all_reduce,
        lambda s: [(s.m, _whole_units(s.k))],
        lambda home, s: all_reduce_workspace(
            home, s.m * _whole_units(s.k), s.dtype, [method], **s.chunks
        ),
        options={"method": method},
        targets=METHOD_TARGETS.get(method, ()),
    )


COLLECTIVES = (
    *(_all_gather(method) for method in GATHERS),
    *(_reduce_scatter(method) for method in SCATTERS),
    _all_gather("two_level", far=True),
    _reduce_scatter("two_level", far=True),
    *(_all_reduce(method) for method in REDUCES),
)
