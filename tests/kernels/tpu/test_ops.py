"""Every op against its oracle in the strict interpreter, and compiled for real TPUs."""

from __future__ import annotations

import math

import pytest

from weft.kernels.check.tpu.case import Case
from weft.kernels.check.tpu.cases import INTERPRETED, TOPOLOGIES, compiled, named
from weft.kernels.check.tpu.process import Workers

QUICK = {
    "permute x=2": "eager",
    "all_gather x=8": "on_wait",
    "all_gather x=2,y=2": "eager",
    "reduce_scatter x=4": "on_wait",
    "all_reduce x=4": "eager",
    "all_to_all x=2,y=2": "on_wait",
    "all_gather_matmul x=4": "eager",
    "all_gather_matmul x=2,y=2": "on_wait",
    "matmul_reduce_scatter x=4": "on_wait",
    "ragged_paged_attention x=1 window": "on_wait",
    "ragged_paged_attention x=1 64 numbers a head": "eager",
    "distributed_decode_attention x=2": "eager",
    "distributed_decode_attention x=4 window": "on_wait",
    "write_pages x=1": "on_wait",
    "grouped_gate_up x=2": "eager",
    "moe_dispatch x=2": "on_wait",
    "moe_combine x=2": "eager",
}
"""What the default run interprets; the rest is slow."""

RUNS = [
    pytest.param(case.name, mode, marks=() if QUICK.get(case.name) == mode else pytest.mark.slow)
    for case in INTERPRETED
    for mode in ("eager", "on_wait")
]


def compiles_by_default(case: Case, topology: str) -> bool:
    """For one kind of TPU, over one axis, and over two the ops that have other kernels there; not
    moe_combine's case, which is moe_dispatch and grouped_matmul once more.
    """
    torus = case.op in ("reduce_scatter", "all_gather")
    wanted = case.op != "moe_combine" and (len(case.axes) == 1 or torus)
    return topology == "v5e:2x4" and wanted


COMPILATIONS = [
    pytest.param(
        case.name,
        topology,
        marks=() if compiles_by_default(case, topology) else pytest.mark.slow,
    )
    for topology in TOPOLOGIES
    for case in compiled(topology)
]


def test_names_tell_cases_apart() -> None:
    assert set(QUICK) <= {case.name for case in INTERPRETED}
    for cases in (INTERPRETED, *map(compiled, TOPOLOGIES)):
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize(("case", "mode"), RUNS)
def test_equals_its_oracle_without_races(interpreter: Workers, case: str, mode: str) -> None:
    assert interpreter.ask({"case": case, "mode": mode})["findings"] == []


def test_writing_to_a_cache_does_not_copy_it(compiler: Workers) -> None:
    case = named("write_pages x=8", "v5e:2x4")
    cache = 2 * math.prod(case.inputs[0].shape)
    outcome = compiler.ask({"case": case.name, "topology": "v5e:2x4"})
    assert outcome["findings"] == []
    assert outcome["temporary_bytes"] + outcome["bytes_accessed"] < cache / 10


@pytest.mark.parametrize(("case", "topology"), COMPILATIONS)
def test_compiles_for_a_tpu(compiler: Workers, case: str, topology: str) -> None:
    outcome = compiler.ask({"case": case, "topology": topology})
    assert outcome["findings"] == []
    assert outcome["flops"] + outcome["bytes_accessed"] > 0
