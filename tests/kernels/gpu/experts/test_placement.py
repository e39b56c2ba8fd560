"""Expert placement: the tables that kernels read, and balance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.gpu.experts.placement import Placement, balanced, doubled, even
from weft.kernels.gpu.runtime.arguments import KernelError


def test_even() -> None:
    placement = even(6, 3)
    assert placement.slots == (0, 1, 2, 3, 4, 5)
    assert (placement.num_experts, placement.slots_per_rank, placement.max_replicas) == (6, 2, 1)
    assert placement.experts(1) == (2, 3)
    assert placement.ranks(5) == [2]


def test_doubled() -> None:
    placement = doubled(even(4, 2), 3)
    assert placement.experts(0) == (0, 1, 0, 1, 0)
    assert placement.experts(1) == (2, 3, 2, 3, 2)
    assert doubled(even(4, 2), 0) == even(4, 2)


def test_tables_name_the_slots_of_each_expert() -> None:
    placement = Placement((1, 0, 0, 2, 0, 1), 3)
    assert placement.ranks(0) == [0, 1, 2]
    replicas, counts = placement.tables()
    assert replicas.tolist() == [[1, 2, 4, -1], [0, 5, -1, -1], [3, -1, -1, -1]]
    assert counts.tolist() == [3, 2, 1]


def test_hot_experts_have_replicas_on_other_ranks() -> None:
    placement = balanced([90, 10, 10, 10, 10, 10, 10, 10], 4, 3)
    assert len(placement.replicas(0)) == 5
    assert set(placement.ranks(0)) == {0, 1, 2, 3}
    assert all(len(placement.replicas(expert)) == 1 for expert in range(1, 8))


@given(
    loads=st.lists(st.integers(0, 1000), min_size=1, max_size=12),
    world_size=st.integers(1, 5),
    spare=st.integers(0, 3),
)
def test_balanced(loads: list[int], world_size: int, spare: int) -> None:
    """No rank has more than what all have on average and the heaviest replica on top of it."""
    per_rank = -(-len(loads) // world_size) + spare
    placement = balanced(loads, world_size, per_rank)
    assert placement.num_experts == len(loads)
    assert placement.slots_per_rank == per_rank
    assert placement == balanced(loads, world_size, per_rank)
    shares = [load / len(placement.replicas(e)) for e, load in enumerate(loads)]
    by_rank = [sum(shares[e] for e in placement.experts(rank)) for rank in range(world_size)]
    assert sum(by_rank) == pytest.approx(sum(loads))
    for expert, load in enumerate(loads):  # a replica more never goes to a lighter expert
        count = len(placement.replicas(expert))
        if count > 1:
            assert all(load / (count - 1) >= share for share in shares)


def test_what_is_no_placement_is_refused() -> None:
    with pytest.raises(KernelError, match="slots is 3 in all; it must be the same number for"):
        Placement((0, 1, 2), 2)
    with pytest.raises(KernelError, match="the first without a slot is expert 1; it must be none:"):
        Placement((0, 2), 2)
    with pytest.raises(KernelError, match="lowest expert number is -1; it must be 0"):
        Placement((0, -1), 2)
    with pytest.raises(KernelError, match="world_size is 0; it must be at least 1"):
        Placement((0,), 0)
    with pytest.raises(KernelError, match="slots is 0 in all"):
        Placement((), 1)
    with pytest.raises(KernelError, match="num_experts is 5; it must be a positive multiple of 2"):
        even(5, 2)
    with pytest.raises(KernelError, match="of 5 experts; it must be of 1 to 4, one per slot"):
        balanced([1] * 5, 2, 2)
