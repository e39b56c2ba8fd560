"""Attention of a sequence that is split over ranks: oracle, what is sent, races, planted faults."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import SEEDS, SLOWNESS, run_calls
from support.paged import TOLERANCE
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.aot import TENSOR_CORES
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.attention import kernel
from weft.kernels.gpu.attention import sequence_parallel as module
from weft.kernels.gpu.attention.sequence_parallel import (
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.collectives import chunks
from weft.kernels.gpu.runtime import signals
from weft.kernels.symmetric.memory import Home

SCALE = 0.4
OWN = {"blocks": (16, 16), "programs": 2}


@dataclass
class Step:
    """One call: of each rank q [m, H, D] and k, v [m, Hk, D], fresh numbers."""

    world: int
    m: int
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32
    zigzag: bool = False
    query_start: Sequence[int] | None = None
    seed: int = 0
    options: dict[str, Any] = field(default_factory=lambda: dict(OWN))

    def __post_init__(self) -> None:
        numbers = torch.Generator().manual_seed(self.seed)

        def random(heads: int) -> list[Tensor]:
            shape = (self.world, self.m, heads, self.dim)
            return list(torch.randn(shape, generator=numbers).to(self.dtype))

        self.q, self.k, self.v = map(random, (self.kv_heads * self.group, *[self.kv_heads] * 2))

    def run(self, workspace: Any, op: Any = sequence_parallel_attention) -> Tensor:
        """float32 [m, H, D + 1] on one rank: the result and its LSE."""
        rank = workspace.rank
        lse = torch.full(self.q[rank].shape[:2], torch.nan)
        starts = self.query_start
        out = op(
            *(self.q[rank], self.k[rank], self.v[rank], workspace),
            **{"scale": SCALE, "zigzag": self.zigzag, "lse": lse, **self.options},
            query_start=None if starts is None else torch.tensor(starts, dtype=torch.int32),
        )
        assert out.dtype == self.dtype
        return torch.cat([out.float(), lse[..., None]], dim=2)

    def check(self, got: Sequence[Tensor]) -> None:
        lses = [torch.empty(q.shape[:2]) for q in self.q]
        options = {"query_start": self.query_start, "zigzag": self.zigzag, "lses": lses}
        expected = reference.sequence_parallel_attention(
            *(self.q, self.k, self.v), scale=SCALE, **options
        )
        tolerance = TOLERANCE[self.dtype]
        for mine, out, lse in zip(got, expected, lses, strict=True):
            torch.testing.assert_close(mine[..., :-1], out, atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(mine[..., -1], lse, atol=1e-4, rtol=1e-4)


def workspace_for(home: Home, steps: Sequence[Step], chunk: int, of: Any = module) -> Any:
    first = steps[0]
    return of.sequence_parallel_attention_workspace(
        *(home, max(step.m for step in steps), first.kv_heads, first.dim, first.dtype, chunk)
    )


def run_steps(steps: Sequence[Step], chunk: int, seed: int, slowness: Sequence[float] = ()) -> None:
    """All of them on one workspace; each is right, and there is no race."""

    def work(home: Home) -> list[Tensor]:
        workspace = workspace_for(home, steps, chunk)
        results = [step.run(workspace) for step in steps]
        workspace.check()
        return results

    for step, got in zip(steps, run_calls(work, steps[0].world, seed, slowness), strict=True):
        step.check(got)


@settings(max_examples=4, deadline=None)
@given(
    world=st.integers(1, 4),
    halves=st.lists(st.integers(1, 11), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    dim=st.sampled_from([8, 16, 20]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    zigzag=st.booleans(),
    cuts=st.none() | st.lists(st.floats(0, 1), max_size=4),
    blocks=st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    chunk=st.sampled_from([3, 16, 20]),
    programs=st.integers(1, 3),
    senders=st.integers(0, 3),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_equals_the_attention_of_one_rank(
    world: int,
    halves: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    zigzag: bool,
    cuts: list[float] | None,
    blocks: tuple[int, int],
    chunk: int,
    programs: int,
    senders: int,
    slowness: list[float],
    seed: int,
) -> None:
    """Of sequences that begin and end anywhere, empty ones included, and of what is behind them."""
    options = {"blocks": blocks, "programs": programs, "senders": senders}
    steps = []
    for call, half in enumerate(halves):
        m = 2 * half if zigzag else 2 * half - 1
        starts = None if cuts is None else [0, *sorted(int(cut * world * m) for cut in cuts)]
        shape = (world, m, kv_heads, group, dim, dtype, zigzag, starts)
        steps.append(Step(*shape, seed=seed + call, options=options))
    run_steps(steps, chunk, seed, slowness)


def test_calls_of_several_kinds_share_a_workspace() -> None:
    """A signal is one rank's, whatever the number of chunks; fast ranks are held back by `met`."""
    kinds = [(20, False, None), (5, False, None), (12, True, [0, 9, 30]), (20, True, None)]
    kinds += [(7, False, [0, 7, 7, 14]), (1, False, None), (20, False, [0])]
    steps = [Step(3, m, 1, zigzag=zigzag, query_start=starts) for m, zigzag, starts in kinds]
    run_steps(steps, 4, 0, [1.0, 1.0, 30.0])


