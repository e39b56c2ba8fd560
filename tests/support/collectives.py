"""What the tests of the collectives share: what a faulty one shows, and what a call is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.symmetric.memory import Home

CALLS = 4


def in_order(xs: list[Tensor]) -> Tensor:
    """The sum as its bits are promised: in float32, in the order of the ranks, rounded once."""
    total = torch.zeros(xs[0].shape)
    for x in xs:
        total += x.float()
    return total.to(xs[0].dtype)


def results(
    op: Callable[..., Tensor],
    make: Callable[[Home, list[str]], Any],
    methods: Sequence[str],
    calls: Sequence[Sequence[Tensor]],
    size: int,
    seed: int,
    slowness: Sequence[float],
) -> list[list[Tensor]]:
    """Results of each rank, of one call after the other; no race was found.

    Args:
        op: all_gather, or another one.
        make: its workspace, for some methods.
        methods, calls: of each call the method, and what each rank gives.
        size: ranks.
        seed, slowness: of the interleaving.
    """

    def work(home: Home) -> list[Tensor]:
        workspace = make(home, sorted(set(methods)))
        out = [
            op(call[home.rank], workspace, method=method)
            for call, method in zip(calls, methods, strict=True)
        ]
        workspace.check()
        return out

    races = RaceDetector()
    by_rank = run(work, size, seed=seed, slowness=slowness[:size], races=races)
    assert races.findings == []
    return by_rank


def refused(
    op: Callable[..., Tensor],
    make: Callable[..., Any],
    methods: list[str],
    x: Tensor,
    method: str,
    **options: int,
) -> str:
    """What a call with a workspace for 64 numbers says on one of two ranks."""

    def work(home: Home) -> None:
        op(x, make(home, 64, torch.float32, methods, **options), method=method)

    with pytest.raises(RankError) as error:
        run(work, 2)
    return str(error.value)


def symptoms(
    op: Callable[..., Tensor],
    make: Callable[[Home], Any],
    methods: Sequence[str],
    size: int,
    numel: int,
    expected: Callable[[Tensor, int], Tensor],
    wanted: str = "",
    *,
    ranks_per_node: int | None = None,
) -> set[str]:
    """What goes wrong over some interleavings: findings, hangs, wrong results.

    Ends with the first interleaving by which all wanted ones are found.

    Args:
        op: all_gather, or another one.
        make: its workspace.
        methods: of the op, that calls take in turns.
        size: ranks.
        numel: of what each gives.
        expected: of what all give [size, numel], on one rank.
        wanted: symptoms, with a space between; all that are found if empty.
        ranks_per_node: that have addresses of each other; all if None.
    """
    found = set[str]()
    for seed in range(40 if wanted else 3):
        if wanted and found.issuperset(wanted.split()):
            break
        torch.manual_seed(seed)
        xs = torch.randn(CALLS, size, numel)

        def work(home: Home, xs: Tensor = xs) -> list[Tensor]:
            workspace = make(home)
            return [
                op(x[home.rank], workspace, method=method)
                for x, method in zip(xs, cycle(methods), strict=False)
            ]

        races = RaceDetector()
        try:
            by_rank = run(work, size, seed=seed, races=races, ranks_per_node=ranks_per_node)
        except HangError:
            found.add("hang")
        else:
            right = all(
                torch.allclose(mine, expected(x, rank), atol=1e-5)
                for rank, got in enumerate(by_rank)
                for mine, x in zip(got, xs, strict=True)
            )
            found |= set() if right else {"wrong"}
        found |= {
            next((name for text, name in FINDINGS.items() if text in finding), "unwritten")
            for finding in races.findings
        }
    return found


FINDINGS = {"no order between": "race", "is reused": "reused"}
"""What a finding says, and what it is called here."""
