"""The row count above which replicated products become slower than products of split rows.

A pair of products runs in one of two ways (models/torch/overlapped.py):

    few     matmul               all rows, own columns
            matmul_all_reduce    own rows of the weight, sums on all ranks
    many    all_gather_matmul
            matmul_reduce_scatter

The tuning file has each overlapped op's time. A product alone is recorded as all_gather_matmul in a
world with one rank. Operations between products, mainly norms, run W times in the first way; this
is not counted.
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
    """Columns and rows of a weight, on one rank."""

    n: int
    k: int


def few_rows(
    home: Home,
    begins: Sequence[Product],
    ends: Sequence[Product],
    dtype: torch.dtype,
    path: Path | None = None,
) -> int | None:
    """Return the maximum number of rows for which the first way is faster, by rank 0's file.
    Collective.

    Args:
        home: this rank's.
        begins: a layer's products with all rows and own columns.
        ends: a layer's products with a sum over the ranks.
        dtype: of the operands.
        path: of the file; tuned.default_path() if None.

    Returns:
        At least 1; None if no number of rows was tuned for all products.

    Raises:
        TuningError: rank 0's file is damaged; raised on all ranks.
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
        """Return the time of all of them; KeyError if one was not tuned."""
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