def test_eight_ranks() -> None:
    steps = [Step(8, 4, 1, 1, 8, zigzag=zigzag) for zigzag in (False, True)]
    run_steps(steps, 2, 0, [1.0, 20.0] * 4)


def test_what_it_chooses_by_itself() -> None:
    run_steps([Step(2, 70, 1, 2, 32, options={})], 256, 0)


def test_queries_that_are_a_part_of_a_wider_product() -> None:
    step = Step(2, 9)
    wide = torch.cat([step.q[0].flatten(1), torch.full((9, 24), torch.nan)], dim=1)
    step.q[0] = wide[:, :64].unflatten(1, (4, 16))
    assert not step.q[0].is_contiguous()
    run_steps([step], 16, 0)


def test_no_tokens() -> None:
    def work(home: Home) -> Tensor:
        workspace = sequence_parallel_attention_workspace(home, 0, 2, 16, torch.float32)
        kv = torch.zeros(0, 2, 16)
        return sequence_parallel_attention(torch.zeros(0, 4, 16), kv, kv, workspace, scale=1.0)

    assert [out.shape for out in run(work, 2)] == [(0, 4, 16)] * 2


@pytest.mark.parametrize(
    ("zigzag", "starts", "sent"),
    [
        (False, None, [[], [0], [0, 1]]),
        (False, [0, 8, 24], [[], [], [1]]),  # the second sequence begins with the second rank
        (False, [0, 8, 16, 24], [[], [], []]),
        (False, [0, 8, 15, 24], [[], [], [1]]),
        (True, None, [[1, 2], [0, 2], [0, 1]]),
        (True, [0, 12, 24], [[1, 2], [0, 2], [0, 1]]),
        (True, [0, 4, 8, 12, 16, 20, 24], [[], [], []]),
    ],
)
def test_a_rank_is_sent_what_it_needs_and_no_more(
    zigzag: bool, starts: list[int] | None, sent: list[list[int]]
) -> None:
    """By the ranks whose signals each rank has."""
    step = Step(3, 8, 1, zigzag=zigzag, query_start=starts)

    def work(home: Home) -> list[int]:
        workspace = workspace_for(home, [step], 4)
        step.run(workspace)
        home.barrier()
        came = workspace.signals.local[: workspace.met].view(-1, 3).sum(dim=0)
        return came.nonzero().flatten().tolist()

    assert run(work, 3) == sent


def test_half_of_a_zigzag_is_not_sent_to_ranks_that_it_comes_after() -> None:
    step = Step(2, 8, zigzag=True)

    def work(home: Home) -> list[list[int]]:
        workspace = workspace_for(home, [step], 4)
        step.run(workspace)
        home.barrier()
        return workspace.signals.local[:4].view(2, 2).tolist()  # [part, source]

    assert run(work, 2) == [[[0, 1], [0, 1]], [[1, 0], [0, 0]]]


