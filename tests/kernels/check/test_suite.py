"""The checks in `weft check kernels`: ops have no findings, and planted faults do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.faults import planted
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.check import suite
from weft.kernels.check.ops import attention
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.ops.products import OVERLAPPED, in_fp8
from weft.kernels.check.ops.table import OPS, named
from weft.kernels.check.ranks import run
from weft.kernels.check.suite import Check, checks, perform
from weft.kernels.gpu.attention import decode, kernel, mixed, paged, sequence_parallel
from weft.kernels.gpu.collectives import all_gather, all_gather_ll, chunks
from weft.kernels.gpu.matmul import all_gather_matmul, matmul_reduce_scatter
from weft.kernels.gpu.runtime import low_latency, signals
from weft.kernels.gpu.runtime.workspace import Workspace

GATHER = OPS[0]
(MATMUL,) = (op for op in OPS if op.name == "all_gather_matmul")


def communicates(op: Op) -> bool:
    """Whether the op runs on several ranks; an op on one rank has an empty workspace."""
    sizes = Sizes(1, 16, 16, 16, torch.float32, (16, 16, 16))
    (workspace,) = run(lambda home: op.workspace(home, sizes), 1)
    return (workspace.numel, workspace.num_signals) != (1, 1)


TOGETHER = [op for op in OPS if communicates(op)]
MANY_RANKS = [op for op in TOGETHER if "matmul" not in op.name and "gate_up" not in op.name]
SMALLER = 20
"""Maximum m, n and k: up to two tiles."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "op",
    [op for op in OPS if not re.search("fp8|far|grouped_gate_up|decomposed_.*_ring", op.name)],
    ids=lambda op: op.name,
)
def test_nothing_is_found_in_the_ops(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    """On three ranks, or on one for single-rank ops; variants with their own tests run in the long
    run.
    """
    monkeypatch.setattr(suite, "LARGEST", SMALLER)
    assert perform(Check(op, 3 if op in TOGETHER else 1, 0)).findings == ()


@pytest.mark.parametrize(
    "op", named(["all_gather", "reduce_scatter_two_level"]), ids=lambda op: op.name
)
def test_nothing_is_found_among_eight_ranks(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "LARGEST", SMALLER)
    assert perform(Check(op, 8, 0)).findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_nothing_is_found_in_larger_ones(op: Op, world_size: int) -> None:
    if world_size < 8 or op in MANY_RANKS:
        assert perform(Check(op, world_size, 0)).findings == ()


COUNTING = (
    *("all_gather", "all_gather_ll", "all_reduce_ll", "all_gather_matmul", "matmul_all_reduce"),
    *("moe_dispatch_combine", "distributed_decode_attention"),
)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=() if op.name in COUNTING else pytest.mark.slow, id=op.name)
        for op in TOGETHER
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_is_found_after_billions_of_calls(
    op: Op, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "LARGEST", SMALLER)
    assert suite.CALLS_BEFORE[seed] > 2**30
    assert perform(Check(op, 2, seed)).findings == ()


@pytest.mark.parametrize(
    ("name", "seed", "change"),
    [
        ("all_gather", 1, ("if seen < value:", "if seen.to(tl.int32) < value.to(tl.int32):")),
        ("all_gather", 1, ("(call & 1).to(tl.int32)", "call.to(tl.int32) % 2")),
        (
            "all_gather_ll",
            2,
            ("(tl.cast(call, tl.int64) - 1) % 4294967295 + 1", "call & 4294967295"),
        ),
    ],
    ids=["signals", "slots", "flags"],
)
def test_counters_that_wrap_are_found(
    name: str, seed: int, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suite, "LARGEST", SMALLER)
    (op,) = named([name])
    parts = [low_latency, all_gather_ll] if name == "all_gather_ll" else [signals, chunks]
    faulty = planted(all_gather, tmp_path, change, parts=parts)
    assert perform(Check(replace(op, function=faulty.all_gather), 2, seed)).findings


def test_a_check_draws_the_same_again() -> None:
    first, again, other = (perform(Check(GATHER, 3, seed)) for seed in (1, 1, 2))
    assert first == again
    assert (first.m, first.k) != (other.m, other.k)


