"""Every fault planted in an op is found: a check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.faults import planted
from torch import Tensor

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, run
from weft.kernels.gpu.collectives import all_gather, chunks
from weft.kernels.gpu.matmul import all_gather_matmul, matmul_reduce_scatter
from weft.kernels.gpu.runtime import signals
from weft.kernels.symmetric.memory import Home

SIZE, CALLS, SEEDS = 3, 4, range(6)
BLOCKS = (16, 16, 16)

Op = Callable[[ModuleType, Home], list[Tensor]]


def gather(module: ModuleType, home: Home) -> list[Tensor]:
    workspace = module.all_gather_workspace(home, 40, torch.float32)
    return [module.all_gather(torch.full((8,), float(i)), workspace) for i in range(CALLS)]


def gather_matmul(module: ModuleType, home: Home) -> list[Tensor]:
    workspace = module.all_gather_matmul_workspace(home, 20, 16, torch.float32, 16)
    x, w = torch.randn(20, 16), torch.randn(16, 20)
    options = {"blocks": BLOCKS, "programs": 2}
    return [module.all_gather_matmul(x.normal_(), w, workspace, **options) for _ in range(CALLS)]


def matmul_scatter(module: ModuleType, home: Home) -> list[Tensor]:
    workspace = module.matmul_reduce_scatter_workspace(home, 10, 20, torch.float32, 16, 16)
    x, w = torch.randn(10 * SIZE, 16), torch.randn(16, 20)
    options = {"blocks": BLOCKS, "programs": 2}
    return [module.matmul_reduce_scatter(x, w, workspace, **options) for _ in range(CALLS)]


OPS = {
    "all_gather": (all_gather, gather),
    "all_gather_matmul": (all_gather_matmul, gather_matmul),
    "matmul_reduce_scatter": (matmul_reduce_scatter, matmul_scatter),
}
WAITS = {
    "all_gather": "wait(peers, rank, first + index * WORLD + source, call)",
    "all_gather_matmul": "wait(peers, rank, chunk * WORLD + shard, call)",
    "matmul_reduce_scatter": "wait_all(peers, rank, tile * WORLD, call, WORLD)",
}
TELL = "notify(peers, peer, index * WORLD + rank, call)"


def findings(module: ModuleType, op: Op) -> Iterator[str]:
    """Yield the checker's findings over several interleavings; a hang is a finding, too."""
    for seed in SEEDS:
        races = RaceDetector()
        try:
            run(lambda home: op(module, home), SIZE, seed=seed, races=races)
        except HangError as hang:
            yield str(hang)
        yield from races.findings


@pytest.mark.parametrize("name", OPS)
def test_nothing_is_found_without_a_fault(name: str) -> None:
    assert list(findings(*OPS[name])) == []


@pytest.mark.parametrize("name", OPS)
def test_a_dropped_wait_is_found(name: str, tmp_path: Path) -> None:
    module, op = OPS[name]
    faulty = planted(module, tmp_path, (WAITS[name], "pass"), parts=[chunks])
    races = (finding for finding in findings(faulty, op) if "no order between" in finding)
    race = next(races, "")
    assert ".buffer[" in race
    assert "planted_" in race


@pytest.mark.parametrize("name", OPS)
def test_a_slot_that_is_reused_one_call_early_is_found(name: str, tmp_path: Path) -> None:
    module, op = OPS[name]
    faulty = planted(module, tmp_path, ("slot_of(call) *", "0 *"), parts=[chunks])
    assert any("no order between" in finding for finding in findings(faulty, op))


@pytest.mark.parametrize(
    ("change", "race"),
    [
        (("workspace.wait_event(begun)", "pass"), ("count_calls.calls[", "store by", "load by")),
        (("workspace.rejoin()", "pass"), ("push_rows.x[", "load by", "store by")),
    ],
    ids=["for the call's number", "for what it reads"],
)
def test_a_stream_that_does_not_wait_for_the_other_is_found(
    change: tuple[str, str], race: tuple[str, ...], tmp_path: Path
) -> None:
    """It counts the call and reads the operand, which no other rank has."""
    faulty = planted(all_gather_matmul, tmp_path, change)
    found = findings(faulty, gather_matmul)
    assert any("beside" in f and all(part in f for part in race) for f in found)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sem="release", scope="sys")', 'sem="relaxed", scope="sys")'),
        ('sem="release", scope="sys")', 'sem="release", scope="gpu")'),
        ('sem="acquire", scope="sys")', 'sem="relaxed", scope="sys")'),
        ('sem="acquire", scope="sys")', 'sem="acquire", scope="gpu")'),
    ],
    ids=[
        "relaxed release",
        "release within one GPU",
        "relaxed acquire",
        "acquire within one GPU",
    ],
)
@pytest.mark.parametrize("name", ["all_gather", "matmul_reduce_scatter"])
def test_signals_that_order_nothing_are_found(
    name: str, old: str, new: str, tmp_path: Path
) -> None:
    module, op = OPS[name]
    faulty = planted(module, tmp_path, (old, new), parts=[signals, chunks])
    assert any("no order between" in finding for finding in findings(faulty, op))


@pytest.mark.parametrize("name", ["all_gather", "matmul_reduce_scatter"])
def test_a_signal_to_the_wrong_rank_is_found(name: str, tmp_path: Path) -> None:
    module, op = OPS[name]
    peer = "owner" if name == "matmul_reduce_scatter" else "peer"
    change = (f"notify(peers, {peer},", f"notify(peers, ({peer} + WORLD - 1) % WORLD,")
    faulty = planted(module, tmp_path, change, parts=[chunks])
    assert any(findings(faulty, op))


def test_a_signal_that_is_never_sent_is_a_hang_that_names_who_waits(tmp_path: Path) -> None:
    faulty = planted(
        all_gather,
        tmp_path,
        (f"\n    {TELL}", f"\n    if rank != 1:\n        {TELL}"),
        parts=[chunks],
    )
    with pytest.raises(HangError) as hang:
        run(lambda home: gather(faulty, home), SIZE)
    message = str(hang.value)
    assert "rank 0 waits for all_gather.signals[1] of rank 0" in message
    assert "rank 2 waits for all_gather.signals[1] of rank 2" in message


def test_a_signal_before_its_data_is_found(tmp_path: Path) -> None:
    copy = "copy_chunk(to, x + peer * stride, index, length, chunk, BLOCK)"
    change = (f"    {copy}\n    {TELL}", f"    {TELL}\n    {copy}")
    faulty = planted(all_gather, tmp_path, change, parts=[chunks])
    assert any("no order between" in finding for finding in findings(faulty, gather))
