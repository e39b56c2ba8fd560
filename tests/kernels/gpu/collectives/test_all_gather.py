"""All-gather, by each method and by several in turn, against its oracle; and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import collectives
from support.faults import planted
from support.overlapped import DTYPES, IN_PARTS, SEEDS, SLOWNESS
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.collectives import all_gather as module
from weft.kernels.gpu.collectives import all_gather_ll, all_gather_two_level, chunks
from weft.kernels.gpu.collectives.all_gather import METHODS, all_gather, all_gather_workspace
from weft.kernels.gpu.runtime import low_latency, multimem
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.shared import SharedHome
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

CALLS, MAX_NUMEL, CHUNK = collectives.CALLS, 1600, 64
WHOLE_UNITS = ("ll128", "multimem")
"""Methods that take whole units of 8 and 16 bytes."""

SHAPES = st.sampled_from([(1,), (5, 3), (33, 7), (2, 0), (1501,)])


@IN_PARTS
@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(1, 4),
    calls=st.lists(st.tuples(st.sampled_from(sorted(METHODS)), SHAPES), min_size=1, max_size=CALLS),
    alike=st.booleans(),
    node=st.integers(1, 4),
    dtype=DTYPES,
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_all_gather(
    part: int,
    size: int,
    calls: list[tuple[str, tuple[int, ...]]],
    alike: bool,
    node: int,
    dtype: torch.dtype,
    slowness: list[float],
    seed: int,
) -> None:
    """Each call of another shape and method, or all of one."""
    torch.manual_seed(seed)
    if alike:
        calls = calls[:1] * CALLS
    calls = [
        (method, (8, *shape[1:]) if method in WHOLE_UNITS else shape) for method, shape in calls
    ]
    shards = [[torch.randn(shape).to(dtype) for _ in range(size)] for _, shape in calls]
    options = {"chunk": CHUNK, "ranks_per_node": node if size % node == 0 else None}
    by_rank = collectives.results(
        all_gather,
        lambda home, methods: all_gather_workspace(home, MAX_NUMEL, dtype, methods, **options),
        *([method for method, _ in calls], shards, size, seed, slowness),
    )
    for got in by_rank:
        for mine, call in zip(got, shards, strict=True):
            assert torch.equal(mine, reference.all_gather(call)[0])


OTHERS = sorted(set(METHODS) - {"two_level"})


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("other", "late"),
    [
        pytest.param(other, late, marks=[] if late == number % 4 else pytest.mark.slow)
        for number, other in enumerate(OTHERS)
        for late in range(4)
    ],
)
def test_methods_take_turns_with_two_level(other: str, late: int) -> None:
    """Of a signal, the rank that sets it is the same in both; one rank is late."""
    methods = ["two_level", other, "two_level", other]
    torch.manual_seed(late)
    shards = [[torch.randn(numel) for _ in range(4)] for numel in (1, 8, 40, 16)]
    slowness = [20.0 if rank == late else 1.0 for rank in range(4)]
    by_rank = collectives.results(
        all_gather,
        lambda home, methods: all_gather_workspace(
            home, 48, torch.float32, methods, chunk=16, ranks_per_node=2
        ),
        *(methods, shards, 4, late, slowness),
    )
    for got in by_rank:
        for mine, call in zip(got, shards, strict=True):
            assert torch.equal(mine, torch.cat(call))


# Refusals.


def refused(methods: list[str], x: Tensor, method: str, **options: int) -> str:
    """What a call says on one of two ranks."""
    return collectives.refused(all_gather, all_gather_workspace, methods, x, method, **options)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(64)
    assert "method is 'shout'; it must be one of push, pull" in refused(["shout"], x, "push")
    assert "method is 'll'; it must be one that the workspace was made for: push" in refused(
        ["push"], x, "ll"
    )
    assert "dtype is torch.float16; it must be torch.float32" in refused(["push"], x.half(), "push")
    assert "x_shard's stride" in refused(["push"], torch.zeros(8, 4).T, "push")
    for method in ("push", "pull", "ll", "ll128", "copy_engine"):
        too_large = refused([method], torch.zeros(66), method)
        assert "x_shard's size is 66 numbers; it must be at most 64" in too_large
    assert "have at least one axis" in refused(["push"], torch.zeros(()), "push")
    assert "12 bytes; it must be a multiple of 8 for ll128" in refused(
        ["ll128"], torch.zeros(3), "ll128"
    )
    assert "24 bytes; it must be a multiple of 16 for multimem" in refused(
        ["multimem"], torch.zeros(6), "multimem"
    )
    assert "x_shard's address" in refused(["ll128"], torch.zeros(5)[1:], "ll128")
    assert "ranks_per_node is 3; it must divide the 2 ranks" in refused(
        ["two_level"], x, "two_level", ranks_per_node=3
    )
    assert "chunk is 12; it must be a positive multiple of 8" in refused(
        ["push"], x, "push", chunk=12
    )
    assert "chunk is 0; it must be a positive" in refused(["push"], x, "push", chunk=0)


def test_dtypes_that_do_not_travel_are_refused() -> None:
    with pytest.raises(
        RankError, match=r"dtype is torch\.float8_e4m3fn; it must be one of torch\.f"
    ):
        run(lambda home: all_gather_workspace(home, 64, torch.float8_e4m3fn, ["ll"]), 2)


def test_a_buffer_that_takes_64_bits_to_count_is_refused() -> None:
    def work(home: Home) -> None:
        all_gather_workspace(home, 2**29, torch.float32)

    with pytest.raises(RankError, match="the buffer's size is 2147483648 numbers; it must be at m"):
        run(work, 2)


def test_large_shards_are_refused_by_the_low_latency_methods(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MAX_ONE_TRIP_BYTES", 128)
    assert "256 bytes; it must be at most 128 for ll" in refused(["ll"], torch.zeros(64), "ll")


def test_multimem_takes_a_multicast_address(tmp_path: Path) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    with (
        SharedHome(store, 0, 1) as home,
        pytest.raises(KernelError, match="'multimem'; it must be another one here"),
    ):
        all_gather_workspace(home, 64, torch.float32, ["multimem"])


def test_a_peer_without_an_address_is_refused() -> None:
    class Far(VirtualHome):
        def _exchange(self, call: int, value: str) -> list[str]:
            return [value] * 2

        def _allocate(self, nbytes: int) -> tuple[Tensor, list[int], int]:
            local, addresses, multicast = super()._allocate(nbytes)
            return local, [addresses[0], 0], multicast

        def _peers(self, addresses: list[int]) -> list[Tensor]:
            return []

    with pytest.raises(KernelError, match=r"a peer without an address .* is rank 1; it must be"):
        all_gather_workspace(Far(VirtualWorld(2), 0), 64, torch.float32)


@pytest.mark.parametrize("methods", [["push"], ["two_level", "push"]])
def test_only_two_level_takes_ranks_without_an_address(methods: list[str]) -> None:
    def work(home: Home) -> None:
        all_gather_workspace(home, 64, torch.float32, methods, ranks_per_node=1)

    with pytest.raises(RankError, match=r"a peer .* be none: the op stores to all ranks"):
        run(work, 2, ranks_per_node=1)


def test_a_rank_of_the_node_without_an_address_is_refused() -> None:
    def work(home: Home) -> None:
        all_gather_workspace(home, 64, torch.float32, ["two_level"], ranks_per_node=2)

    with pytest.raises(RankError, match=r"a peer .* be none: the op stores to the ranks of its"):
        run(work, 2, ranks_per_node=1)


# Planted faults.

PARTS = (chunks, low_latency, multimem, all_gather_ll, all_gather_two_level)


def symptoms(faulty: ModuleType, *methods: str, wanted: str = "", numel: int = 24) -> set[str]:
    """Of four ranks on two nodes."""
    return collectives.symptoms(
        faulty.all_gather,
        lambda home: faulty.all_gather_workspace(
            home, numel, torch.float32, methods, chunk=16, ranks_per_node=2
        ),
        *(methods, 4, numel),
        lambda x, rank: x.reshape(-1),
        wanted,
    )


PUSH_WAIT = "        wait(peers, rank, first + index * WORLD + source, call)\n"
FAN_WAIT = """            nvshmem.wait_across(
                peers.buffers, source, peers, at, across, at_across, rank, call, FAR
            )