def test_calls_differ_in_rows_tiles_and_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one workspace, made for the largest call, if none is replayed."""
    monkeypatch.setattr(suite, "CALLED", suite.CALLS)
    seen = []

    def record(*tensors: Tensor, **options: Any) -> Tensor:
        seen.append((len(tensors[0]), options["blocks"], options["programs"]))
        return MATMUL.function(*tensors, **options)

    for seed in range(3):
        outcome = perform(Check(replace(MATMUL, function=record), 1, seed))
        assert outcome.findings == ()
        assert tuple(rows for rows, _, _ in seen[-4:]) == outcome.m
    for values in zip(*seen, strict=True):
        assert len(set(values)) > 2


def wrong_number(x: Tensor, workspace: Workspace) -> Tensor:
    out = all_gather.all_gather(x, workspace)
    if workspace.rank == 1:
        out[2, 0] += 1
    return out


def wrong_shape(x: Tensor, workspace: Workspace) -> Tensor:
    return all_gather.all_gather(x, workspace)[1:]


def failing(x: Tensor, workspace: Workspace) -> Tensor:
    raise RuntimeError("as planted")


@pytest.mark.parametrize(
    ("function", "finding"),
    [
        (wrong_number, r"call 0, rank 1: 1 of \d+ numbers differ from the oracle's; \[2, 0\] is"),
        (wrong_shape, r"call 0, rank 0: shape is \[\d+, \d+\], the oracle's \[\d+, \d+\]"),
        (failing, "on rank .: as planted"),
    ],
)
def test_wrong_results_are_found(function: Callable[..., Tensor], finding: str) -> None:
    findings = perform(Check(replace(GATHER, function=function), 3, 0)).findings
    assert re.search(finding, findings[0])


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("wait(peers, rank, first + index", "pass  # (", "all_gather.buffer["),
        ("notify(peers, peer, index", "notify(peers, rank, index", "no rank can go on"),
        ("index * WORLD + {}", "{} * tl.num_programs(1) + index", "is reused"),
    ],
    ids=["dropped wait", "signal to itself", "signals placed by the shape"],
)
def test_faults_of_a_protocol_are_found(old: str, new: str, finding: str, tmp_path: Path) -> None:
    changes = {(old.format(who), new.format(who)) for who in ("rank", "source")}
    faulty = planted(all_gather, tmp_path, *sorted(changes), parts=[chunks])
    op = replace(GATHER, function=faulty.all_gather)
    found = (f for seed in range(3) for f in perform(Check(op, 3, seed)).findings)
    assert any(finding in f for f in found)


@pytest.mark.parametrize(
    ("module", "name", "old", "new"),
    [
        (
            all_gather_matmul,
            "all_gather_matmul",
            "tl.where(step > 0, gathered_scales + first + own, epilogue.x_scale)",
            "epilogue.x_scale",
        ),
        (matmul_reduce_scatter, "matmul_reduce_scatter", "x_scale + first if", "x_scale if"),
        (
            matmul_reduce_scatter,
            "matmul_all_reduce",
            "w_scale, row, m, column, N, SCALE_ROWS",
            "w_scale, row, m, 0, N, SCALE_ROWS",
        ),
    ],
    ids=["of this rank's rows", "of the first owner's rows", "of the first columns"],
)
def test_scales_of_others_are_found(
    module: ModuleType, name: str, old: str, new: str, tmp_path: Path
) -> None:
    faulty = planted(module, tmp_path, (old, new))
    (op,) = (op for op in OVERLAPPED if op.name == name)
    scaled = in_fp8(
        replace(op, function=getattr(faulty, name)), gathers=name == "all_gather_matmul"
    )
    found = (f for seed in range(3) for f in perform(Check(scaled, 3, seed)).findings)
    assert any("differ from the oracle's" in f for f in found)


@pytest.mark.parametrize("name", ["mixed_attention", "mixed_attention_fp8"])
@pytest.mark.parametrize(
    "change",
    [
        ("tl.where(queries == 1, 0, queries)", "0 * queries"),
        ("place = first * HEADS + row % HEADS", "place = row"),
    ],
    ids=["prompts that are left out", "decodes in their requests' rows"],
)
def test_faults_of_launches_for_decodes_and_prompts_are_found(
    name: str, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = planted(mixed, tmp_path, change, parts=[kernel, paged, decode])
    monkeypatch.setattr(attention, "mixed_attention", faulty.mixed_attention)
    found = perform(Check(*named([name]), 1, 0)).findings
    assert any("differ from the oracle's" in f for f in found)


def test_splits_that_share_a_part_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs of a launch store to one element of a tensor that no other rank has."""
    change = ("row = tl.cast(split, tl.int64) * rows + row", "row = tl.cast(row, tl.int64)")
    faulty = planted(decode, tmp_path, change, parts=[kernel, paged])
    monkeypatch.setattr(attention, "decode_attention", faulty.decode_attention)
    found = perform(Check(*named(["decode_attention"]), 1, 0)).findings
    for tensor in ("attend.out[", "attend.lse["):
        assert any(f.startswith(tensor) and "no order between" in f for f in found)


def test_an_op_that_ends_before_its_second_stream_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still reads operands that a caller may overwrite."""
    faulty = planted(sequence_parallel, tmp_path, ("workspace.rejoin()", "pass"))
    name = "sequence_parallel_attention"
    monkeypatch.setattr(attention, name, getattr(faulty, name))
    found = perform(Check(*named([name]), 2, 0)).findings
    assert any(f.startswith("push_parts.") and "beside" in f for f in found)


@pytest.mark.parametrize("called", [suite.CALLED, suite.CALLS])
def test_a_call_that_the_host_counts_is_found_by_a_replay(
    called: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is right in each call that the host makes, but a CUDA graph keeps it."""
    monkeypatch.setattr(suite, "CALLED", called)
    made = Counter[int]()

    def gather(x: Tensor, workspace: Workspace) -> Tensor:
        made[workspace.rank] += 1
        number = torch.full((1,), made[workspace.rank])
        workspace.peers = partial(Workspace.peers, workspace, calls=number)  # type: ignore[method-assign]
        return all_gather.all_gather(x, workspace)

    op = replace(GATHER, function=gather)
    found = [f for seed in (0, 3, 6) for f in perform(Check(op, 2, seed)).findings]
    if called == suite.CALLS:
        assert found == []
    else:
        assert any("no order between" in f for f in found)


def test_ops_have_names_of_their_own() -> None:
    names = [op.name for op in OPS]
    assert sorted(names) == sorted(set(names))


def test_checks_are_every_op_on_every_world_size_with_every_seed() -> None:
    assert len(checks([], [1, 2], range(5))) == len(OPS) * 2 * 5
    assert [c.op.name for c in checks(["all_gather"], [2], range(2))] == ["all_gather"] * 2


def test_what_cannot_be_checked_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"op is 'gather' \(did you mean all_gather\?\); it must"):
        checks(["gather"], [1], range(1))
    with pytest.raises(ConfigError, match=r"world size is 0; it must be in \[1, 16\]"):
        checks([], [0], range(1))
