"""Taking turns: results, seeds, failures and hangs."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.check.ranks import HangError, RankError, run
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
    assert "rank 2 asks for x float32 [5]; the others for x float32 [4]" in messages[0]
