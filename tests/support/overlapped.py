"""What the tests of the overlapped products share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, run
from weft.kernels.symmetric.memory import Home

BLOCKS = (16, 16, 16)
CALLS = 3
FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Absolute and relative, of sums of tens of products of standard normal numbers."""

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SLOWNESS = st.lists(st.sampled_from([1.0, 1.0, 20.0]), min_size=4, max_size=4)
SEEDS = st.integers(0, 2**31)

IN_PARTS = pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 5))]
)
"""A test by examples: some of them, and four times as many more in the long run."""


def close(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Of that dtype, and as near to the oracle as numbers of the dtype are."""
    assert got.dtype == dtype
    assert got.shape == expected.shape
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def run_calls(
    work: Callable[[Home], Sequence[Tensor]],
    world_size: int,
    seed: int,
    slowness: Sequence[float] = (),
) -> list[list[Tensor]]:
    """Results of each call, by rank; no race was found."""
    races = RaceDetector()
    by_rank = run(work, world_size, seed=seed, slowness=slowness[:world_size] or None, races=races)
    assert races.findings == []
    return [list(call) for call in zip(*by_rank, strict=True)]


def findings(
    work: Callable[[Home], object],
    world_size: int = 3,
    seeds: int = 4,
    slowness: Sequence[float] | None = None,
) -> list[str]:
    """What the checker reports first, over some interleavings; a hang is a finding, too."""
    for seed in range(seeds):
        races = RaceDetector()
        try:
            with warnings.catch_warnings():  # what was never stored may be any number
                warnings.simplefilter("ignore", RuntimeWarning)
                run(work, world_size, seed=seed, slowness=slowness, races=races)
        except HangError as hang:
            return [str(hang), *races.findings]
        if races.findings:
            return races.findings
    return []
