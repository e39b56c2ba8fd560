"""All-reduce, residual and norm in one launch, against the oracle; refusals; planted faults."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import DTYPES, SEEDS, SLOWNESS, close, findings, run_calls
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.collectives import all_reduce_norm as module
from weft.kernels.gpu.collectives.all_reduce_norm import (
    all_reduce_rms_norm,
    all_reduce_rms_norm_workspace,
)
from weft.kernels.symmetric.memory import Home

EPS = 1e-5
MAX_ROWS, MAX_COLUMNS = 7, 60


@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 4),
    shapes=st.lists(
        st.tuples(st.integers(0, MAX_ROWS), st.sampled_from([1, 8, 33, 60])), min_size=1, max_size=4
    ),
    alike=st.booleans(),
    dtype=DTYPES,
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_equals_the_reference(
    size: int,
    shapes: list[tuple[int, int]],
    alike: bool,
    dtype: torch.dtype,
    slowness: list[float],
    seed: int,
) -> None:
    """Each call of another shape, or all of one: the same bits on all ranks."""
    torch.manual_seed(seed)
    if alike:
        shapes = shapes[:1] * 4
    xs = [[torch.randn(shape).to(dtype) for _ in range(size)] for shape in shapes]
    residuals = [torch.randn(shape).to(dtype) for shape in shapes]
    weights = [torch.randn(columns) for _, columns in shapes]

    def work(home: Home) -> list[Tensor]:
        workspace = all_reduce_rms_norm_workspace(home, MAX_ROWS, MAX_COLUMNS, dtype)
        out = [
            torch.stack(all_reduce_rms_norm(x[home.rank], residual, weight, EPS, workspace))
            for x, residual, weight in zip(xs, residuals, weights, strict=True)
        ]
        workspace.check()
        return out

    for call, x, residual, weight in zip(
        run_calls(work, size, seed, slowness), xs, residuals, weights, strict=True
    ):
        out, total = call[0]
        sums = torch.zeros(residual.shape)
        for one in x:
            sums += one.float()
        assert torch.equal(total, (sums + residual.float()).to(dtype))
        close(out, reference.all_reduce_rms_norm(x, [residual] * size, weight, EPS)[0][0], dtype)
        assert all(torch.equal(call[0], other) for other in call)


# Refusals.


def refused(**changes: object) -> str:
    """What a call says on rank 0 of two; rank 1's is right."""

    def work(home: Home) -> None:
        given: dict[str, object] = {
            "x": torch.zeros(2, 8),
            "residual": torch.zeros(2, 8),
            "weight": torch.zeros(8),
            "eps": EPS,
        }
        workspace = all_reduce_rms_norm_workspace(home, 2, 8, torch.float32)
        if home.rank == 0:
            given |= changes
        all_reduce_rms_norm(**given, workspace=workspace)  # type: ignore[arg-type]

    with pytest.raises(RankError) as error:
        run(work, 2)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 8).half()}, "x's dtype is torch.float16; it must be torch.float32"),
        ({"x": torch.zeros(3, 5)}, "x's rows is 3; it must be at most 2, which the workspace"),
        ({"x": torch.zeros(2, 9)}, "x's size is 18 numbers; it must be at most 16"),
        ({"residual": torch.zeros(1, 8)}, "residual's shape is [1, 8]; it must be [2, 8]"),
        ({"weight": torch.zeros(9)}, "weight's shape is [9]; it must be [8]"),
        ({"eps": 0.0}, "eps is 0.0; it must be positive"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], message: str) -> None:
    assert message in refused(**changes)


def test_workspaces_are_refused() -> None:
    def work(home: Home) -> None:
        all_reduce_rms_norm_workspace(home, 2, 8 * (home.rank + 1), torch.float32)

    with pytest.raises(RankError, match="max_columns is 8 on rank 0 and 16 on rank 1"):
        run(work, 2)


# Planted faults.


def call_of(faulty: ModuleType) -> object:
    def work(home: Home) -> list[Tensor]:
        workspace = faulty.all_reduce_rms_norm_workspace(home, 5, 8, torch.float32)
        return [
            faulty.all_reduce_rms_norm(
                torch.full((rows, 8), float(home.rank + rows)),
                torch.ones(rows, 8),
                torch.ones(8),
                EPS,
                workspace,
            ).total
            for rows in (5, 3, 5, 2)
        ]

    return work


def is_right(faulty: ModuleType) -> bool:
    by_rank = run(call_of(faulty), 3)  # type: ignore[arg-type]
    return all(
        torch.equal(got, torch.full((rows, 8), 1.0 + sum(rank + rows for rank in range(3))))
        for mine in by_rank
        for got, rows in zip(mine, (5, 3, 5, 2), strict=True)
    )


def test_nothing_is_found_without_a_fault() -> None:
    assert findings(call_of(module)) == []  # type: ignore[arg-type]
    assert is_right(module)


WAIT = "wait_all(peers, rank, row * WORLD, call, WORLD)\n"
TELL = "notify_all(peers, row * WORLD + rank, call, WORLD)"


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        (WAIT, "pass\n", "no order between"),
        ("slot_of(call)", "0", "no order between"),
        ("row * WORLD + rank, call", "rank, call", "waits for all_reduce_rms_norm.signals"),
        (TELL, TELL.replace(", WORLD)", ", WORLD - 1)"), "waits for"),
        ("slot + rank * numel", "slot + rank * 0", "no order between"),
        (WAIT, WAIT.replace("call, WORLD", "call, WORLD - 1"), "no order between"),
    ],
)
def test_a_fault_is_found(old: str, new: str, finding: str, tmp_path: Path) -> None:
    found = findings(call_of(planted(module, tmp_path, (old, new))), seeds=12)  # type: ignore[arg-type]
    assert any(finding in text for text in found)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("value += tl.load(residual", "value -= tl.load(residual"),
        (
            "sum_rows(come, at, numel, (row + 1) * N, WORLD",
            "sum_rows(come, at, numel, (row + 1) * N, 1",
        ),
    ],
)
def test_a_wrong_sum_is_found(old: str, new: str, tmp_path: Path) -> None:
    assert not is_right(planted(module, tmp_path, (old, new)))
