"""The measured crossover between two ways to run a layer's products, by number of rows.

products.py has the two ways. The tuning file has a time for each of their ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.products import Product, Way, two_ways
from weft.kernels.gpu.tuning.search import from_first_rank
from weft.kernels.symmetric.memory import Home


def few_rows(
    home: Home,
    begins: Sequence[Product],
    ends: Sequence[Product],
    sums: Sequence[Product],
    dtype: torch.dtype,
    path: Path | None = None,
) -> int | None:
    """Find the maximum number of rows for which the first way is faster. Collective.

    All ranks use the tuning file on rank 0.

    Args:
        home: this rank's home.
        begins: all products of a layer that take all rows and own columns.
        ends: all products of a layer that are summed over the ranks.
        sums: what ranks exchange for experts; see `two_ways`.
        dtype: operand dtype.
        path: tuning file; tuned.default_path() if None.

    Returns:
        At least 1; None if no number of rows has been tuned for all these products.

    Raises:
        TuningError: on all ranks, if the file on rank 0 is damaged.
    """

    def look() -> str:
        table = tuned.load(path or tuned.default_path())
        ways = two_ways(home.world_size, begins, ends, sums)
        found = _few_rows(home, ways, str(dtype).removeprefix("torch."), table)
        return "" if found is None else str(found)

    found = from_first_rank(home, look)
    return int(found) if found else None


def _few_rows(home: Home, ways: tuple[Way, Way], dtype: str, table: tuned.Table) -> int | None:
    def microseconds(way: Way, rows: int) -> float:
        """Add up the times for all products. Raises KeyError if one was not tuned."""
        problems = (problem for each in way for problem in each.problems(rows, dtype))
        keys = (tuned.key_of(problem, home.device_name) for problem in problems)
        return sum(table[key].microseconds for key in keys)

    few = None
    for rows in sorted({key.rows for key in table if key.op == "matmul_all_reduce"}):
        try:
            all_on_all, split = (microseconds(way, rows) for way in ways)
        except KeyError:
            continue
        if all_on_all > split:
            below = 1 if rows == tuned.SMALLEST_BUCKET else rows // 2  # not in this bucket
            return few or below
        few = rows
    return few
