"""Measured seconds for the ways to run a layer's products, by number of rows.

products.py has the ways. The tuning file has a time for each of their ops.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.products import Product, Way, three_ways
from weft.kernels.gpu.tuning.search import from_first_rank
from weft.kernels.symmetric.memory import Home


def measured_ways(
    home: Home,
    begins: Sequence[Product],
    ends: Sequence[Product],
    expert_begins: Sequence[Product],
    expert_ends: Sequence[Product],
    dtype: torch.dtype,
    path: Path | None = None,
) -> dict[int, list[float]]:
    """Find each way's seconds for each tuned number of rows. Collective.

    All ranks use the tuning file on rank 0.

    Args:
        home: this rank's home.
        begins: all products of a layer that take all rows and own columns.
        ends: all products of a layer that are summed over the ranks.
        expert_begins, expert_ends: the same for experts.
        dtype: operand dtype.
        path: tuning file; tuned.default_path() if None.

    Returns:
        Empty if no number of rows has been tuned for all these products.

    Raises:
        TuningError: on all ranks, if the file on rank 0 is damaged.
    """

    def look() -> str:
        table = tuned.load(path or tuned.default_path())
        ways = three_ways(home.world_size, begins, ends, expert_begins, expert_ends)
        found = {}
        for rows in sorted({key.rows for key in table if key.op == "matmul_all_reduce"}):
            try:
                found[rows] = [seconds(way, rows, table) for way in ways]
            except KeyError:
                continue  # not all of them were tuned
        return json.dumps(found)

    def seconds(way: Way, rows: int, table: tuned.Table) -> float:
        """Add up the times for all products. Raises KeyError if one was not tuned."""
        name = str(dtype).removeprefix("torch.")
        problems = (problem for each in way for problem in each.problems(rows, name))
        keys = (tuned.key_of(problem, home.device_name) for problem in problems)
        return sum(table[key].microseconds for key in keys) / 1e6

    return {int(rows): times for rows, times in json.loads(from_first_rank(home, look)).items()}
