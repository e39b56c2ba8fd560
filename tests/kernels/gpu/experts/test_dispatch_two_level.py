"""Expert parallelism over nodes against its oracles, by stores and by puts; planted faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.dispatched import Call, Reads, differences, draw_call, left_out, outputs
from support.faults import planted
from support.overlapped import DTYPES, FP8, IN_PARTS, SEEDS
from torch import Tensor

from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.experts import dispatch_two_level as module
from weft.kernels.gpu.experts import expert_tokens
from weft.kernels.gpu.experts.dispatch_two_level import (
    DispatchedTwoLevel,
    TwoLevelExpertWorkspace,
    moe_combine_two_level,
    moe_dispatch_two_level,
    moe_two_level_workspace,
)
from weft.kernels.gpu.experts.placement import Placement, Tables, balanced, even
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

F32 = torch.float32
CALLS = 3
NODES = [(1, 1), (2, 2), (3, 3), (2, 1), (3, 1), (4, 2)]
"""Ranks, and ranks of a node."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}

Make = Callable[[Home], TwoLevelExpertWorkspace]


def perform(
    home: Home, make: Make, calls: Sequence[Call], ahead: int = 0, ops: ModuleType = module
) -> list[tuple[DispatchedTwoLevel, Tensor]]:
    """All calls on one rank, so many dispatches ahead of their combine."""
    workspace, rank = make(home), home.rank
    sent: list[DispatchedTwoLevel] = []
    out: list[Tensor] = []
    for number in range(len(calls) + ahead):
        if number < len(calls):
            call = calls[number]
            given = (call.xs[rank], call.ids[rank], call.weights[rank])
            sent.append(ops.moe_dispatch_two_level(*given, workspace))
        if number >= ahead:
            done = sent[number - ahead]
            y = outputs(done, workspace.placement.experts(rank), workspace.dtype)
            out.append(ops.moe_combine_two_level(y, done, workspace))
    workspace.check()
    return list(zip(sent, out, strict=True))


def results(
    make: Make,
    calls: Sequence[Call],
    nodes: tuple[int, int],
    *,
    far: bool = False,
    ahead: int = 0,
    seed: int = 0,
    slowness: Sequence[float] = (),
) -> list[list[tuple[DispatchedTwoLevel, Tensor]]]:
    """Of each call, by rank; no race was found."""
    size, node = nodes
    races = RaceDetector()
    by_rank = run(
        lambda home: perform(home, make, calls, ahead),
        size,
        seed=seed,
        slowness=slowness[:size] or None,
        races=races,
        ranks_per_node=node if far else None,
    )
    assert races.findings == []
    return [list(call) for call in zip(*by_rank, strict=True)]


