"""Ops with a matrix product: their methods, and predicted seconds for a layer's products.

A layer's products run in one of three ways (models/torch/overlapped.py):

    few     product              all rows on every rank, own columns
            matmul_all_reduce    own rows of the weight, sums on all ranks
    medium  product              as for few rows
            product, all_reduce  own rows of the weight; then sums on all ranks
    many    all_gather_matmul    rows are split over the ranks
            matmul_reduce_scatter

With experts: all_reduce of their sum in the first two ways; all_gather and reduce_scatter in the
third. The first two repeat the work between the products, mainly norms, on all W ranks. This is not
counted. A product without communication is all_gather_matmul with world size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.kernels.gpu.tuning.costs import Gpu, Problem, cost, space

PRODUCT_METHODS = {
    "all_gather_matmul": ("push",),
    "matmul_reduce_scatter": ("push",),
    "matmul_all_reduce": ("one_shot",),
    "grouped_matmul": ("local",),
    "all_gather_grouped_matmul": ("push",),
    "grouped_matmul_reduce_scatter": ("push",),
}
"""Methods for each op with a matrix product."""

EXCHANGES = {
    "all_gather": ("push",),
    "reduce_scatter": ("push",),
    "all_reduce": ("ll", "one_shot", "two_shot"),
}
"""Methods of the collectives' workspaces in a model."""


class Product(NamedTuple):
    """A weight's size on one rank: n columns, k rows. For collectives: n columns, and k = 0."""

    n: int
    k: int


class Pass(NamedTuple):
    """An op for some of a layer's products.

    Attributes:
        op: a key in `PRODUCT_METHODS` or `EXCHANGES`.
        world_size: number of ranks that exchange.
        products: the products.
    """

    op: str
    world_size: int
    products: Sequence[Product]

    def problems(self, rows: int, dtype: str) -> list[Problem]:
        """Return a problem for each product, with `rows` rows on all ranks together."""
        return [Problem(self.op, self.world_size, rows, n, k, dtype) for n, k in self.products]


Way = Sequence[Pass]


def three_ways(
    world_size: int,
    begins: Sequence[Product],
    ends: Sequence[Product],
    sums: Sequence[Product],
) -> tuple[Way, Way, Way]:
    """Return the ops for few rows, those for more, and those for many.

    Args:
        world_size: number of ranks.
        begins: all products of a layer that take all rows and own columns.
        ends: all products of a layer that are summed over the ranks.
        sums: what ranks exchange for experts.
    """
    few = (
        Pass("all_gather_matmul", 1, begins),
        Pass("matmul_all_reduce", world_size, ends),
        Pass("all_reduce", world_size, sums),
    )
    medium = (
        Pass("all_gather_matmul", 1, [*begins, *ends]),
        Pass("all_reduce", world_size, [*(Product(end.n, 0) for end in ends), *sums]),
    )
    many = (
        Pass("all_gather_matmul", world_size, begins),
        Pass("matmul_reduce_scatter", world_size, ends),
        Pass("all_gather", world_size, sums),
        Pass("reduce_scatter", world_size, sums),
    )
    return few, medium, many


def predicted(way: Way, rows: int, dtype: str, device: Gpu) -> float:
    """Predict the seconds of all products in a way, each with its cheapest configuration.

    Args:
        way: the ops.
        rows: number of rows on all ranks together.
        dtype: operand dtype, by its torch name.
        device: the GPU.
    """
    problems = [problem for each in way for problem in each.problems(rows, dtype)]
    methods = PRODUCT_METHODS | EXCHANGES
    return sum(
        cost(problem, space(problem, device, methods[problem.op])[0], device)
        for problem in problems
    )
