"""The network between nodes: puts arrive as late as OpenSHMEM allows; and the ops that use it.

Each planted fault relies on something that OpenSHMEM does not promise, and must be found.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support import collectives
from support.faults import planted
from support.peers import peers_of
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.collectives import (
    all_gather,
    all_gather_two_level,
    reduce_scatter,
    reduce_scatter_two_level,
)
from weft.kernels.gpu.runtime import nvshmem
from weft.kernels.symmetric.memory import Home

CHUNK = 16
NODES = st.sampled_from([(4, 2), (2, 1), (3, 1), (6, 3), (6, 2)])
SLOWNESS = st.lists(st.sampled_from([1.0, 1.0, 20.0]), min_size=6, max_size=6)
SHAPES = st.sampled_from([(1,), (5, 3), (33,), (41,)])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 5e-2}


@settings(max_examples=8, deadline=None)
@given(
    nodes=NODES,
    shapes=st.lists(SHAPES, min_size=2, max_size=3),
    dtype=DTYPES,
    slowness=SLOWNESS,
    seed=st.integers(0, 2**31),
)
def test_two_level_methods_between_nodes(
    nodes: tuple[int, int],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    slowness: list[float],
    seed: int,
) -> None:
    """Both ops in turn, each call with another shape, some ranks late."""
    size, node = nodes
    torch.manual_seed(seed)
    shards = [[torch.randn(shape).to(dtype) for _ in range(size)] for shape in shapes]
    xs = [
        [torch.randn(size * shape[0], *shape[1:]).to(dtype) for _ in range(size)]
        for shape in shapes
    ]

    def work(home: Home) -> tuple[list[Tensor], list[Tensor]]:
        options = {"chunk": CHUNK, "ranks_per_node": node}
        gather = all_gather.all_gather_workspace(home, 41, dtype, ["two_level"], **options)
        scatter = reduce_scatter.reduce_scatter_workspace(home, 41, dtype, ["two_level"], **options)
        gathered, scattered = [], []
        for shard, x in zip(shards, xs, strict=True):
            gathered.append(all_gather.all_gather(shard[home.rank], gather, method="two_level"))
            scattered.append(
                reduce_scatter.reduce_scatter(x[home.rank], scatter, method="two_level")
            )
        gather.check()
        scatter.check()
        return gathered, scattered

    races = RaceDetector()
    by_rank = run(work, size, seed=seed, slowness=slowness[:size], races=races, ranks_per_node=node)
    assert races.findings == []
    for rank, (gathered, scattered) in enumerate(by_rank):
        for mine, call in zip(gathered, shards, strict=True):
            assert torch.equal(mine, reference.all_gather(call)[0])
        for mine, call in zip(scattered, xs, strict=True):
            oracle = reference.reduce_scatter(call)[rank]
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(mine.float(), oracle, atol=tolerance, rtol=tolerance)


# Guarantees of the network, and their limits.


@triton.jit
def send(x, signals, value, rank, QUIET: tl.constexpr, AGAIN: tl.constexpr):
    """Put two rows of 16 to the other rank, and perhaps store to the first one again."""
    at = tl.arange(0, 16)
    for row in range(2):
        tl.store(x + row * 16 + at, value + row)
        source = (x + row * 16).to(tl.int64)
        signal = (signals + row).to(tl.int64)
        nbytes = tl.full((), 64, tl.int64)
        nvshmem.put_signal(source + 128, source, nbytes, signal, value.to(tl.int64), 1 - rank)
    if QUIET:
        nvshmem.quiet()
    if AGAIN:
        tl.store(x + at, -1)


@triton.jit
def receive(out, x, signals, value, rank, peers, WAITED: tl.constexpr):
    """Wait for one row, and copy it."""
    signal, at = (signals + WAITED).to(tl.int64), tl.arange(0, 16)
    nvshmem.wait(signal, value.to(tl.int64), peers, rank, 0)
    tl.store(out + at, tl.load(x + 32 + WAITED * 16 + at))


@triton.jit
def receive_other(out, x, signals, value, rank, peers, WAITED: tl.constexpr):
    """Wait for one row, and copy the other one."""
    signal, at = (signals + WAITED).to(tl.int64), tl.arange(0, 16)
    nvshmem.wait(signal, value.to(tl.int64), peers, rank, 0)
    tl.store(out + at, tl.load(x + 32 + (1 - WAITED) * 16 + at))


@triton.jit
def receive_relaxed(out, x, signals, value, rank, peers, WAITED: tl.constexpr):
    """Look at the signal, and never wait as NVSHMEM wants it."""
    signal, at = (signals + WAITED).to(tl.int64), tl.arange(0, 16)
    seen = nvshmem._signal_fetch(signal)
    while seen < value:
        seen = nvshmem._signal_fetch(signal)
    tl.store(out + at, tl.load(x + 32 + WAITED * 16 + at))


def exchange(
    kernel: object, seed: int, waited: int = 0, *, quiet: bool = False, again: bool = False
) -> tuple[list[int], list[str]]:
    """Return the data received on each of two ranks, and the races found."""

    def work(home: Home) -> int:
        x = home.zeros("x", (4, 16), torch.int32)
        signals = home.zeros("signals", (2,), torch.int64)
        out, peers = torch.zeros(16, dtype=torch.int32), peers_of(signals, max_polls=100)
        send[(1,)](x.local, signals.local, 7, home.rank, QUIET=quiet, AGAIN=again)
        kernel[(1,)](out, x.local, signals.local, 7, home.rank, peers, WAITED=waited)  # type: ignore[index]
        assert peers.fault.tolist() == [-1] * 4
        assert len(set(out.tolist())) == 1
        return int(out[0])

    races = RaceDetector()
    return run(work, 2, seed=seed, races=races, ranks_per_node=1), races.findings


@pytest.mark.parametrize("waited", [0, 1])
@pytest.mark.parametrize("quiet", [False, True])
def test_data_is_there_before_its_signal(waited: int, quiet: bool) -> None:
    for seed in range(5):
        assert exchange(receive, seed, waited, quiet=quiet) == ([7 + waited] * 2, [])


@pytest.mark.parametrize("waited", [0, 1])
def test_a_put_does_not_wait_for_another(waited: int) -> None:
    came, findings = zip(*(exchange(receive_other, seed, waited) for seed in range(5)), strict=True)
    assert all("no order between" in found[0] for found in findings)
    assert any(0 in each for each in came)  # it has overtaken


def test_a_quiet_of_the_sender_orders_its_puts_but_tells_nobody() -> None:
    for seed in range(5):
        _, findings = exchange(receive_other, seed, quiet=True)
        assert "no order between" in findings[0]


def test_a_signal_that_is_only_looked_at_orders_nothing() -> None:
    for seed in range(3):
        assert "no order between" in exchange(receive_relaxed, seed)[1][0]


def test_a_source_is_read_until_the_quiet() -> None:
    came, findings = zip(*(exchange(receive, seed, again=True) for seed in range(5)), strict=True)
    assert all("by put" in found[0] for found in findings)
    assert any(-1 in each for each in came)  # it was stored over before it had left
    for seed in range(5):
        assert exchange(receive, seed, quiet=True, again=True) == ([7, 7], [])


@triton.jit
def answer(x, signals, rank, peers, QUIET: tl.constexpr):
    """Store to a source again once the other rank has answered that it has the data."""
    at, one = tl.arange(0, 16), tl.full((), 1, tl.int64)
    source, nbytes = x.to(tl.int64), tl.full((), 64, tl.int64)
    tl.store(x + at, 1)
    nvshmem.put_signal(source + 64, source, nbytes, signals.to(tl.int64), one, 1 - rank)
    nvshmem.wait(signals.to(tl.int64), one, peers, rank, 0)
    answered = (signals + 1).to(tl.int64)
    nvshmem.put_signal(source + 192, source + 128, nbytes, answered, one, 1 - rank)
    nvshmem.wait(answered, one, peers, rank, 1)
    if QUIET:
        nvshmem.quiet()
    tl.store(x + at, 2)


@pytest.mark.parametrize("quiet", [False, True])
def test_an_answer_does_not_free_the_source(quiet: bool) -> None:
    def work(home: Home) -> None:
        x = home.zeros("x", (4, 16), torch.int32)
        signals = home.zeros("signals", (2,), torch.int64)
        peers = peers_of(signals, max_polls=100)
        answer[(1,)](x.local, signals.local, home.rank, peers, QUIET=quiet)

    races = RaceDetector()
    run(work, 2, seed=1, races=races, ranks_per_node=1)
    assert bool(races.findings) != quiet


@triton.jit
def signal_twice(x, signals, rank, QUIET: tl.constexpr):
    """Set a signal of the other rank by two puts, to different rows."""
    source, nbytes = x.to(tl.int64), tl.full((), 64, tl.int64)
    for number in range(2):
        value = tl.full((), 1, tl.int64) + number
        to = source + 64 + 64 * number
        nvshmem.put_signal(to, source, nbytes, signals.to(tl.int64), value, 1 - rank)
        if QUIET:
            nvshmem.quiet()
    nvshmem.quiet()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_signal_is_set_again_after_a_quiet(quiet: bool) -> None:
    def work(home: Home) -> None:
        x = home.zeros("x", (3, 16), torch.int32)
        signals = home.zeros("signals", (1,), torch.int64)
        signal_twice[(1,)](x.local, signals.local, home.rank, QUIET=quiet)

    for seed in range(3):
        races = RaceDetector()
        run(work, 2, seed=seed, races=races, ranks_per_node=1)
        assert races.findings == [] if quiet else "is reused" in races.findings[0]


@triton.jit
def put_blocking(x, rank):
    """The source of a put without a signal is free when the put returns."""
    at = tl.arange(0, 16)
    tl.store(x + at, 3)
    nvshmem.put(x.to(tl.int64) + 64, x.to(tl.int64), tl.full((), 64, tl.int64), 1 - rank)
    tl.store(x + at, 4)


def test_a_blocking_put_has_read_its_source() -> None:
    def work(home: Home) -> list[int]:
        x = home.zeros("x", (2, 16), torch.int32)
        put_blocking[(1,)](x.local, home.rank)
        nvshmem.quiet[(1,)]()
        home.barrier()
        return x.local[:, 0].tolist()  # type: ignore[no-any-return]

    races = RaceDetector()
    assert run(work, 2, races=races, ranks_per_node=1) == [[4, 3], [4, 3]]
    assert races.findings == []


def test_only_symmetric_memory_is_put() -> None:
    def work(home: Home) -> None:
        put_blocking[(1,)](torch.zeros(32, dtype=torch.int32), home.rank)

    with pytest.raises(RankError, match=r"rank 0 puts 64 bytes at 0x.*in one of its symmetric"):
        run(work, 1)


# Planted faults.


OPS = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
PARTS = {"all_gather": [all_gather_two_level], "reduce_scatter": [reduce_scatter_two_level]}
NUMEL = 40


def symptoms(faulty: ModuleType, op: str, wanted: str = "") -> set[str]:
    """Run with 2 nodes of 2 ranks."""
    gathers = op == "all_gather"
    return collectives.symptoms(
        getattr(faulty, op),
        lambda home: getattr(faulty, f"{op}_workspace")(
            home, NUMEL, torch.float32, ["two_level"], chunk=CHUNK, ranks_per_node=2
        ),
        *(["two_level"], 4, NUMEL if gathers else 4 * NUMEL),
        lambda x, rank: x.reshape(-1) if gathers else x.sum(0).chunk(4)[rank],
        wanted,
        ranks_per_node=2,
    )


QUIET = "        nvshmem.quiet[(1,)](num_warps=1, extern_libs=workspace.extern_libs)\n"
PUT = "nvshmem.put_signal(source, source, nbytes, signal, call.to(tl.int64), peer)"
PUT_SUM = "nvshmem.put_signal(row, source, nbytes, signal, call.to(tl.int64), peer)"
WAIT_PASSED_ON = """            nvshmem.wait_across(
                peers.buffers, source, peers, at, across, at_across, rank, call, FAR
            )