@settings(max_examples=6, deadline=None)
@given(
    starts=st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 40), min_size=1, max_size=6),
    zigzag=st.booleans(),
    seed=SEEDS,
)
def test_whatever_query_start_says_no_rank_waits_for_what_does_not_come(
    starts: list[int], zigzag: bool, seed: int
) -> None:
    """Nor reads what did not come: that would be a race, or memory that was never stored to."""
    step = Step(3, 10, 1, zigzag=zigzag, query_start=starts, seed=seed)
    races = RaceDetector()

    def work(home: Home) -> None:
        workspace = workspace_for(home, [step], 4)
        for _ in range(2):
            step.run(workspace)
        workspace.check()

    run(work, 3, seed=seed, races=races)
    assert races.findings == []


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 8}, "m is 9; it must be at most 8, the workspace's maximum"),
        ({"max_tokens": -1}, "max_tokens is -1; it must be a whole number of at least 0"),
        ({"max_tokens": 2**40}, "number of elements in a rank's keys is 35184372088832; it must"),
        ({"kv_heads": 4}, "k's shape is [9, 2, 16]; it must be [9, 4, 16]"),
        ({"head_dim": 8}, "k's shape is [9, 2, 16]; it must be [9, 2, 8]"),
        ({"head_dim": 512}, "head_dim is 512; it must be at most 256"),
        ({"dtype": torch.float16}, "q's dtype is torch.float32; it must be torch.float16"),
        ({"dtype": torch.float64}, "dtype is torch.float64; it must be one of torch.float32"),
        ({"chunk": 0}, "chunk is 0; it must be a whole number of at least 1"),
        ({"rank": 1, "chunk": 4}, "chunk is 16 on rank 0 and 4 on rank 1"),
        ({"rank": 1, "scale": 2.0}, "scale is 1.0 on rank 0 and 2.0 on rank 1"),
        ({"rank": 1, "zigzag": True}, "on rank 1 m is 9; it must be even with zigzag"),
        ({"q": torch.zeros(9, 3, 16)}, "k's heads is 2; it must divide q's 3 heads"),
        ({"q": torch.zeros(9, 64)}, "q's shape is [9, 64]; it must be [T, H, D]"),
        ({"rank": 1, "q": torch.zeros(8, 4, 16)}, "on rank 1 k's shape is [9, 2, 16]; it must"),
        ({"k": torch.zeros(9, 2, 32)[:, :, ::2]}, "k's stride"),
        ({"v": torch.zeros(8, 2, 16)}, "v's shape is [8, 2, 16]; it must be [9, 2, 16]"),
        ({"query_start": torch.zeros(2)}, "query_start's dtype is torch.float32; it must be torch"),
        (
            {"query_start": torch.zeros(0, dtype=torch.int32)},
            "query_start's shape is [0]; it must be [B + 1]",
        ),
        (
            {"rank": 1, "query_start": torch.zeros(2, dtype=torch.int32)},
            "query_start's length is 0 on rank 0 and 2 on rank 1",
        ),
        ({"lse": torch.zeros(9, 2)}, "lse's shape is [9, 2]; it must be [9, 4]"),
        ({"blocks": (16, 24)}, "blocks is (16, 24); it must be two powers of two"),
        ({"programs": -1}, "programs is -1"),
        ({"senders": -1}, "senders is -1; it must be positive"),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(changes: dict[str, Any], message: str) -> None:
    made = {"max_tokens": 9, "kv_heads": 2, "head_dim": 16, "dtype": torch.float32, "chunk": 16}
    tensors = {"q": torch.zeros(9, 4, 16), "k": torch.zeros(9, 2, 16), "v": torch.zeros(9, 2, 16)}
    told: list[str] = []

    def work(home: Home) -> None:
        mine = dict(changes) if home.rank == changes.get("rank", home.rank) else {}
        mine.pop("rank", None)
        sizes = {name: mine.pop(name, value) for name, value in made.items()}
        try:
            workspace = sequence_parallel_attention_workspace(home, **sizes)  # type: ignore[arg-type]
            workspace.compare = home.exchange  # type: ignore[method-assign]
            arguments = {**tensors, "scale": 1.0, **mine}
            sequence_parallel_attention(workspace=workspace, **arguments)
        except Exception as error:
            told.append(str(error))
            raise

    with pytest.raises(RankError):
        run(work, 2)
    assert told[0].startswith("sequence_parallel_attention: ")
    assert message in told[0]


# Planted faults.


def symptoms(faulty: ModuleType, wanted: str = "", **of_step: Any) -> set[str]:
    """What goes wrong over some interleavings, up to the one that shows what is wanted."""
    found = set[str]()
    for seed in range(12 if wanted else 1):
        if wanted in found:
            break
        steps = [Step(3, m, 1, seed=seed + i, **of_step) for i, m in enumerate((20, 16, 20))]
        slowness = [30.0 if rank == (seed + 1) % 3 else 1.0 for rank in range(3)]
        races, by_rank = RaceDetector(), list[list[Tensor]]()

        def work(home: Home, steps: Sequence[Step] = tuple(steps)) -> list[Tensor]:
            workspace = workspace_for(home, steps, 16, faulty)
            return [step.run(workspace, faulty.sequence_parallel_attention) for step in steps]

        with warnings.catch_warnings():  # what was never stored may be any number
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                by_rank = run(work, 3, seed=seed, slowness=slowness, races=races)
            except HangError:
                found.add("hang")
        for finding in races.findings:
            found.add("race" if "no order between" in finding else "other")
        for step, *got in zip(steps, *by_rank, strict=True) if by_rank else ():
            try:
                step.check(got)
            except AssertionError:
                found.add("wrong")
    return found


ZIGZAG, RAGGED = {"zigzag": True}, {"query_start": [0, 31, 45]}


