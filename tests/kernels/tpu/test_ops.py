"""Every op against its oracle in the strict interpreter, and compiled for real TPUs."""

from __future__ import annotations

import math

import pytest

from weft.kernels.check.tpu.cases import INTERPRETED, TOPOLOGIES, compiled, named
from weft.kernels.check.tpu.process import Workers

QUICK = {
    "permute x=2": "eager",
    "all_gather x=2,y=2": "eager",
    "reduce_scatter x=4": "on_wait",
    "all_reduce x=2": "eager",
    "all_to_all x=2,y=2": "on_wait",
    "all_gather_matmul x=2": "on_wait",
    "matmul_reduce_scatter x=2": "eager",
    "ragged_paged_attention x=1 window": "on_wait",
    "ragged_paged_attention x=1 pages of 1024": "on_wait",
    "distributed_decode_attention x=2": "on_wait",
    "write_pages x=1": "on_wait",
    "grouped_gate_up x=2": "eager",
    "moe_combine x=2": "on_wait",  # and so moe_dispatch and grouped_matmul
}
"""Cases interpreted in the default run; the rest are slow."""

RUNS = [
    pytest.param(case.name, mode, marks=() if QUICK.get(case.name) == mode else pytest.mark.slow)
    for case in INTERPRETED
    for mode in ("eager", "on_wait")
]


QUICK_TOPOLOGY = "v5e:2x4"
QUICK_COMPILED = {
    "permute x=8",
    "all_gather x=8",
    "reduce_scatter x=2,y=4",
    "all_reduce x=8",
    "all_to_all x=8",
    "all_gather_matmul x=8",
    "matmul_reduce_scatter x=8",
    "moe_dispatch x=8",
    "grouped_matmul x=8",
    "grouped_gate_up x=8",
    "ragged_paged_attention x=8 64 numbers a head",
    "distributed_decode_attention x=8",
}
"""Cases compiled in the default run, besides write_pages."""


COMPILATIONS = [
    pytest.param(
        case.name,
        topology,
        marks=()
        if topology == QUICK_TOPOLOGY and case.name in QUICK_COMPILED
        else pytest.mark.slow,
    )
    for topology in TOPOLOGIES
    for case in compiled(topology)
]


def test_names_tell_cases_apart() -> None:
    assert set(QUICK) <= {case.name for case in INTERPRETED}
    assert {case.name for case in compiled(QUICK_TOPOLOGY)} >= QUICK_COMPILED
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
