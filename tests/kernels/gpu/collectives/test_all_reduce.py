"""All-reduce, by each method and by several in turn, against its oracle; and what it refuses."""

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
from weft.kernels.gpu.collectives import all_reduce as module
from weft.kernels.gpu.collectives import chunks, reduce_scatter
from weft.kernels.gpu.collectives.all_reduce import METHODS, all_reduce, all_reduce_workspace
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.symmetric.shared import SharedHome

CALLS, MAX_NUMEL, CHUNK = collectives.CALLS, 2200, 64
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}
SHAPES = st.sampled_from([(), (1,), (5, 3), (33, 7), (2, 0), (2101,)])


@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 4),
    calls=st.lists(st.tuples(st.sampled_from(sorted(METHODS)), SHAPES), min_size=1, max_size=CALLS),
    alike=st.booleans(),
    dtype=DTYPES,
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_all_reduce(
    size: int,
    calls: list[tuple[str, tuple[int, ...]]],
    alike: bool,
    dtype: torch.dtype,
    slowness: list[float],
    seed: int,
) -> None:
    """Each call of another shape and method, or all of one: the same bits on all ranks."""
    torch.manual_seed(seed)
    if alike:
        calls = calls[:1] * CALLS
    calls = [
        (method, (8, *shape[1:]) if method == "multimem" else shape) for method, shape in calls
    ]
    xs = [[torch.randn(shape).to(dtype) for _ in range(size)] for _, shape in calls]
    options = {"chunk": CHUNK}
    by_rank = collectives.results(
        all_reduce,
        lambda home, methods: all_reduce_workspace(home, MAX_NUMEL, dtype, methods, **options),
        *([method for method, _ in calls], xs, size, seed, slowness),
    )
    tolerance = TOLERANCE[dtype]
    for i, call in enumerate(xs):
        got = by_rank[0][i]
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.float(), reference.all_reduce(call)[0], atol=tolerance, rtol=tolerance
        )
        assert torch.equal(got, collectives.in_order(call))
        assert all(torch.equal(got, other[i]) for other in by_rank)


# Refusals.


def refused(methods: list[str], x: Tensor, method: str, **options: int) -> str:
    """What a call says on one of two ranks."""
    return collectives.refused(all_reduce, all_reduce_workspace, methods, x, method, **options)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(64)
    assert "method is 'shout'; it must be one of one_shot, two_shot" in refused(
        ["shout"], x, "one_shot"
    )
    assert "method is 'll'; it must be one that the workspace was made for: two_shot" in refused(
        ["two_shot"], x, "ll"
    )
    assert "x's dtype is torch.float16" in refused(["two_shot"], x.half(), "two_shot")
    assert "x's size is 65 numbers; it must be at most 64" in refused(
        ["two_shot"], torch.zeros(65), "two_shot"
    )
    assert "24 bytes; it must be a multiple of 16 for multimem" in refused(
        ["multimem"], torch.zeros(6), "multimem"
    )
    assert "chunk is 12; it must be a positive multiple of 8" in refused(["ll"], x, "ll", chunk=12)


@pytest.mark.parametrize("method", ["ll", "one_shot"])
def test_large_tensors_are_refused_by_methods_of_one_trip(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_ONE_TRIP_BYTES", 128)
    said = refused([method], torch.zeros(64), method)
    assert f"256 bytes; it must be at most 128 for {method}" in said


def test_multimem_takes_a_multicast_address(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    with (
        SharedHome(store, 0, 1) as home,
        pytest.raises(KernelError, match="'multimem'; it must be another one here"),
    ):
        all_reduce_workspace(home, 64, torch.float32, ["multimem"])


# Planted faults.


def symptoms(faulty: ModuleType, method: str, wanted: str = "") -> set[str]:
    """Of three ranks."""
    return collectives.symptoms(
        faulty.all_reduce,
        lambda home: faulty.all_reduce_workspace(home, 80, torch.float32, [method], chunk=16),
        *([method], 3, 80),
        lambda x, rank: x.sum(0),
        wanted,
    )


WAIT = "wait_all(peers, rank, index * WORLD, call, WORLD)\n"
WAIT_ROW = "wait_all(peers, rank, first + index * COUNT, call, COUNT)\n"
TELL_ALL = "notify_all(peers, first + index * WORLD + rank, call, WORLD)"
WAIT_PART = "        wait(peers, rank, first + index * WORLD + part, call)\n"


@pytest.mark.sweep
@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_is_found_without_a_fault(method: str) -> None:
    assert symptoms(module, method) == set()


# Of two_shot and multimem there would be one slot enough: whoever stores to it in a call has waited
# for what its owner sends after it has read what was there. So no race shows without the second.
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "old", "new", "symptom"),
    [
        ("one_shot", WAIT_ROW, "pass\n", "race"),
        ("one_shot", "slot_of(call)", "0", "race"),
        ("one_shot", "notify(peers, peer", "notify(peers, (peer + 1) % WORLD", "race"),
        ("two_shot", WAIT, "pass\n", "race"),
        ("two_shot", WAIT_PART, "", "race"),
        ("two_shot", TELL_ALL, TELL_ALL.replace(", WORLD)", ", WORLD - 1)"), "hang"),
        ("two_shot", "+ rank * numel\n    for", "+ (rank + 1) % WORLD * numel\n    for", "wrong"),
        ("multimem", WAIT, "pass\n", "race"),
        ("multimem", TELL_ALL, TELL_ALL.replace(", WORLD)", ", WORLD - 1)"), "hang"),
        ("multimem", WAIT_PART, "", "race"),
        ("multimem", "peers, part,", "peers, (part + 1) % WORLD,", "race"),
        ("ll", "slot_of(call)", "0", "race"),
        ("ll", "(rank + 1 + step) % WORLD", "(rank + step // 2) % WORLD", "hang"),
    ],
)
def test_a_fault_is_found(method: str, old: str, new: str, symptom: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=[chunks, reduce_scatter])
    assert symptom in symptoms(faulty, method, symptom)
