"""Up to how many rows all ranks have all of them: by what was tuned, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import Config, Problem
from weft.kernels.gpu.tuning.crossover import few_rows
from weft.kernels.gpu.tuning.products import Product
from weft.kernels.gpu.tuning.table import Entry, TuningError, key_of
from weft.kernels.symmetric.counting import CountingHome

BEGIN, END = Product(96, 64), Product(64, 48)
CONFIG = Config("push", 16, 16, 16)


def write(path: Path, times: dict[int, tuple[float, float, float, float]]) -> None:
    """By rows: of a product alone, with an all-reduce; after an all-gather, with a scatter."""
    table = {}
    for rows, each in times.items():
        ops = (
            ("all_gather_matmul", 1, BEGIN),
            ("matmul_all_reduce", 4, END),
            ("all_gather_matmul", 4, BEGIN),
            ("matmul_reduce_scatter", 4, END),
        )
        for (op, world_size, (n, k)), microseconds in zip(ops, each, strict=True):
            key = key_of(Problem(op, world_size, rows, n, k), "GPU")
            fields = {field: getattr(key, field) for field in key.__struct_fields__}
            table[key] = Entry(**fields, config=CONFIG, microseconds=microseconds)
    tuned.record(path, table)


def found(path: Path, dtype: torch.dtype = torch.bfloat16) -> int | None:
    return few_rows(CountingHome(4, "GPU"), [BEGIN], [END], [], dtype, path)


def test_up_to_where_both_ways_take_equally_long(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    fast, slow = (4.0, 5.0, 6.0, 7.0), (4.0, 9.0, 6.0, 5.0)
    write(path, {16: fast, 32: fast, 128: fast, 256: slow, 512: fast})
    assert found(path) == 128
    assert found(path, torch.float16) is None


def test_where_split_rows_are_always_faster(tmp_path: Path) -> None:
    slow = (4.0, 9.0, 6.0, 5.0)
    write(tmp_path / "16.json", {16: slow})
    assert found(tmp_path / "16.json") == 1
    write(tmp_path / "64.json", {64: slow})
    assert found(tmp_path / "64.json") == 32


def test_nothing_is_said_without_all_of_the_times(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert found(path) is None
    write(path, {16: (4.0, 5.0, 6.0, 7.0)})
    assert few_rows(CountingHome(4, "GPU"), [BEGIN, END], [END], [], torch.bfloat16, path) is None
    assert few_rows(CountingHome(2, "GPU"), [BEGIN], [END], [], torch.bfloat16, path) is None


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    with pytest.raises(TuningError, match=r"tuning\.json"):
        found(path)
