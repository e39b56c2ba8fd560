"""Ops with a matrix product: their methods, and predicted seconds for a layer's products.

A layer's products run in one of three ways (models/torch/overlapped.py):

    few     product              all rows on every rank, own columns
            matmul_all_reduce    own rows of the weight, sums on all ranks
    medium  product              as for few rows
            product, all_reduce  own rows of the weight; then sums on all ranks
    many    all_gather_matmul    rows are split over the ranks
            matmul_reduce_scatter

With experts, the products of each token's choices are among them:

    few, medium             grouped_matmul, twice; all_reduce
    many                    all_gather_grouped_matmul
                            grouped_matmul_reduce_scatter

The first two repeat the work between the products, mainly norms, on all W ranks. This is not
counted. A product without communication is all_gather_matmul with world size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.kernels.gpu.tuning.costs import PAYLOADS, Gpu, Problem, cost, space

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
    """A weight's size on one rank: n columns, k rows. For collectives: n columns, and k = 0.

    Attributes:
        n, k: columns and rows.
        groups: number of experts on the rank, each with such a weight.
        top_k: `expected_choices` of a row among them.
    """

    n: int
    k: int
    groups: int = 1
    top_k: int = 1


def expected_choices(top_k: int, experts: int, own: int) -> int:
    """Return how many of a token's experts are expected on a rank, at least one.

    Args:
        top_k: number of experts for each token.
        experts: number of experts on all ranks.
        own: number of the rank's experts.
    """
    return max(1, top_k * own // experts)


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
        travels = PAYLOADS[self.op] != "nothing"  # a row is sent once for all its choices
        return [
            Problem(
                *(self.op, self.world_size, rows * top_k, n, k, dtype, groups),
                top_k=top_k if travels else 1,
            )
            for n, k, groups, top_k in self.products
        ]


Way = Sequence[Pass]


def three_ways(
    world_size: int,
    begins: Sequence[Product],
    ends: Sequence[Product],
    expert_begins: Sequence[Product] = (),
    expert_ends: Sequence[Product] = (),
) -> tuple[Way, Way, Way]:
    """Return the ops for few rows, those for more, and those for many.

    Args:
        world_size: number of ranks.
        begins: all products of a layer that take all rows and own columns.
        ends: all products of a layer that are summed over the ranks.
        expert_begins, expert_ends: the same for experts.
    """
    grouped = Pass("grouped_matmul", 1, [*expert_begins, *expert_ends])
    sums = [Product(end.n, 0) for end in expert_ends]
    few = (
        Pass("all_gather_matmul", 1, begins),
        Pass("matmul_all_reduce", world_size, ends),
        grouped,
        Pass("all_reduce", world_size, sums),
    )
    medium = (
        Pass("all_gather_matmul", 1, [*begins, *ends]),
        grouped,
        Pass("all_reduce", world_size, [*(Product(end.n, 0) for end in ends), *sums]),
    )
    many = (
        Pass("all_gather_matmul", world_size, begins),
        Pass("matmul_reduce_scatter", world_size, ends),
        Pass("all_gather_grouped_matmul", world_size, expert_begins),
        Pass("grouped_matmul_reduce_scatter", world_size, expert_ends),
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
