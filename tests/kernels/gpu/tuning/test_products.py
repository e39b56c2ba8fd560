"""The predicted seconds of both ways to run a layer's products."""

from __future__ import annotations

import pytest

from weft.kernels.gpu.tuning.costs import GPUS, Gpu, Problem, cost, space
from weft.kernels.gpu.tuning.products import EXCHANGES, Product, predicted, three_ways

BEGIN, END, SUM = Product(768, 4096), Product(4096, 512), Product(4096, 0)
GATE_UP, DOWN = Product(384, 4096, 16, 2), Product(4096, 192, 16, 2)


def seconds(device: Gpu, rows: int) -> list[float]:
    """Of a layer's two products, and of its experts' on eight ranks, all three ways."""
    ways = three_ways(8, [BEGIN], [END], [GATE_UP], [DOWN])
    return [predicted(way, rows, "bfloat16", device) for way in ways]


def test_a_way_takes_its_ops_cheapest_configurations() -> None:
    (device,) = (gpu for gpu in GPUS if gpu.name == "H100")
    few, medium, many = seconds(device, 64)

    def cheapest(op: str, world_size: int, product: Product, *methods: str) -> float:
        top_k = 1 if op == "grouped_matmul" else product.top_k
        rows = 64 * product.top_k
        shape = (product.n, product.k, "bfloat16", product.groups)
        problem = Problem(op, world_size, rows, *shape, top_k)
        return min(cost(problem, each, device) for each in space(problem, device, methods))

    grouped = sum(cheapest("grouped_matmul", 1, each, "local") for each in (GATE_UP, DOWN))
    assert few == pytest.approx(
        cheapest("all_gather_matmul", 1, BEGIN, "push")
        + cheapest("matmul_all_reduce", 8, END, "one_shot")
        + grouped
        + cheapest("all_reduce", 8, SUM, *EXCHANGES["all_reduce"])
    )
    assert medium == pytest.approx(
        cheapest("all_gather_matmul", 1, BEGIN, "push")
        + cheapest("all_gather_matmul", 1, END, "push")
        + grouped
        + 2 * cheapest("all_reduce", 8, SUM, *EXCHANGES["all_reduce"])
    )
    assert many == pytest.approx(
        cheapest("all_gather_matmul", 8, BEGIN, "push")
        + cheapest("matmul_reduce_scatter", 8, END, "push")
        + cheapest("all_gather_grouped_matmul", 8, GATE_UP, "push")
        + cheapest("grouped_matmul_reduce_scatter", 8, DOWN, "push")
    )


@pytest.mark.parametrize("device", GPUS, ids=[gpu.name for gpu in GPUS])
def test_the_ways_cross(device: Gpu) -> None:
    """A few rows are faster on all ranks, and many are faster in parts.

    Over PCIe, as between L40S, few rows are faster in parts, too: a rank sends each of them once,
    and not to all ranks.
    """
    few, medium, many = seconds(device, 16)
    assert few < min(medium, many) if device.name != "L40S" else many < min(few, medium)
    few, medium, many = seconds(device, 4096)
    assert many < min(few, medium)


def test_between_few_and_many_rows_an_all_reduce_follows() -> None:
    """A decode step of a 70B with 128 users on eight H100s sent 15 MB for each product."""
    (device,) = (gpu for gpu in GPUS if gpu.name == "H100")
    ways = three_ways(8, [Product(1280, 8192), Product(7168, 8192)], [Product(8192, 3584)])
    few, medium, many = (predicted(way, 128, "bfloat16", device) for way in ways)
    assert medium < min(few, many)
