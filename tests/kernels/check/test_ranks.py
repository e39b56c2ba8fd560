"""Taking turns: results, seeds, failures and hangs."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import triton
import triton.language as tl
from support.peers import peers_of

from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.runtime.signals import notify, wait
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError


def test_results_come_by_rank() -> None:
    assert run(lambda home: home.exchange(str(home.rank)), 3) == [["0", "1", "2"]] * 3


def test_an_error_names_its_rank_and_ends_the_others() -> None:
    def work(home: Home) -> None:
        home.barrier()
        if home.rank == 2:
            raise ValueError("no")
        home.barrier()

    with pytest.raises(RankError, match="on rank 2: no") as error:
        run(work, 3)
    assert isinstance(error.value.__cause__, ValueError)


def test_a_rank_that_does_not_come_is_a_hang() -> None:
    with pytest.raises(HangError, match="rank 0 waits for the others"):
        run(lambda home: home.barrier() if home.rank == 0 else None, 2)


def test_ranks_that_disagree_are_told_alike() -> None:
    messages = []

    def work(home: Home) -> None:
        try:
            home.empty("x", (4 + home.rank // 2,), torch.float32)
        except SymmetricMemoryError as error:
            messages.append(str(error))

    run(work, 3)
    assert len(messages) == 3
    assert len(set(messages)) == 1
    assert "rank 2 requests x float32 [5]; the others request x float32 [4]" in messages[0]


@triton.jit
def pass_round(peers, rank, call, SEND: tl.constexpr, WORLD: tl.constexpr):
    """Tell the next rank, and wait for the one before. Grid: (1,)."""
    if SEND:
        notify(peers, (rank + 1) % WORLD, 0, call)
    wait(peers, rank, 0, call)


def rounds(home: Home, silent: Sequence[int], calls: int = 2) -> None:
    """The ranks pass on a signal; in the last call some only wait for theirs."""
    peers = peers_of(home.zeros("round.signals", (1,), torch.int64))
    for call in range(1, calls + 1):
        send = call < calls or home.rank not in silent
        pass_round[(1,)](peers, home.rank, call, SEND=send, WORLD=3)


def test_a_hang_tells_the_cycle() -> None:
    """Rank r waits for rank r - 1, which set its signal in the call before."""
    with pytest.raises(HangError) as hang:
        run(lambda home: rounds(home, silent=[0, 1, 2]), 3)
    lines = str(hang.value).splitlines()
    assert [line.split(" at ")[0] for line in lines[1:4]] == [
        f"  rank {rank} waits for round.signals[0] of rank {rank}" for rank in range(3)
    ]
    assert [line.split("; ")[1] for line in lines[1:4]] == [
        f"rank {rank} set it last" for rank in (2, 0, 1)
    ]
    assert lines[4:] == ["  the cycle: rank 0 waits for rank 2 waits for rank 1 waits for rank 0"]


def test_a_cycle_may_go_through_a_barrier() -> None:
    """Rank 0 waits for a signal from rank 2, and rank 2 waits for rank 0 to end."""
    with pytest.raises(HangError) as hang:
        run(lambda home: rounds(home, silent=[2]), 3)
    lines = str(hang.value).splitlines()
    assert lines[1].endswith("; rank 2 set it last")
    for rank in (1, 2):
        met = f"  rank {rank} waits for the others, where ranks meet; not there: rank 0"
        assert lines[1 + rank] == met
    assert lines[4:] == ["  the cycle: rank 0 waits for rank 2 waits for rank 0"]


def test_a_hang_for_a_signal_that_nobody_ever_set_says_so() -> None:
    with pytest.raises(HangError) as hang:
        run(lambda home: rounds(home, silent=[0, 1, 2], calls=1), 3)
    lines = str(hang.value).splitlines()
    assert all(line.endswith("; nobody has ever set it") for line in lines[1:4])
    assert lines[4:] == ["  no cycle is known"]


def test_to_wait_for_one_that_has_ended_is_no_cycle() -> None:
    with pytest.raises(HangError) as hang:
        run(lambda home: home.barrier() if home.rank == 0 else None, 2)
    assert str(hang.value).splitlines()[1:] == [
        "  rank 0 waits for the others, where ranks meet; not there: rank 1",
        "  rank 1 has ended",
        "  no cycle is known",
    ]


# The order of a launch's programs.


@triton.jit
def number_programs(order, count):
    """Each program notes how many ran before it. Grid: (n, 2)."""
    own = tl.program_id(0) * 2 + tl.program_id(1)
    tl.store(order + own, tl.atomic_add(count, 1))


@triton.jit
def wait_and_number(order, count, peers):
    if tl.program_id(0) < 0:
        wait(peers, 0, 0, tl.load(peers.calls))
    tl.store(order + tl.program_id(0), tl.atomic_add(count, 1))


def orders(seed: int, *, waits: bool = False) -> list[list[int]]:
    """The places of each program, in two launches on each of two ranks."""

    def work(home: Home) -> list[list[int]]:
        workspace = Workspace(home, "op", 8, torch.float32, 2)
        found = []
        for _ in range(2):
            order, count = torch.zeros(12, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            if waits:
                wait_and_number[(12,)](order, count, workspace.peers())
            else:
                number_programs[(6, 2)](order, count)
            found.append(order.tolist())
        return found

    return [order for found in run(work, 2, seed=seed) for order in found]


def test_the_seed_draws_the_order_of_programs() -> None:
    found = orders(3)
    assert all(sorted(order) == [*range(12)] for order in found)
    assert len({tuple(order) for order in found}) == 4
    assert orders(3) == found != orders(4)


def test_programs_that_may_wait_for_each_other_run_by_number() -> None:
    assert orders(3, waits=True) == [[*range(12)]] * 4


@triton.jit
def add_up(sums, x):
    """Wrong: a program relies on the one before. Grid: (n,)."""
    at = tl.program_id(0)
    before = tl.load(sums + at - 1, mask=at > 0, other=0.0)
    tl.store(sums + at, before + tl.load(x + at))


def test_a_program_that_relies_on_the_one_before_is_found() -> None:
    def work(home: Home) -> list[float]:
        sums = torch.zeros(8)
        add_up[(8,)](sums, torch.ones(8))
        return sums.tolist()

    found = [run(work, 1, seed=seed)[0] for seed in range(3)]
    assert all(sums != [float(n) for n in range(1, 9)] for sums in found)
