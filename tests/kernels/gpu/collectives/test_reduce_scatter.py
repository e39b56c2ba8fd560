"""Reduce-scatter, by each method and by both in turn, against its oracle; and what it refuses."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import collectives
from support.faults import planted
from support.overlapped import DTYPES, SEEDS, SLOWNESS
from torch import Tensor

from weft.kernels import reference
from weft.kernels.gpu.collectives import chunks, reduce_scatter_two_level
from weft.kernels.gpu.collectives import reduce_scatter as module
from weft.kernels.gpu.collectives.reduce_scatter import (
    METHODS,
    reduce_scatter,
    reduce_scatter_workspace,
)

CALLS, MAX_NUMEL, CHUNK = collectives.CALLS, 300, 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
SHAPES = st.sampled_from([(1,), (5, 3), (33, 7), (2, 0)])


@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 4),
    calls=st.lists(st.tuples(st.sampled_from(sorted(METHODS)), SHAPES), min_size=1, max_size=CALLS),
    alike=st.booleans(),
    node=st.integers(1, 4),
    dtype=DTYPES,
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_reduce_scatter(
    size: int,
    calls: list[tuple[str, tuple[int, ...]]],
    alike: bool,
    node: int,
    dtype: torch.dtype,
    slowness: list[float],
    seed: int,
) -> None:
    """Each call of another shape and method, or all of one. The shapes are of the results."""
    torch.manual_seed(seed)
    if alike:
        calls = calls[:1] * CALLS
    xs = [
        [torch.randn(size * shape[0], *shape[1:]).to(dtype) for _ in range(size)]
        for _, shape in calls
    ]
    options = {"chunk": CHUNK, "ranks_per_node": node if size % node == 0 else None}
    by_rank = collectives.results(
        reduce_scatter,
        lambda home, methods: reduce_scatter_workspace(home, MAX_NUMEL, dtype, methods, **options),
        *([method for method, _ in calls], xs, size, seed, slowness),
    )
    for i, (call, (method, _)) in enumerate(zip(xs, calls, strict=True)):
        for rank, oracle in enumerate(reference.reduce_scatter(call)):
            got = by_rank[rank][i]
            assert got.dtype == dtype
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(got.float(), oracle, atol=tolerance, rtol=tolerance)
            if method == "push":
                assert torch.equal(got, collectives.in_order(call).chunk(size)[rank])


def test_methods_take_turns() -> None:
    """Of a signal, the rank that sets it is the same in both; one rank is late."""
    for seed in range(4):
        torch.manual_seed(seed)
        xs = [[torch.randn(4 * numel) for _ in range(4)] for numel in (1, 8, 40, 16)]
        slowness = [20.0 if rank == seed % 4 else 1.0 for rank in range(4)]
        by_rank = collectives.results(
            reduce_scatter,
            lambda home, methods: reduce_scatter_workspace(
                home, 48, torch.float32, methods, chunk=16, ranks_per_node=2
            ),
            *(["two_level", "push"] * 2, xs, 4, seed, slowness),
        )
        for rank, got in enumerate(by_rank):
            for mine, call in zip(got, xs, strict=True):
                torch.testing.assert_close(mine, sum(call).chunk(4)[rank])


# Refusals.


def refused(methods: list[str], x: Tensor, method: str, **options: int) -> str:
    """What a call says on one of two ranks."""
    return collectives.refused(
        reduce_scatter, reduce_scatter_workspace, methods, x, method, **options
    )


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(64)
    assert "method is 'shout'; it must be one of push, two_level" in refused(["shout"], x, "push")
    assert "method is 'two_level'; it must be one that the workspace was made for" in refused(
        ["push"], x, "two_level"
    )
    assert "x's dtype is torch.float16" in refused(["push"], x.half(), "push")
    assert "x's rows is 3; it must be a multiple of 2 ranks" in refused(
        ["push"], torch.zeros(3), "push"
    )
    assert "at most 128" in refused(["push"], torch.zeros(130), "push")
    assert "have at least one axis" in refused(["push"], torch.zeros(()), "push")
    assert "ranks_per_node is 3; it must divide the 2 ranks" in refused(
        ["two_level"], x, "two_level", ranks_per_node=3
    )


# Planted faults.

PARTS = (chunks, reduce_scatter_two_level)


def symptoms(faulty: ModuleType, *methods: str, wanted: str = "") -> set[str]:
    """Of four ranks on two nodes."""
    return collectives.symptoms(
        faulty.reduce_scatter,
        lambda home: faulty.reduce_scatter_workspace(
            home, 40, torch.float32, methods, chunk=16, ranks_per_node=2
        ),
        *(methods, 4, 160),
        lambda x, rank: x.sum(0).chunk(4)[rank],
        wanted,
    )


WAIT = "wait_all(peers, rank, first + index * COUNT, call, COUNT)\n"
WAIT_NODES = """            nvshmem.wait_across(
                peers.buffers, sender, peers, first + at, across, at, rank, call, FAR
            )
"""
WAIT_LOCAL = "wait_all(peers, rank, scattered + index * WORLD + to_node * NODE, call, NODE)\n"


@pytest.mark.sweep
@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_is_found_without_a_fault(method: str) -> None:
    assert symptoms(module, method) == set()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "old", "new", "symptom"),
    [
        ("push", WAIT, "pass\n", "race"),
        ("push", WAIT, WAIT.replace("call, COUNT", "call, COUNT - 1"), "race"),
        ("two_level", WAIT_NODES, "            pass\n", "race"),
        ("two_level", WAIT_LOCAL, "pass\n", "race"),
        ("push", "slot_of(call)", "0", "race"),
        ("two_level", "slot_of(call) * peers.slot_numel", "0", "race"),
        ("two_level", "slot_of(call) * sums.numel", "0", "race"),
        ("push", "peers, peer, index", "peers, (peer + 1) % WORLD, index", "race"),
        ("two_level", "peers, peer, first", "peers, (peer + 1) % WORLD, first", "race"),
        ("two_level", "row = to_node * NODE + local\n    index", "row = local\n    index", "hang"),
        ("push", "x + peer * stride", "x + rank * stride", "wrong"),
    ],
)
def test_a_fault_is_found(method: str, old: str, new: str, symptom: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=PARTS)
    assert symptom in symptoms(faulty, method, wanted=symptom)


def test_a_signal_that_two_ranks_set_is_found(tmp_path: Path) -> None:
    """Who scatters in one call is late, when the part's own rank sets it in the next."""
    faulty = planted(module, tmp_path, ("self.scattered = size * chunks", "self.scattered = 0"))
    assert "reused" in symptoms(faulty, "two_level", "push", wanted="reused")
