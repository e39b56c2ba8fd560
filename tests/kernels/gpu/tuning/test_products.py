"""The predicted seconds of both ways to run a layer's products."""

from __future__ import annotations

import pytest

from weft.kernels.gpu.tuning.costs import GPUS, Gpu, Problem, cost, space
from weft.kernels.gpu.tuning.products import Product, predicted, two_ways

BEGIN, END, SUM = Product(768, 4096), Product(4096, 512), Product(4096, 0)


def seconds(device: Gpu, rows: int, sums: tuple[Product, ...] = ()) -> list[float]:
    """Of a layer's two products on eight ranks, both ways."""
    ways = two_ways(8, [BEGIN], [END], sums)
    return [predicted(way, rows, "bfloat16", device) for way in ways]


def test_a_way_takes_its_ops_cheapest_configurations() -> None:
    (device,) = (gpu for gpu in GPUS if gpu.name == "H100")
    few, many = seconds(device, 64, (SUM,))

    def cheapest(op: str, world_size: int, product: Product, *methods: str) -> float:
        problem = Problem(op, world_size, 64, product.n, product.k)
        return min(cost(problem, each, device) for each in space(problem, device, methods))

    assert few == pytest.approx(
        cheapest("all_gather_matmul", 1, BEGIN, "push")
        + cheapest("matmul_all_reduce", 8, END, "one_shot")
        + cheapest("all_reduce", 8, SUM, "one_shot", "two_shot")
    )
    assert many == pytest.approx(
        cheapest("all_gather_matmul", 8, BEGIN, "push")
        + cheapest("matmul_reduce_scatter", 8, END, "push")
        + cheapest("all_gather", 8, SUM, "push")
        + cheapest("reduce_scatter", 8, SUM, "push")
    )


@pytest.mark.parametrize("device", GPUS, ids=[gpu.name for gpu in GPUS])
def test_the_ways_cross(device: Gpu) -> None:
    """A few rows are faster on all ranks, and many are faster in parts."""
    few, many = seconds(device, 16, (SUM,))
    assert few < many
    few, many = seconds(device, 4096, (SUM,))
    assert few > many
