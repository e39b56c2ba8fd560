"""Logits that ranks share: the likeliest token, and rows put together."""

from __future__ import annotations

import pytest
import torch
from support.split import running, take_part

from weft.kernels.cpu.argmax import argmax
from weft.models.torch.logits import Logits

NAN, INF = float("nan"), float("inf")


def cases(columns: int) -> list[torch.Tensor]:
    torch.manual_seed(columns)
    plain = torch.randn(5, columns)
    ties = torch.randint(0, 2, (5, columns)).float()
    strange = plain.clone()
    strange[0, -1] = NAN
    strange[1, 0] = INF
    strange[2] = -INF
    strange[3, 1], strange[3, columns - 1] = INF, NAN
    return [plain, plain.bfloat16(), ties, strange]


@pytest.mark.parametrize("columns", [9, 1000])  # of 9, the last rank has none
def test_all_ranks_are_told_what_one_would_be(columns: int) -> None:
    with running(4, take_part, columns, cases(columns)) as pipes:
        for whole in cases(columns):
            largest, index = argmax(whole)
            for pipe in pipes:
                value, at, rows = map(torch.tensor, pipe.recv())
                torch.testing.assert_close(value, largest, rtol=0, atol=0, equal_nan=True)
                finite = value.isfinite()
                assert torch.equal(at[finite], index[finite])
                expected = whole[[2, 0]].float()
                torch.testing.assert_close(rows, expected, rtol=0, atol=0, equal_nan=True)


def test_of_one_rank_nothing_is_moved() -> None:
    (whole, *_) = cases(50)
    logits = Logits.whole(whole)
    assert len(logits) == 5
    assert logits.argmax()[1].tolist() == whole.argmax(1).tolist()
    assert torch.equal(logits.rows(slice(None)), whole)