@pytest.mark.parametrize("of_step", [{}, RAGGED, ZIGZAG, {**RAGGED, **ZIGZAG}])
def test_nothing_is_found_without_a_fault(of_step: dict[str, Any]) -> None:
    assert symptoms(module, **of_step) == set()


WAIT = "wait(peers, rank, signal, call)"
MET = "wait(peers, rank, met + peer, call - 1)"
NOTIFY = "notify(peers, peer, (index * chunks + number) * WORLD + rank, call)"
COPY = "copy_chunk(to + half, values"
TELL = "notify_all(peers, met + rank, call, WORLD)"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "symptom", "of_step"),
    [
        (WAIT, "pass", "race", {}),
        (WAIT, WAIT.replace("call)", "call - 1)"), "race", {}),
        ("number) * WORLD + source", "0) * WORLD + source", "race", {}),
        (MET, "pass", "race", {}),
        (MET, MET.replace("call - 1", "call - 2"), "race", {}),
        (MET, MET.replace("call - 1", "call + 1"), "hang", {}),
        ("slot_of(call)", "0", "race", {}),
        (COPY, f"{NOTIFY}\n            {COPY}", "race", {}),
        (NOTIFY, NOTIFY.replace(" peer,", " (peer + 1) % WORLD,"), "hang", {}),
        (NOTIFY, f"if number == 0:\n                {NOTIFY}", "hang", {}),
        (TELL, "notify(peers, rank, met + rank, call)", "hang", {}),
        ("gathered + half + come", "gathered + come", "wrong", {}),
        ("key <= position[:, None]", "key <= position[:, None] + 1", "wrong", {}),
        (
            "inner = tl.minimum(high_here, first_",
            "inner = tl.minimum(high_here, last_",
            "wrong",
            {},
        ),
        ("end_block - interior)", "end_block - interior - 1)", "wrong", {}),
        ("turn // PARTS, turn % PARTS", "turn // PARTS, 0", "wrong", ZIGZAG),
        ("tl.where(index == 0, rank, 2", "tl.where(index == 1, rank, 2", "wrong", ZIGZAG),
        ("index * length + query, part", "query, part", "wrong", ZIGZAG),
        ("range(WORLD * PARTS)", "range(WORLD * PARTS - 1)", "wrong", ZIGZAG),
        ("needed = needed | is", "needed = is", "hang", {**RAGGED, **ZIGZAG}),
        (" & (key >= seen_from[:, None])", "", "wrong", RAGGED),
        ("tl.cdiv(tl.maximum(inner_begin -", "tl.cdiv(tl.maximum(begin -", "wrong", RAGGED),
        ("+ begin + half) <= position", "+ begin + half) < position", "wrong", RAGGED),
        ("left -= half", "left = half", "wrong", RAGGED),
    ],
)
def test_a_fault_is_found(
    old: str, new: str, symptom: str, of_step: dict[str, Any], tmp_path: Path
) -> None:
    assert symptom in symptoms(planted(module, tmp_path, (old, new)), symptom, **of_step)


def test_signals_that_order_nothing_are_found(tmp_path: Path) -> None:
    relaxed = ('value, sem="release", scope="sys")', 'value, sem="relaxed", scope="sys")')
    faulty = planted(module, tmp_path, relaxed, parts=[signals, chunks])
    assert "race" in symptoms(faulty, "race")


def test_a_softmax_without_its_anchor_is_found(tmp_path: Path) -> None:
    change = ("fade = tl.exp2(top - anchor)", "fade = tl.exp2(top - top)")
    faulty = planted(module, tmp_path, change, parts=[kernel])
    assert "wrong" in symptoms(faulty, "wrong")


# What the interpreter cannot show.

EVERY_TILE = """
import sys
import torch
from weft.kernels.check.aot import LoneRank, compiling, describe
from weft.kernels.gpu.attention.sequence_parallel import (
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
target, dtype = sys.argv[1], torch.bfloat16
for dim in (64, 80, 128, 256):
    for m in (2, 1000):
        with compiling(target) as launches, LoneRank(3, 8, target) as home:
            workspace = sequence_parallel_attention_workspace(home, m, 2, dim, dtype)
            q, k = (torch.empty(m, heads, dim, dtype=dtype) for heads in (16, 2))
            options = {"query_start": torch.zeros(3, dtype=torch.int32), "zigzag": True}
            options["lse"] = torch.empty(m, 16)
            sequence_parallel_attention(q, k, k, workspace, scale=0.1, **options)
        row = describe("sequence_parallel_attention", target, launches[-1])
        for problem in row.problems:
            print(dim, m, row.constants, problem)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", TENSOR_CORES)
def test_no_tile_of_its_choice_spills(target: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", EVERY_TILE, target],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