@IN_PARTS
@settings(max_examples=3, deadline=None)
@given(
    nodes=st.sampled_from(NODES),
    far=st.booleans(),
    tokens=st.lists(
        st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=CALLS, max_size=CALLS
    ),
    width=st.sampled_from([1, 5, 24, 130]),
    top_k=st.integers(1, 5),
    spare=st.integers(0, 2),
    experts=st.integers(1, 9),
    chunk=st.sampled_from([1, 2, 4, 8]),
    routing=st.sampled_from(["any", "any", "one", "none"]),
    ahead=st.integers(0, 1),
    dtype=DTYPES,
    fp8=st.booleans(),
    slowness=st.lists(st.sampled_from([1.0, 1.0, 20.0]), min_size=6, max_size=6),
    seed=SEEDS,
)
def test_any_routing(
    part: int,
    nodes: tuple[int, int],
    far: bool,
    tokens: list[list[int]],
    width: int,
    top_k: int,
    spare: int,
    experts: int,
    chunk: int,
    routing: str,
    ahead: int,
    dtype: torch.dtype,
    fp8: bool,
    slowness: list[float],
    seed: int,
) -> None:
    """Other tokens in each call and on each rank; none at all is one of them."""
    torch.manual_seed(seed)
    size, node = nodes
    placement = balanced(torch.rand(experts).tolist(), size, -(-experts // size) + spare)
    calls = [draw_call(each[:size], width, top_k, experts, dtype, routing) for each in tokens]

    def make(home: Home) -> TwoLevelExpertWorkspace:
        made = (home, 5, width, top_k, dtype, placement)
        wire = FP8 if fp8 else None
        return moe_two_level_workspace(*made, ranks_per_node=node, chunk=chunk, wire=wire)

    got = results(make, calls, nodes, far=far, ahead=ahead, seed=seed, slowness=slowness)
    # Experts multiply by up to 9.
    tolerance = 9 * TOLERANCE[dtype]
    for call, of_ranks in zip(calls, got, strict=True):
        assert differences(call, of_ranks, placement, tolerance) == []


@pytest.mark.slow
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("nodes", [(6, 3), (6, 2)])
def test_six_ranks(nodes: tuple[int, int], far: bool) -> None:
    torch.manual_seed(nodes[1])
    calls = [draw_call([3, 0, 5, 1, 2, 5], 24, 3, 9, F32, "any") for _ in range(CALLS)]
    placement = balanced([9, 1, 1, 1, 1, 1, 5, 1, 1], 6, 2)

    def make(home: Home) -> TwoLevelExpertWorkspace:
        made = (home, 5, 24, 3, F32, placement)
        return moe_two_level_workspace(*made, ranks_per_node=nodes[1], chunk=2)

    for call, got in zip(calls, results(make, calls, nodes, far=far, ahead=1), strict=True):
        assert differences(call, got, placement, 1e-3) == []


@pytest.mark.parametrize("far", [False, True])
def test_a_sum_does_not_depend_on_other_tokens(far: bool) -> None:
    """The same token, at its place, alone or among others; by any way the same bits."""
    torch.manual_seed(0)
    call = draw_call([5, 4, 1, 3], 24, 4, 8, torch.bfloat16, "any")
    alone = Call(
        [x[:3] if rank == 1 else x[:0] for rank, x in enumerate(call.xs)],
        [torch.where(torch.arange(len(i))[:, None] == 2, i, -1)[:3] for i in call.ids],
        [weights[:3] for weights in call.weights],
    )
    for rank in (0, 2, 3):
        alone.ids[rank], alone.weights[rank] = alone.ids[rank][:0], alone.weights[rank][:0]
    placement = balanced([5, 1, 1, 1, 9, 1, 1, 1], 4, 3)

    def make(home: Home) -> TwoLevelExpertWorkspace:
        made = (home, 5, 24, 4, torch.bfloat16, placement)
        return moe_two_level_workspace(*made, ranks_per_node=2, chunk=2)

    (among,) = results(make, [call], (4, 2), far=far)
    (single,) = results(make, [alone], (4, 2), far=not far)
    assert torch.equal(among[1][1][2], single[1][1][2])
    assert among[1][1][2].any()


def test_a_token_crosses_once_to_a_node_and_once_to_a_rank() -> None:
    """Bytes that are put, and rows that are stored at other ranks: no more than that."""
    torch.manual_seed(2)
    size, node, width, top_k = 4, 2, 6, 4
    call = draw_call([3, 4, 2, 4], width, top_k, 8, F32, "any")
    placement = even(8, size)
    put: list[int] = []

    class Counting(RaceDetector):
        def put(self, rank: int, addresses: Any, signal: int) -> int:
            put.append(len(addresses))
            return super().put(rank, addresses, signal)

    def make(home: Home) -> TwoLevelExpertWorkspace:
        made = (home, 4, width, top_k, F32, placement)
        return moe_two_level_workspace(*made, ranks_per_node=node, chunk=4)

    races = Counting()
    run(
        lambda home: perform(home, make, [call]),
        size,
        races=races,
        ranks_per_node=node,
    )
    assert races.findings == []
    crossing = 0
    for rank, ids in enumerate(call.ids):
        nodes_of = [{int(e) // 4 for e in row} for row in ids]
        crossing += sum(len(nodes - {rank // node}) for nodes in nodes_of)
    names = size * 4 * 2 * top_k * 4  # each rank's one chunk to the other node
    assert sum(put) == names + 2 * crossing * width * 4  # there and back


@pytest.mark.parametrize("of_layer", [False, True])
def test_experts_move_between_calls(of_layer: bool) -> None:
    """In the workspace's tables, or in a layer's own, in which dispatches count rows."""
    torch.manual_seed(1)
    placements = [even(4, 2), Placement((3, 2, 1, 0), 2)]
    calls = [draw_call([3, 4], 8, 2, 4, F32, "any") for _ in placements]

    def work(home: Home) -> list[tuple[DispatchedTwoLevel, Tensor]]:
        made = (home, 4, 8, 2, F32, placements[0])
        workspace = moe_two_level_workspace(*made, ranks_per_node=1)
        tables = None
        rows, counted = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        if of_layer:
            tables = Tables(placements[0], home.device, rows)
        got = []
        for placement, call in zip(placements, calls, strict=True):
            workspace.move(placement, tables)
            given = (call.xs[home.rank], call.ids[home.rank], call.weights[home.rank])
            sent = moe_dispatch_two_level(*given, workspace, tables=tables)
            counted += sent.offsets.diff() * of_layer
            y = outputs(sent, placement.experts(home.rank), F32)
            got.append((sent, moe_combine_two_level(y, sent, workspace)))
        assert torch.equal(rows, counted)
        return got

    by_rank = run(work, 2, ranks_per_node=1)
    for placement, call, *got in zip(placements, calls, *by_rank, strict=True):
        assert differences(call, got, placement, 1e-4) == []


def test_the_host_reads_nothing_of_the_routing() -> None:
    made = (VirtualHome(VirtualWorld(1), 0), 4, 8, 2, F32, even(4, 1))
    workspace = moe_two_level_workspace(*made)
    call = draw_call([4], 8, 2, 4, F32, "any")
    with left_out() as launched, Reads() as reads:
        sent = moe_dispatch_two_level(call.xs[0], call.ids[0], call.weights[0], workspace)
        moe_combine_two_level(sent.rows, sent, workspace)
    kernels = ["cross_nodes", "pass_on", "place_tokens", "return_sums", "sum_nodes"]
    assert launched == ["count_calls", *kernels]
    assert reads.seen == []


# Refusals.


def refused(change: dict[str, Any], **made: Any) -> str:
    """What one rank says to a call, or to a workspace, with something changed."""

    def work(home: Home) -> None:
        options = {"max_tokens": 4, "width": 8, "top_k": 2, "dtype": F32, "chunk": 2}
        options |= {"placement": even(4, 2)} | made
        workspace = moe_two_level_workspace(home, **options)
        call: dict[str, Any] = {
            "x": torch.zeros(3, 8),
            "ids": torch.zeros(3, 2, dtype=torch.int32),
            "weights": torch.zeros(3, 2),
            "y": torch.zeros(workspace.max_rows, 8),
            "ahead": 0,
            **change,
        }
        given = (call["x"], call["ids"], call["weights"], workspace)
        sent = moe_dispatch_two_level(*given)
        for _ in range(call["ahead"]):
            moe_dispatch_two_level(*given)
        moe_combine_two_level(call["y"], sent, workspace)

    with pytest.raises(RankError) as error:
        run(work, 2)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 8)}, r"moe_dispatch_two_level: x's shape is [5, 8]; it must be at"),
        ({"ids": torch.zeros(3, 2)}, "expert_ids's dtype is torch.float32; it must be torch.int32"),
        ({"weights": torch.zeros(3, 2).half()}, "weights's dtype is torch.float16; it must be"),
        ({"weights": torch.zeros(2, 2)}, "weights's shape is [2, 2]; it must be [3, 2]"),
        ({"y": torch.zeros(3, 8)}, "moe_combine_two_level: y's shape is [3, 8]; it must be [16, 8"),
        ({"ahead": 2}, "sent is 2 dispatches old; it must be at most 1 old"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in refused(change)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"ranks_per_node": 3}, "ranks_per_node is 3; it must divide the 2 ranks"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0; it must divide the 2 ranks"),
        ({"wire": FP8, "chunk": 64}, "chunk is 64; it must be a power of 2, and at most 32"),
    ],
)
def test_workspaces_that_cannot_be_are_refused(made: dict[str, Any], message: str) -> None:
    assert message in refused({}, **made)


def test_ranks_of_a_node_need_addresses() -> None:
    def work(home: Home) -> None:
        moe_two_level_workspace(home, 4, 8, 2, F32, even(4, 2), ranks_per_node=2)

    with pytest.raises(RankError, match="a peer without an address"):
        run(work, 2, ranks_per_node=1)


@pytest.mark.parametrize("node", [1, 2])
def test_what_never_came_is_reported_and_trusted_with_no_address(node: int) -> None:
    """A rank that does not come, in whose place there is garbage."""
    world = VirtualWorld(2)

    def work(rank: int) -> TwoLevelExpertWorkspace:
        made = (VirtualHome(world, rank), 4, 8, 2, F32, even(4, 2))
        workspace = moe_two_level_workspace(*made, ranks_per_node=node, chunk=2)
        for op in workspace.ops:
            with workspace.agreed(op, {}):
                pass
        return workspace

    with ThreadPoolExecutor(2) as pool:
        workspace, _ = pool.map(work, range(2))
    workspace.max_polls = 20
    for garbage in (2**31 - 1, -(2**31), 1):
        workspace.wanted.local.fill_(garbage)
        workspace.names.local.fill_(garbage)
        call = draw_call([4], 8, 2, 4, F32, "any")
        with interpreter.installed():
            given = (call.xs[0], call.ids[0], call.weights[0])
            sent = moe_dispatch_two_level(*given, workspace)
            moe_combine_two_level(torch.zeros_like(sent.rows), sent, workspace)
        assert int(sent.positions.max()) < len(sent.rows)
        assert int(sent.offsets[-1]) <= len(sent.rows)
        with pytest.raises(KernelError, match="moe_two_level: rank 0 gave up waiting for its sig"):
            workspace.check()


# Planted faults.


RANKS = {"one node": (2, 2), "near": (2, 1), "far": (2, 1), "two by two": (4, 2)}
"""And ranks of a node; nodes reach each other by stores, and by puts only if they are far."""


def symptoms(
    faulty: ModuleType,
    how: str,
    wanted: str = "",
    ahead: int = 0,
    *,
    fp8: bool = False,
    only_dispatch: bool = False,
) -> set[str]:
    """What goes wrong over some interleavings, until the wanted one, or any, is found."""
    found = set[str]()
    size, node = RANKS[how]
    placement = balanced([3, 1, 1, 2], size, 3)
    width, wire = (130, FP8) if fp8 else (5, None)
    for seed in range(8 if wanted else 1):
        if wanted in found or (wanted == "any" and found):
            break
        torch.manual_seed(seed)
        count = 4 if ahead or only_dispatch else 2
        calls = [draw_call([3, 2, 1, 4][:size], width, 2, 4, F32, "any") for _ in range(count)]

        def work(home: Home, calls: list[Call] = calls) -> Any:
            def make(home: Home) -> TwoLevelExpertWorkspace:
                made = (home, 4, width, 2, F32, placement)
                return faulty.moe_two_level_workspace(  # type: ignore[no-any-return]
                    *made, ranks_per_node=node, chunk=2, wire=wire
                )

            if not only_dispatch:
                return perform(home, make, calls, ahead, faulty)
            workspace, rank = make(home), home.rank
            for call in calls:
                given = (call.xs[rank], call.ids[rank], call.weights[rank])
                faulty.moe_dispatch_two_level(*given, workspace)
            return []

        races = RaceDetector()
        try:
            reach = node if how == "far" else None
            by_rank = run(work, size, seed=seed, races=races, ranks_per_node=reach)
        except HangError:
            found.add("hang")
        else:
            for call, *got in zip(calls, *by_rank, strict=False):
                found |= {"wrong"} if differences(call, got, placement, 1e-3) else set()
        found |= {
            "race" if "no order between" in finding else "unwritten" for finding in races.findings
        }
    return found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "ahead", "only_dispatch"),
    [
        ("one node", 1, False),
        ("near", 0, True),
        ("far", 1, False),
        ("two by two", 0, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("one node", 0, True),
                ("near", 1, False),
                ("far", 0, True),
                ("two by two", 1, False),
            ]
        ),
    ],
)
def test_nothing_is_found_without_a_fault(how: str, ahead: int, only_dispatch: bool) -> None:
    assert symptoms(module, how, "", ahead, only_dispatch=only_dispatch, fp8=not ahead) == set()