"""
TO_PEER = "notify(peers, peer, index * WORLD + rank, call)"
PARITY = "slot_of(call)"


@pytest.mark.sweep
@pytest.mark.parametrize("method", sorted(METHODS))
def test_nothing_is_found_without_a_fault(method: str) -> None:
    assert symptoms(module, method) == set()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("method", "old", "new", "symptom"),
    [
        # a dropped wait
        ("pull", PUSH_WAIT, "", "race"),
        ("multimem", PUSH_WAIT, "", "race"),
        ("two_level", PUSH_WAIT, "", "race"),
        ("two_level", FAN_WAIT, "", "race"),
        ("copy_engine", "    wait_for_all[(1,)](peers=peers, rank=rank, WORLD=size)\n", "", "race"),
        # a slot reused one call early
        ("pull", PARITY, "0", "race"),
        ("two_level", PARITY, "0", "race"),
        ("multimem", PARITY, "0", "race"),
        ("ll", PARITY, "0", "race"),
        ("ll128", PARITY, "0", "race"),
        ("copy_engine", "    meet[(1,)](", "    (lambda **_: None)(", "race"),
        # a signal to the wrong rank, or from the wrong one
        ("two_level", TO_PEER, TO_PEER.replace(" peer", " (peer + 1) % WORLD"), "hang"),
        ("pull", "holder = source if PULL", "holder = (source + 1) % WORLD if PULL", "unwritten"),
        ("ll", "peer = (rank + item", "peer = (rank + 0 * item", "hang"),
        ("ll128", "peer = (rank + item", "peer = (rank + 0 * item", "hang"),
        (
            "copy_engine",
            "tell[(1,)](peers=peers, peer=peer,",
            "tell[(1,)](peers=peers, peer=0,",
            "hang",
        ),
    ],
)
def test_a_fault_is_found(method: str, old: str, new: str, symptom: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=PARTS)
    assert symptom in symptoms(faulty, method, wanted=symptom)


@pytest.mark.parametrize("other", ["push", "pull", "multimem"])
def test_a_signal_that_two_ranks_set_is_found(other: str, tmp_path: Path) -> None:
    """Who passes on in one call is late, when the shard's own rank sets it in the next."""
    faulty = planted(module, tmp_path, ("self.passed = self.met + size", "self.passed = 0"))
    found = symptoms(faulty, "two_level", other, wanted="reused hang", numel=16)
    assert found >= {"reused", "hang"}


