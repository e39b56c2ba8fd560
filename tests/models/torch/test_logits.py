"""Logits shared by ranks: all ranks get the same results as one rank alone."""

from __future__ import annotations

import pytest
import torch
from support.split import running, take_part, told_of

from weft.kernels.cpu.sampling import argmax
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


# Of 9 columns, the last rank has none.
@pytest.mark.parametrize("columns", [9, pytest.param(1000, marks=pytest.mark.slow)])
def test_all_ranks_are_told_what_one_would_be(columns: int) -> None:
    with running(4, take_part, columns, cases(columns)) as pipes:
        for whole in cases(columns):
            expected = told_of(Logits.whole(whole))
            largest, index = argmax(whole)
            for pipe in pipes:
                told = [torch.tensor(answer) for answer in pipe.recv()]
                torch.testing.assert_close(told[0], largest, rtol=0, atol=0, equal_nan=True)
                finite = told[0].isfinite()
                assert torch.equal(told[1][finite], index[finite])
                for answer, one in zip(told[2:], expected[2:], strict=True):
                    torch.testing.assert_close(answer, torch.tensor(one), equal_nan=True)


def test_of_one_rank_nothing_is_moved() -> None:
    (whole, *_) = cases(50)
    logits = Logits.whole(whole)
    assert len(logits) == 5
    assert logits.argmax()[1].tolist() == whole.argmax(1).tolist()
    assert logits.float_rows(slice(None)).local.data_ptr() == whole.data_ptr()
    assert torch.equal(logits.float_rows([2, 0]).local, whole[[2, 0]])


def test_heads_say_what_is_not_in_them() -> None:
    whole = torch.randn(3, 100)
    logits = Logits.whole(whole)
    values, ids, unlisted = logits.candidates(7)
    largest = whole.sort(descending=True).values
    assert torch.equal(values, largest[:, :7])
    assert torch.equal(whole.gather(1, ids), values)
    assert torch.equal(unlisted, largest[:, 6])
    assert torch.equal(logits.candidates(100)[0], largest)
    assert logits.candidates(100)[2].tolist() == [-INF] * 3