CROSSED = (
    "nvshmem.wait_across(names, source, peers, at, across, NAMES * kinds + at, rank, call, FAR)"
)
PASSED = "wait(peers, rank, passed + index * WORLD + source, call)"
RETURNED = "wait_all(peers, rank, first + index * WORLD + node * NODE, call, NODE)"
OWN_RETURNED = RETURNED.replace("+ node *", "+ own *")
TELL_CROSSED = "notify(peers, peer, at, call)"
TELL_PASSED = "notify(peers, peer, passed + index * WORLD + source, call)"
TELL_RETURNED = "notify(peers, peer, first + index * WORLD + node * NODE + mine, call)"
TELL_HOME = "notify(peers, peer, home + index * nodes + own, call)"
ROWS = "follows = tl.load(across + rank) + 8 * (ROWS * kinds + at)\n"
SCALES = ROWS.replace("ROWS", "SCALES")


FAULTS: list[tuple[str, bool, str, str, str]] = [
    # a dropped wait
    ("near", False, CROSSED, "pass", "race"),
    ("far", False, CROSSED, "pass", "race"),
    ("one node", False, PASSED, "pass", "race"),
    ("two by two", False, RETURNED, "pass", "race"),
    ("one node", False, OWN_RETURNED, "pass", "race"),
    ("near", False, "if tl.max(place, axis=0) >= 0:", "if call < 0:", "race"),
    ("far", False, "if tl.max(place, axis=0) >= 0:", "if call < 0:", "race"),
    # a wait for rows, or scales, that is one for what was put before
    ("far", False, ROWS, ROWS.replace("ROWS", "NAMES"), "race"),
    ("far", True, SCALES, SCALES.replace("SCALES", "ROWS"), "race"),
    # a signal that is not set, or at the wrong rank
    ("near", False, TELL_CROSSED, "pass", "hang"),
    ("one node", False, TELL_PASSED, TELL_PASSED.replace(" peer", " rank"), "any"),
    ("one node", False, TELL_RETURNED, TELL_RETURNED.replace(" peer", " rank"), "any"),
    ("near", False, TELL_HOME, TELL_HOME.replace(" peer", " rank"), "any"),
    ("far", False, "across, HOME * chunks", "across, NAMES * chunks", "any"),
    # a source that is stored to before the quiet
    ("far", False, "nvshmem.quiet[(1,)]", "(lambda **_: None)", "race"),
    # to the wrong place, or not packed as is thought
    ("one node", False, "(node * NODE + mine) * capacity\n", "node * capacity\n", "any"),
    ("far", False, "place = index * TOKENS + tl.cumsum(came", "place = tl.cumsum(came", "any"),
    ("far", False, "row * K + at, mask=mask, other=0.0", "at, mask=mask, other=0.0", "wrong"),
    # weights that are left behind, and the wrong ones
    ("near", False, "total += weight * tl.load(row_of_y", "total += tl.load(row_of_y", "wrong"),
    ("near", False, "name + TOP_K, mask=theirs", "name, mask=theirs", "wrong"),
    ("near", False, "+ slot * TOP_K + entries\n", "+ entries\n", "any"),
    # scales
    ("near", True, "came_scales, place, goes", "came_scales, tokens, goes", "any"),
]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "fp8", "old", "new", "symptom"),
    [
        pytest.param(*fault, marks=[pytest.mark.slow] if number % 2 else [])
        for number, fault in enumerate(FAULTS)
    ],
)
def test_a_fault_is_found(
    how: str, fp8: bool, old: str, new: str, symptom: str, tmp_path: Path
) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=[expert_tokens])
    found = symptoms(faulty, how, symptom, fp8=fp8)
    assert found if symptom == "any" else symptom in found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "ahead", "changes"),
    [
        ("near", 0, ["slot_of(call) * (nodes * capacity) + own * capacity  # in the peer's slot",
                     "slot_of(call) * (nodes * capacity) + node * capacity\n"]),
        ("far", 0, ["slot_of(call) * (nodes * capacity) + own * capacity  # in the peer's slot",
                    "slot_of(call) * (nodes * capacity) + node * capacity\n"]),
        ("one node", 0, ["slot = slot_of(call) * (WORLD * capacity)",
                         "slot = slot_of(call) * (WORLD * chunks * TOKENS)"]),
        ("one node", 1, ["row = slot_of(call) * (WORLD * capacity)",
                         "(slot_of(call) * (WORLD * capacity) + begin)"]),
        ("near", 1, ["slot_of(call) * (nodes * capacity) + own * capacity  # on the tokens' rank",
                     "slot_of(call) * (nodes * capacity) * K"]),
        ("far", 1, ["slot_of(call) * (nodes * capacity) + own * capacity  # on the tokens' rank",
                    "slot_of(call) * (nodes * capacity) * K"]),
    ],
)  # fmt: skip
def test_a_slot_that_is_reused_one_call_early_is_found(
    how: str, ahead: int, changes: list[str], tmp_path: Path
) -> None:
    """Of dispatch, where no combine is between; of combine, where two are on their way."""
    replaced = [(old, old.replace("slot_of(call)", "0")) for old in changes]
    faulty = planted(module, tmp_path, *replaced, parts=[expert_tokens])
    assert "race" in symptoms(faulty, how, "race", ahead, only_dispatch=not ahead)


def test_a_plain_store_instead_of_a_put_is_found(tmp_path: Path) -> None:
    """There is no address to store to."""
    faulty = planted(module, tmp_path, ("FAR=workspace.far", "FAR=False"))
    with pytest.raises(RankError, match="in no memory of any rank"):
        symptoms(faulty, "far")