"""
WAIT_NODES = """            nvshmem.wait_across(
                peers.buffers, sender, peers, first + at, across, at, rank, call, FAR
            )
"""
EIGHT_BYTES = "tl.full((), 8, tl.int64)"


@pytest.mark.parametrize("op", OPS)
def test_nothing_is_found_without_a_fault(op: str) -> None:
    assert symptoms(OPS[op], op) == set()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("op", "old", "new", "symptom"),
    [
        # a missing wait
        ("all_gather", WAIT_PASSED_ON, "", "race"),
        ("reduce_scatter", WAIT_NODES, "            pass\n", "race"),
        # a source that is reused before the quiet
        ("all_gather", QUIET, "        pass\n", "race"),
        ("reduce_scatter", QUIET, "        pass\n", "race"),
        # the signal with the first numbers, the rest after it
        (
            "all_gather",
            PUT,
            PUT.replace("nbytes", EIGHT_BYTES)
            + "\n                nvshmem.put(source, source, nbytes, peer)",
            "race",
        ),
        (
            "reduce_scatter",
            PUT_SUM,
            PUT_SUM.replace("nbytes", EIGHT_BYTES)
            + "\n                nvshmem.put(row, source, nbytes, peer)",
            "race",
        ),
        # data without a signal
        ("all_gather", PUT, "nvshmem.put(source, source, nbytes, peer)", "hang"),
        # the last call's signal, and another chunk's signal
        ("all_gather", "signal, call.to(tl.int64)", "signal, call.to(tl.int64) - 1", "hang"),
        ("reduce_scatter", "8 * (index * nodes + node)", "8 * node", "hang"),
        # a slot reused one call early
        ("all_gather", "slot_of(call)", "0", "race"),
        ("reduce_scatter", "slot_of(call) * sums.numel", "0", "race"),
        # to the wrong place, or rank
        ("reduce_scatter", "row_of_sums + begin", "row_of_sums", "unwritten"),
        ("all_gather", PUT, PUT.replace("peer", "(peer + 1) % WORLD"), "hang"),
    ],
)
def test_a_fault_is_found(op: str, old: str, new: str, symptom: str, tmp_path: Path) -> None:
    faulty = planted(OPS[op], tmp_path, (old, new), parts=PARTS[op])
    assert symptom in symptoms(faulty, op, symptom)


@pytest.mark.parametrize("op", OPS)
def test_a_plain_store_instead_of_a_put_is_found(op: str, tmp_path: Path) -> None:
    """There is no address to store to."""
    changes = [("FAR=far", "FAR=False"), ("address != 0", "True")]
    faulty = planted(OPS[op], tmp_path, *changes, parts=PARTS[op])
    with pytest.raises(RankError, match="in no memory of any rank"):
        symptoms(faulty, op)
