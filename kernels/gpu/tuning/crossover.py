"""The crossover between two ways to run a pair of matrix products, by number of rows.

The two ways are (models/torch/overlapped.py):

    few     matmul               all rows on every rank, own columns
            matmul_all_reduce    own rows of the weight, sums on all ranks
    many    all_gather_matmul    rows are split over the ranks
            matmul_reduce_scatter

The tuning file has a time for each overlapped op. A product without communication is recorded as
all_gather_matmul with world size 1. The first way repeats the work between the products, mainly
norms, on all W ranks; the comparison does not count this.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import Problem
from weft.kernels.gpu.tuning.search import from_first_rank
from weft.kernels.symmetric.memory import Home


class Product(NamedTuple):
    """A weight's size on one rank: n columns, k rows."""

    n: int
    k: int


def few_rows(
    home: Home,
    begins: Sequence[Product],
    ends: Sequence[Product],
    dtype: torch.dtype,
    path: Path | None = None,
) -> int | None:
    """Find the maximum number of rows for which the first way is faster. Collective.

    All ranks use the tuning file on rank 0.

    Args:
        home: this rank's home.
        begins: all products of a layer that take all rows and own columns.
        ends: all products of a layer that are summed over the ranks.
        dtype: operand dtype.
        path: tuning file; tuned.default_path() if None.

    Returns:
        At least 1; None if no number of rows has been tuned for all these products.

    Raises:
        TuningError: on all ranks, if the file on rank 0 is damaged.
    """

    def look() -> str:
        table = tuned.load(path or tuned.default_path())
        found = _few_rows(home, begins, ends, str(dtype).removeprefix("torch."), table)
        return "" if found is None else str(found)

    found = from_first_rank(home, look)
    return int(found) if found else None


def _few_rows(
    home: Home,
    begins: Sequence[Product],
    ends: Sequence[Product],
    dtype: str,
    table: tuned.Table,
) -> int | None:
    size = home.world_size

    def microseconds(op: str, world_size: int, rows: int, products: Sequence[Product]) -> float:
        """Add up the times for all products. Raises KeyError if one was not tuned."""
        problems = (Problem(op, world_size, rows, n, k, dtype) for n, k in products)
        keys = (tuned.key_of(problem, home.device_name) for problem in problems)
        return sum(table[key].microseconds for key in keys)

    few = None
    for rows in sorted({key.rows for key in table if key.op == "matmul_all_reduce"}):
        try:
            all_on_all = microseconds("all_gather_matmul", 1, rows, begins)
            all_on_all += microseconds("matmul_all_reduce", size, rows, ends)
            split = microseconds("all_gather_matmul", size, rows, begins)
            split += microseconds("matmul_reduce_scatter", size, rows, ends)
        except KeyError:
            continue
        if all_on_all > split:
            below = 1 if rows == tuned.SMALLEST_BUCKET else rows // 2  # not in this bucket
            return few or below
        few = rows
    return few
