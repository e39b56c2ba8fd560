"""Attention over pages of several ranks equals that of one, without races; and planted faults."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS, SLOWNESS
from support.paged import Case, Shape, shapes
from torch import Tensor

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.attention import distributed_decode as module
from weft.kernels.gpu.attention import kernel
from weft.kernels.gpu.attention.distributed_decode import distributed_decode_attention_workspace
from weft.kernels.gpu.attention.inputs import ON_ANOTHER_RANK, OUT_OF_POOL
from weft.kernels.gpu.runtime import low_latency
from weft.kernels.symmetric.memory import Home

MAX_REQUESTS = 4
Got = list[tuple[Tensor, Tensor]]


def attend(
    cases: Sequence[Case],
    seed: int = 0,
    slowness: Sequence[float] = (),
    faulty: Any = module,
    races: RaceDetector | None = None,
    **options: Any,
) -> list[Got]:
    """(result, LSE) of each call, of each rank."""
    shape = cases[0].shape

    def work(home: Home) -> Got:
        workspace = faulty.distributed_decode_attention_workspace(
            home, MAX_REQUESTS, shape.heads, shape.dim, shape.dtype
        )
        got = []
        for case in cases:
            batch, lse = case.batch(home.rank), case.lse()
            out = faulty.distributed_decode_attention(
                *(case.q, case.keys[home.rank], case.values[home.rank], batch, workspace),
                **{**case.options, "lse": lse, "blocks": (16, 16), **options},
            )
            assert batch.errors() == {}
            got.append((out, lse))
        workspace.check()
        return got

    slow = slowness[: shape.world] or None
    return run(work, shape.world, seed=seed, slowness=slow, races=races)


def decodes(most: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(
        st.integers(1, most).map(lambda context: (context, 1)), min_size=1, max_size=MAX_REQUESTS
    )


@settings(max_examples=5, deadline=None)
@given(
    world=st.integers(1, 4),
    shape=shapes,
    calls=st.lists(decodes(50), min_size=1, max_size=2),
    splits=st.sampled_from([0, 1, 2, 3]),
    words=st.sampled_from([16, 64, 256]),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_equals_the_attention_of_one_rank(
    world: int,
    shape: Shape,
    calls: list[list[tuple[int, int]]],
    splits: int,
    words: int,
    slowness: list[float],
    seed: int,
) -> None:
    """Also where ranks have no key at all; all have the same bits."""
    shape = replace(shape, world=world)
    cases = [Case(shape, requests, seed + i) for i, requests in enumerate(calls)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "COLLECTED_WORDS", words)
        races = RaceDetector()
        by_rank = attend(cases, seed, slowness, races=races, splits=splits)
    assert races.findings == []
    for case, *results in zip(cases, *by_rank, strict=True):
        case.close(*results[0])
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])


def test_eight_ranks() -> None:
    shape = Shape(1, 2, 16, 2, window=19, sinks=True, world=8)
    cases = [Case(shape, [(40 + i, 1), (3, 1)], i) for i in range(3)]
    races = RaceDetector()
    by_rank = attend(cases, 1, [1.0, 20.0] * 4, races=races)
    assert races.findings == []
    for case, result in zip(cases, by_rank[5], strict=True):
        case.close(*result)


def test_a_request_that_one_rank_flags_is_flagged_on_all() -> None:
    case = Case(Shape(world=3), [(40, 1), (41, 1)])
    case.tables[1][1, 2] = -1

    def work(home: Home) -> tuple[Tensor, Tensor, Tensor]:
        workspace = distributed_decode_attention_workspace(home, 2, 4, 16, torch.float32)
        batch, lse = case.batch(home.rank), case.lse()
        out = module.distributed_decode_attention(
            *(case.q, case.keys[home.rank], case.values[home.rank], batch, workspace),
            **{**case.options, "lse": lse},
        )
        assert list(batch.errors()) == [1]
        return batch.status, out, lse

    expected, expected_lse = Case(Shape(world=3), [(40, 1), (41, 1)]).oracle
    for rank, (status, out, lse) in enumerate(run(work, 3)):
        assert status.tolist() == [0, ON_ANOTHER_RANK | (OUT_OF_POOL if rank == 1 else 0)]
        torch.testing.assert_close(out[0], expected[0], atol=3e-5, rtol=3e-5)
        torch.testing.assert_close(lse[0], expected_lse[0], atol=3e-5, rtol=3e-5)
        assert (out[1] == 0).all()
        assert (lse[1] == torch.inf).all()


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 1}, "requests is 2; it must be at most 1, the workspace's"),
        ({"heads": 8}, "H, D is [4, 16]; it must be [8, 16], the workspace's"),
        ({"dtype": torch.float16}, "q's dtype is torch.float32; it must be torch.float16"),
        ({"dtype": torch.float64}, "dtype is torch.float64; it must be one of torch.float32"),
        ({"head_dim": 3, "dtype": torch.float16}, "head_dim is 3; it must be even with torch.flo"),
        ({"heads": 0}, "heads is 0; it must be a whole number of at least 1"),
        ({"splits": 65}, "splits is 65; it must be from 1 to 64"),
        ({"max_queries": 2}, "max_queries is 2; it must be 1: this op is for decodes"),
        ({"rank": 1, "sliding_window": 3}, "sliding_window is None on rank 0 and 3 on rank 1"),
        ({"rank": 1, "softcap": -1.0}, "on rank 1 softcap is -1.0; it must be above 0, or None"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(changes: dict[str, Any], message: str) -> None:
    case = Case(Shape(world=2), [(20, 1), (30, 1)])
    made = {"max_requests": 2, "heads": 4, "head_dim": 16, "dtype": torch.float32}
    told: list[str] = []

    def work(home: Home) -> None:
        mine = {} if home.rank != changes.get("rank", home.rank) else dict(changes)
        mine.pop("rank", None)
        sizes = {name: mine.pop(name, value) for name, value in made.items()}
        try:
            workspace = distributed_decode_attention_workspace(home, **sizes)  # type: ignore[arg-type]
            workspace.compare = home.exchange
            batch = replace(case.batch(home.rank), max_queries=mine.pop("max_queries", 1))
            module.distributed_decode_attention(
                *(case.q, case.keys[home.rank], case.values[home.rank], batch, workspace),
                **{**case.options, **mine},
            )
        except Exception as error:
            told.append(str(error))
            raise

    with pytest.raises(RankError):
        run(work, 2)
    assert message in told[0]


# Planted faults.


FEW_WORDS = ("COLLECTED_WORDS = 256", "COLLECTED_WORDS = 64")


def symptoms(faulty: Any, wanted: str = "") -> set[str]:
    """What goes wrong over some interleavings, up to the one that shows what is wanted."""
    found = set[str]()
    for seed in range(20 if wanted else 3):
        if wanted in found:
            break
        shape = Shape(1, 2, 16, 4, sinks=True, world=3)
        lengths = [[(40, 1), (9, 1), (30, 1)], [(21, 1)], [(50, 1), (5, 1)]]
        cases = [Case(shape, requests, seed + i) for i, requests in enumerate(lengths)]
        slowness = [20.0 if rank == seed % 3 else 1.0 for rank in range(3)]
        races, by_rank = RaceDetector(), list[Got]()
        with warnings.catch_warnings():  # what was never stored may be any number
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                by_rank = attend(cases, seed, slowness, faulty, races, splits=2)
            except HangError:
                found.add("hang")
            except RankError:  # a request is flagged
                found.add("wrong")
        for finding in races.findings:
            found.add("race" if "no order between" in finding else "other")
        for case, *results in zip(cases, *by_rank, strict=True):
            for out, lse in results:
                try:
                    case.close(out, lse)
                except AssertionError:
                    found.add("wrong")
    return found


def test_nothing_is_found_without_a_fault(tmp_path: Path) -> None:
    assert symptoms(planted(module, tmp_path, FEW_WORDS)) == set()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "symptom"),
    [
        ("slot_of(call)", "0", "race"),
        ("(rank + 1 + step) % WORLD", "(rank + 0 * step) % WORLD", "hang"),
        ("put_ll(to + rows * WORDS + row, logs, call, stored)", "pass", "hang"),
        ("for step in range(WORLD)", "for step in range(WORLD - 1)", "hang"),
        ("come += source * tl", "come += (source % 2) * tl", "wrong"),
        ("total * fade[:, None] + numbers", "total + numbers", "wrong"),
        ("weight * fade + share", "weight + share", "wrong"),
        ("row % HEADS).to", "(row + 1) % HEADS).to", "wrong"),
        ("rank=workspace.rank", "rank=0", "hang"),
        ("word = of_word * WORDS + column", "word = of_word * WORDS", "wrong"),
        ("row[:, None] * WORDS + column", "row[:, None] * WORDS + column * 0", "hang"),
        ("done, rank, number, SPLITS)", "done, rank, number, SPLITS + 1)", "hang"),
        ("if count_off(done, rank, number, SPLITS):", "if split == 0:", "wrong"),
        ("for split in range(SPLITS)", "for split in range(SPLITS - 1)", "wrong"),
        ("at = split * tl.cast(rows, tl.int64) + row", "at = row", "wrong"),
    ],
)
def test_a_fault_is_found(old: str, new: str, symptom: str, tmp_path: Path) -> None:
    changes = [(old, new), FEW_WORDS]
    assert symptom in symptoms(planted(module, tmp_path, *changes), symptom)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("pages % WORLD == rank, rest, 0", "pages % WORLD == rank, 0, 0"),
        ("(pages + (WORLD - 1) - rank)", "(pages + WORLD - rank)"),
        ("(at // PAGE * WORLD + rank)", "(at // PAGE * WORLD)"),
    ],
)
def test_a_fault_in_where_tokens_are_is_found(old: str, new: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=[kernel])
    case = Case(Shape(2, 2, 16, 4, window=13, world=3), [(40, 1), (30, 1)])
    with pytest.raises((AssertionError, RankError)):  # the latter where it is flagged
        case.close(*attend([case], faulty=faulty)[0][0])


def test_flags_that_are_not_looked_at_are_found(tmp_path: Path) -> None:
    weak = planted(low_latency, tmp_path, ("!= flag) & mask", "!= flag) & mask & (call < 0)"))
    faulty = planted(module, tmp_path)
    faulty.get_ll = weak.get_ll  # type: ignore[attr-defined]
    assert "wrong" in symptoms(faulty, "wrong")