@pytest.mark.parametrize(
    ("method", "changes", "symptom"),
    [
        # the flag of the first word, or line, for all of them
        (
            "ll",
            (
                "(((flagged >> 32).to(tl.int32) != flag) & mask).to(tl.int32)",
                "(((flagged >> 32).to(tl.int32) != flag) & (tl.arange(0, mask.shape[0]) == 0))"
                ".to(tl.int32)",
            ),
            "wrong",
        ),
        (
            "ll128",
            (
                "(is_flag & (flagged != call))",
                "(is_flag & (flagged != call) & (tl.arange(0, mask.shape[0])[:, None] == 0))",
            ),
            "wrong",
        ),
        # a flag that does not count
        ("ll", ("(flag_of(call).to(tl.int64) << 32)", "(tl.full((), 1, tl.int64) << 32)"), "hang"),
        # a wait for any flag
        ("ll128", ("(flagged != call)", "(flagged == 0)"), "wrong"),
    ],
)
def test_a_fault_in_the_flags_is_found(
    method: str, changes: tuple[str, str], symptom: str, tmp_path: Path
) -> None:
    faulty = planted(module, tmp_path, changes, parts=PARTS)
    assert symptom in symptoms(faulty, method, wanted=symptom, numel=400)


def test_a_multimem_store_that_misses_a_word_is_found(tmp_path: Path) -> None:
    change = ("[address, a, b, c, d,", "[address, a, b, c, c,")
    faulty = planted(module, tmp_path, change, parts=PARTS)
    assert "wrong" in symptoms(faulty, "multimem", wanted="wrong")


# What the interpreter cannot show.


def test_a_line_of_ll128_is_stored_and_loaded_by_one_instruction_of_one_warp() -> None:
    """On the GPU LL128 rests on it: 8 neighbours in a warp have 16 bytes each of a line."""
    script = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from weft.kernels.gpu.collectives.all_gather_ll import gather_ll128
from weft.kernels.gpu.runtime.low_latency import LL128_LINES
from weft.kernels.gpu.runtime.peers import Peers
constants = {"WORLD": 8, "LINES": LL128_LINES}
peers = Peers(
    buffers="*i64", slot_numel="i32", signals="*i64", calls="*i32", fault="*i32", max_polls="i32"
)
types = {"x": "*i64", "out": "*i64", "peers": peers}
names = gather_ll128.arg_names
signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
source = ASTSource(gather_ll128, signature, {(names.index(n),): v for n, v in constants.items()})
assembly = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
print(assembly["ttgir"], assembly["ptx"])
"""
    result = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )
    assert result.returncode == 0, result.stderr
    listing = result.stdout
    layouts = dict(re.findall(r"(#blocked\d*) = #ttg\.blocked<\{(.*)\}>", listing))
    polled = r"tt\.(?:store .*ache_?[mM]odifier = wt|load .*isVolatile = true).*(#blocked\d*)>"
    used = re.findall(polled, listing)
    assert len(used) == 3  # one store, and the loads before and within the loop
    for name in used:
        assert "sizePerThread = [1, 2], threadsPerWarp = [4, 8]" in layouts[name]
    assert "st.global.wt.v2.b64" in listing
    assert "ld.volatile.global.v2.b64" in listing
