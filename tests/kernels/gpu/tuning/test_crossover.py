"""Seconds of the ways to run a layer's products: by what was tuned, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import Config, Problem
from weft.kernels.gpu.tuning.crossover import measured_ways
from weft.kernels.gpu.tuning.products import Product
from weft.kernels.gpu.tuning.table import Entry, TuningError, key_of
from weft.kernels.symmetric.counting import CountingHome

BEGIN, END = Product(96, 64), Product(64, 48)
CONFIG = Config("push", 16, 16, 16)


def write(path: Path, times: dict[int, tuple[float, ...]]) -> None:
    """Microseconds by rows, for each product or exchange in turn."""
    ops = (
        ("all_gather_matmul", 1, BEGIN),
        ("matmul_all_reduce", 4, END),
        ("all_gather_matmul", 1, END),
        ("all_reduce", 4, Product(END.n, 0)),
        ("all_gather_matmul", 4, BEGIN),
        ("matmul_reduce_scatter", 4, END),
    )
    table = {}
    for rows, each in times.items():
        for (op, world_size, product), microseconds in zip(ops, each, strict=False):
            key = key_of(Problem(op, world_size, rows, product.n, product.k), "GPU")
            fields = {field: getattr(key, field) for field in key.__struct_fields__}
            table[key] = Entry(**fields, config=CONFIG, microseconds=microseconds)
    tuned.record(path, table)


def found(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[int, list[float]]:
    return measured_ways(CountingHome(4, "GPU"), [BEGIN], [END], [], [], dtype, path)


def test_each_way_takes_the_sum_of_its_ops(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    write(path, {16: (4.0, 5.0, 3.0, 2.0, 6.0, 7.0), 128: (8.0, 9.0, 1.0, 2.0, 3.0, 4.0)})
    assert found(path) == {
        16: pytest.approx([9e-6, 9e-6, 13e-6]),
        128: pytest.approx([17e-6, 11e-6, 7e-6]),
    }
    assert found(path, torch.float16) == {}


def test_nothing_is_said_without_all_of_the_times(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    assert found(path) == {}
    write(path, {16: (4.0, 5.0, 3.0, 2.0, 6.0, 7.0), 32: (4.0, 5.0, 3.0, 2.0, 6.0)})
    assert list(found(path)) == [16]
    home = CountingHome(4, "GPU")
    assert measured_ways(home, [BEGIN, END], [END], [], [], torch.bfloat16, path) == {}
    home = CountingHome(2, "GPU")
    assert measured_ways(home, [BEGIN], [END], [], [], torch.bfloat16, path) == {}


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    with pytest.raises(TuningError, match=r"tuning\.json"):
        found(path)
