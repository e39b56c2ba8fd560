"""Expert parallelism's low-latency all-to-alls against their oracles; refusals, planted faults."""

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
from support.overlapped import DTYPES, FP8, IN_PARTS, SEEDS, SLOWNESS, run_calls
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ops.rows import restored
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.experts import dispatch as module
from weft.kernels.gpu.experts import expert_tokens
from weft.kernels.gpu.experts.dispatch import (
    Dispatched,
    LowLatencyWorkspace,
    moe_combine,
    moe_dispatch,
    moe_workspace,
)
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.experts.placement import Placement, Tables, balanced, even
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.runtime import signals
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

F32 = torch.float32
CALLS = 3


def finish(sent: Dispatched, weights: Tensor, workspace: LowLatencyWorkspace, op: Any) -> Tensor:
    experts = workspace.placement.experts(workspace.rank)
    return op(outputs(sent, experts, workspace.dtype), weights, sent, workspace)


def perform(
    home: Home,
    make: Callable[[Home], LowLatencyWorkspace],
    calls: Sequence[Call],
    ahead: int = 0,
    ops: ModuleType = module,
) -> list[tuple[Dispatched, Tensor]]:
    """All calls on one rank, so many dispatches ahead of their combine."""
    workspace = make(home)
    sent: list[Dispatched] = []
    out: list[Tensor] = []
    for number in range(len(calls) + ahead):
        if number < len(calls):
            call = calls[number]
            sent.append(ops.moe_dispatch(call.xs[home.rank], call.ids[home.rank], workspace))
        if number >= ahead:
            done = number - ahead
            weights = calls[done].weights[home.rank]
            out.append(finish(sent[done], weights, workspace, ops.moe_combine))
    workspace.check()
    return list(zip(sent, out, strict=True))


@IN_PARTS
@settings(max_examples=4, deadline=None)
@given(
    size=st.integers(1, 4),
    tokens=st.lists(
        st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=CALLS, max_size=CALLS
    ),
    width=st.sampled_from([1, 5, 16, 24, 130]),
    top_k=st.integers(1, 5),
    spare=st.integers(0, 2),
    experts=st.integers(1, 9),
    chunk=st.sampled_from([1, 2, 4, 8]),
    routing=st.sampled_from(["any", "any", "one", "none"]),
    ahead=st.integers(0, 1),
    dtype=DTYPES,
    fp8=st.booleans(),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_any_routing(
    part: int,
    size: int,
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
    loads = torch.rand(experts).tolist()
    placement = balanced(loads, size, -(-experts // size) + spare)
    calls = [draw_call(each[:size], width, top_k, experts, dtype, routing) for each in tokens]

    def make(home: Home) -> LowLatencyWorkspace:
        wire = FP8 if fp8 else None
        return moe_workspace(home, 5, width, top_k, dtype, placement, chunk=chunk, wire=wire)

    for call, got in zip(
        calls,
        run_calls(lambda home: perform(home, make, calls, ahead), size, seed, slowness),
        strict=True,
    ):
        assert differences(call, got, placement) == []


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fp8_rows_are_multiplied_as_they_come(size: int) -> None:
    """Dispatch, the experts' product and combine, without a pass that restores the rows."""
    torch.manual_seed(size)
    placement, width = even(2 * size, size), 300
    calls = [draw_call([4, 0, 3, 2][:size], width, 2, 2 * size, F32, "any") for _ in range(2)]
    ws = torch.randn(2 * size, width, width).to(FP8).mT

    def work(home: Home) -> list[Tensor]:
        workspace = moe_workspace(home, 4, width, 2, F32, placement, wire=FP8)
        mine = ws[2 * home.rank : 2 * home.rank + 2]
        out = []
        for call in calls:
            sent = moe_dispatch(call.xs[home.rank], call.ids[home.rank], workspace)
            epilogue = Epilogue(sent.scales, out_dtype=F32)
            y = grouped_matmul(
                sent.rows, mine, sent.offsets, epilogue=epilogue, blocks=(16, 64, 64)
            )
            out.append(moe_combine(y, call.weights[home.rank], sent, workspace))
        workspace.check()
        return out

    for call, got in zip(calls, run_calls(work, size, size), strict=True):
        xs = [restored(reference.quantize(x, GROUP)) for x in call.xs]
        arrived = reference.moe_dispatch(xs, call.ids, placement.slots)
        ys = [
            reference.grouped_matmul(rows, ws[2 * rank : 2 * rank + 2], torch.tensor(offsets))
            for rank, (rows, offsets) in enumerate(arrived)
        ]
        expected = reference.moe_combine(ys, call.ids, call.weights, placement.slots)
        for mine, oracle in zip(got, expected, strict=True):
            torch.testing.assert_close(mine, oracle.float(), atol=1e-2, rtol=1e-4)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_more_experts_than_are_counted_at_a_time(size: int) -> None:
    """35 slots on a rank, and 34 chunks or more, none of which is a whole number of blocks."""
    torch.manual_seed(size)
    placement = even(35 * size, size)
    calls = [draw_call([17] * size, 4, 3, 35 * size, F32, "any")]

    def make(home: Home) -> LowLatencyWorkspace:
        return moe_workspace(home, 17, 4, 3, F32, placement, chunk=1)

    (got,) = run_calls(lambda home: perform(home, make, calls), size, size)
    assert differences(calls[0], got, placement) == []


def test_a_sum_does_not_depend_on_other_tokens_nor_on_where_experts_are() -> None:
    """The same token alone on one of two ranks, or among others; and with replicas."""
    torch.manual_seed(0)
    call = draw_call([5, 4], 24, 4, 6, torch.bfloat16, "any")
    alone = call.only(1, 2)
    sums = []
    for given_call, row, placement in [
        (call, 2, even(6, 2)),
        (alone, 0, even(6, 2)),
        (call, 2, balanced([5, 1, 1, 1, 9, 1], 2, 5)),
    ]:

        def work(home: Home, used: Call = given_call, to: Placement = placement) -> list[Any]:
            def make(home: Home) -> LowLatencyWorkspace:
                return moe_workspace(home, 5, 24, 4, torch.bfloat16, to)

            return perform(home, make, [used])

        (got,) = run_calls(work, 2, 0)
        sums.append(got[1][1][row])
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_experts_move_between_calls() -> None:
    """The tables stay where they are, and kernels read what is in them."""
    torch.manual_seed(1)
    placements = [even(4, 2), Placement((3, 2, 1, 0), 2), even(4, 2)]
    calls = [draw_call([3, 4], 8, 2, 4, F32, "any") for _ in placements]

    def work(home: Home) -> list[tuple[Dispatched, Tensor]]:
        workspace = moe_workspace(home, 4, 8, 2, F32, placements[0])
        tables = (workspace.tables.replicas.data_ptr(), workspace.tables.counts.data_ptr())
        got = []
        for placement, call in zip(placements, calls, strict=True):
            workspace.move(placement)
            sent = moe_dispatch(call.xs[home.rank], call.ids[home.rank], workspace)
            got.append((sent, finish(sent, call.weights[home.rank], workspace, moe_combine)))
        assert tables == (
            workspace.tables.replicas.data_ptr(),
            workspace.tables.counts.data_ptr(),
        )
        return got

    for placement, call, got in zip(placements, calls, run_calls(work, 2, 1), strict=True):
        assert differences(call, got, placement) == []


def test_layers_with_placements_of_their_own_share_a_workspace() -> None:
    """Each layer's dispatches count the rows that its slots receive."""
    torch.manual_seed(2)
    placements = [even(4, 2), Placement((3, 2, 1, 0), 2)]
    calls = [draw_call([3, 4], 8, 2, 4, F32, "any") for _ in range(4)]

    def work(home: Home) -> list[tuple[Dispatched, Tensor, Tensor]]:
        workspace = moe_workspace(home, 4, 8, 2, F32, even(4, 2))
        layers = [
            Tables(placement, home.device, torch.zeros(2, dtype=torch.int64))
            for placement in placements
        ]
        got = []
        for number, call in enumerate(calls):
            tables = layers[number % 2]
            ids, weights = call.ids[home.rank], call.weights[home.rank]
            sent = moe_dispatch(call.xs[home.rank], ids, workspace, tables=tables)
            y = outputs(sent, tables.placement.experts(home.rank), F32)
            assert tables.rows is not None
            rows = tables.rows.clone()
            got.append((sent, moe_combine(y, weights, sent, workspace), rows))
        return got

    counted = torch.zeros(2, 2, 2, dtype=torch.int64)
    for number, (call, got) in enumerate(zip(calls, run_calls(work, 2, 1), strict=True)):
        assert differences(call, [each[:2] for each in got], placements[number % 2]) == []
        for rank, (sent, _, rows) in enumerate(got):
            counted[number % 2, rank] += sent.offsets.diff()
            assert torch.equal(rows, counted[number % 2, rank])


def test_the_host_reads_nothing_of_the_routing() -> None:
    """A captured graph would not see it. The kernels themselves are left out."""
    workspace = moe_workspace(VirtualHome(VirtualWorld(1), 0), 4, 8, 2, F32, even(4, 1))
    call = draw_call([4], 8, 2, 4, F32, "any")
    with left_out() as launched, Reads() as reads:
        sent = moe_dispatch(call.xs[0], call.ids[0], workspace)
        moe_combine(sent.rows, call.weights[0], sent, workspace)
    kernels = ["exchange_tokens", "place_tokens", "return_tokens", "sum_tokens"]
    assert launched == ["count_calls", *kernels]
    assert reads.seen == []


# Refusals.


def refused(change: Callable[[dict[str, Any]], None], **made: Any) -> str:
    """What one rank says to a call, or to a workspace, with something changed."""

    def work(home: Home) -> None:
        options = {"max_tokens": 4, "width": 8, "top_k": 2, "dtype": F32, "chunk": 2}
        options |= {"placement": even(4, 2)} | made
        workspace = moe_workspace(home, **options)
        call: dict[str, Any] = {
            "x": torch.zeros(3, 8),
            "ids": torch.zeros(3, 2, dtype=torch.int32),
            "y": torch.zeros(workspace.max_rows, 8),
            "weights": torch.zeros(3, 2),
            "workspace": workspace,
            "ahead": 0,
        }
        change(call)
        sent = moe_dispatch(call["x"], call["ids"], workspace)
        for _ in range(call["ahead"]):
            moe_dispatch(call["x"], call["ids"], workspace)
        moe_combine(call["y"], call["weights"], sent, workspace)

    with pytest.raises(RankError) as error:
        run(work, 2)
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(5, 8)}, r"x's shape is [5, 8]; it must be at most 4 tokens of 8"),
        ({"x": torch.zeros(3, 9)}, r"x's shape is [3, 9]; it must be at most 4 tokens of 8"),
        ({"x": torch.zeros(8)}, "x's shape is [8]; it must be"),
        ({"x": torch.zeros(3, 8).half()}, "x's dtype is torch.float16; it must be torch.float32"),
        ({"x": torch.zeros(8, 3).T}, "x's stride is (1, 3); it must be contiguous"),
        ({"ids": torch.zeros(3, 2)}, "expert_ids's dtype is torch.float32; it must be torch.int32"),
        (
            {"ids": torch.zeros(3, 3, dtype=torch.int32)},
            "expert_ids's shape is [3, 3]; it must be [3, 2]",
        ),
        ({"y": torch.zeros(3, 8)}, "moe_combine: y's shape is [3, 8]; it must be [16, 8]"),
        ({"weights": torch.zeros(3, 2).half()}, "weights's dtype is torch.float16; it must be"),
        ({"weights": torch.zeros(2, 2)}, "weights's shape is [2, 2]; it must be [3, 2]"),
        ({"ahead": 2}, "sent is 2 dispatches old; it must be at most 1 old"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    assert message in refused(lambda call: call.update(change))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be a whole number of at least 1"),
        ({"top_k": 33}, "top_k is 33; it must be at most 32"),
        ({"chunk": 3}, "chunk is 3; it must be a power of 2, and at most 4096"),
        ({"dtype": FP8}, "dtype is torch.float8_e4m3fn; it must be one of torch."),
        (
            {"wire": torch.float16},
            "wire is torch.float16; it must be torch.float32 or torch.float8",
        ),
        ({"wire": FP8, "chunk": 64}, "chunk is 64; it must be a power of 2, and at most 32"),
        ({"placement": even(4, 4)}, "placement is for 4 ranks; it must be for 2"),
        ({"max_tokens": 2**27}, "numbers; it must be at most 2147483647: make it for fewer"),
    ],
)
def test_workspaces_that_cannot_be_are_refused(made: dict[str, Any], message: str) -> None:
    assert message in refused(lambda call: None, **made)


def test_ranks_that_place_experts_differently_are_told() -> None:
    def work(home: Home) -> None:
        slots = (0, 1) if home.rank else (1, 0)
        moe_workspace(home, 4, 8, 2, F32, Placement(slots, 2))

    with pytest.raises(RankError, match=r"moe: placement is .* it must be the same on all ranks"):
        run(work, 2)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (even(6, 2), "num_experts is 6; it must stay 4"),
        (Placement((0, 1, 2, 3, 0, 1), 2), "slots_per_rank is 3; it must stay 2"),
        (even(4, 1), "world_size is 1; it must stay 2"),
    ],
)
def test_a_placement_of_other_sizes_is_refused(placement: Placement, message: str) -> None:
    def work(home: Home) -> None:
        moe_workspace(home, 4, 8, 2, F32, even(4, 2)).move(placement)

    with pytest.raises(RankError, match=message):
        run(work, 2)


def told(x: Tensor) -> list[str]:
    """What two ranks say to their first call, where the second one has another x."""
    world = VirtualWorld(2)

    def work(rank: int) -> str:
        workspace = moe_workspace(VirtualHome(world, rank), 4, 8, 2, F32, even(4, 2))
        ids = torch.zeros(3, 2, dtype=torch.int32)
        with left_out() as launched, pytest.raises(KernelError) as error:
            moe_dispatch(x if rank else torch.zeros(3, 8), ids, workspace)
        assert launched == []
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_what_one_rank_refuses_in_the_first_call_all_are_told() -> None:
    shape = "x's shape is [3, 9]; it must be at most 4 tokens of 8 numbers, the limits of"
    for message in told(torch.zeros(3, 9)):
        assert message.startswith(f"moe_dispatch: on rank 1 {shape}")


def test_a_workspace_of_another_op_is_refused() -> None:
    def work(home: Home) -> None:
        workspace = Workspace(home, "all_gather", 1, F32, 1)
        x, ids = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32)
        moe_dispatch(x, ids, workspace)  # type: ignore[arg-type]

    with pytest.raises(RankError, match="workspace is one of all_gather; it must be one of moe_"):
        run(work, 2)


def alone(make: Callable[[Home], LowLatencyWorkspace]) -> LowLatencyWorkspace:
    """The first of two ranks, whose calls the other one has agreed to and will never make."""
    world = VirtualWorld(2)

    def work(rank: int) -> LowLatencyWorkspace:
        workspace = make(VirtualHome(world, rank))
        for op in workspace.ops:
            with workspace.agreed(op, {}):
                pass
        return workspace

    with ThreadPoolExecutor(2) as pool:
        return next(pool.map(work, range(2)))


def test_a_later_refusal_waits_for_nobody() -> None:
    workspace = alone(lambda home: moe_workspace(home, 4, 8, 2, F32, even(4, 2)))
    with pytest.raises(KernelError, match=r"moe_dispatch: x's dtype is torch\.float16") as error:
        moe_dispatch(torch.zeros(3, 8).half(), torch.zeros(3, 2, dtype=torch.int32), workspace)
    assert error.value.__cause__ is None  # not after the other one did not come


@pytest.mark.parametrize("wire", [None, FP8])
def test_what_never_came_is_reported_and_trusted_with_no_address(
    wire: torch.dtype | None,
) -> None:
    """A rank that does not come, in whose place there is garbage."""
    workspace = alone(
        lambda home: moe_workspace(home, 4, 8, 2, F32, even(4, 2), chunk=2, wire=wire)
    )
    workspace.max_polls = 20
    for garbage in (2**31 - 1, -(2**31), 1):
        workspace.wanted.local.fill_(garbage)
        call = draw_call([4], 8, 2, 4, F32, "any")
        with interpreter.installed():
            sent = moe_dispatch(call.xs[0], call.ids[0], workspace)
            y = torch.zeros(sent.rows.shape)
            moe_combine(y, call.weights[0], sent, workspace)
        assert int(sent.positions.max()) < len(sent.rows)
        assert int(sent.offsets[-1]) <= len(sent.rows)
        with pytest.raises(KernelError, match="moe: rank 0 gave up waiting for its signal"):
            workspace.check()


# Planted faults.


SIZE = 2


def symptoms(
    faulty: ModuleType,
    wanted: str = "",
    ahead: int = 0,
    *,
    only_dispatch: bool = False,
    fp8: bool = False,
    tokens: Sequence[int] = (3, 2),
) -> set[str]:
    """What goes wrong over some interleavings, until the wanted one, or any, is found."""
    found = set[str]()
    placement = balanced([3, 1, 1], SIZE, 2)
    width, wire = (130, FP8) if fp8 else (5, None)
    for seed in range(8 if wanted else 1):
        if wanted in found or (wanted == "any" and found):
            break
        torch.manual_seed(seed)
        calls = [draw_call(tokens, width, 2, 3, F32, "any") for _ in range(4 if ahead else 3)]

        def work(home: Home, calls: list[Call] = calls) -> Any:
            def make(home: Home) -> LowLatencyWorkspace:
                return faulty.moe_workspace(home, 4, width, 2, F32, placement, chunk=2, wire=wire)

            if not only_dispatch:
                return perform(home, make, calls, ahead, faulty)
            workspace = make(home)
            for call in calls:
                faulty.moe_dispatch(call.xs[home.rank], call.ids[home.rank], workspace)
            return []

        races = RaceDetector()
        try:
            by_rank = run(work, SIZE, seed=seed, races=races)
        except HangError:
            found.add("hang")
        else:
            for call, *got in zip(calls, *by_rank, strict=False):
                found |= {"wrong"} if differences(call, got, placement) else set()
        found |= {
            "race" if "no order between" in finding else "unwritten" for finding in races.findings
        }
    return found


DISPATCH_WAIT = "wait(peers, rank, index * WORLD + source, call)"
COMBINE_WAIT = "wait_all(peers, rank, combined + index * WORLD, call, WORLD)"
TELL = "notify(peers, peer, index * WORLD + rank, call)"
TELL_BACK = "notify(peers, peer, combined + index * WORLD + rank, call)"
NEXT = "(peer + 1) % WORLD"
DTYPE = {"peers.buffers": "dtype", "wanted": "tl.int32", "scales": "tl.float32"}


@pytest.mark.sweep
@pytest.mark.parametrize(("ahead", "only_dispatch"), [(0, False), (1, False), (0, True)])
def test_nothing_is_found_without_a_fault(ahead: int, only_dispatch: bool) -> None:
    assert symptoms(module, ahead=ahead, only_dispatch=only_dispatch) == set()
    assert symptoms(module, ahead=ahead, tokens=(0, 3), fp8=True) == set()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "symptom"),
    [
        # a dropped wait
        (DISPATCH_WAIT, "pass", "race"),
        (COMBINE_WAIT, "pass", "race"),
        # a signal to the wrong rank, or before its data
        (TELL, TELL.replace(" peer", f" {NEXT}"), "any"),
        (TELL_BACK, TELL_BACK.replace(" peer", f" {NEXT}"), "any"),
        (TELL, "pass", "hang"),
        (TELL_BACK, "pass", "hang"),
        # tokens, their slots, or outputs to the wrong rank
        ("peer_pointer(peers.buffers, peer", f"peer_pointer(peers.buffers, {NEXT}", "any"),
        ("peer_pointer(wanted, peer", f"peer_pointer(wanted, {NEXT}", "any"),
        ("peer_pointer(returned, peer", f"peer_pointer(returned, {NEXT}", "any"),
        # a wrong place
        ("others < block", "others <= block", "wrong"),
        ("tl.cumsum(chosen, axis=0) - chosen", "tl.cumsum(chosen, axis=0)", "wrong"),
        ("tl.cumsum(total, axis=0) - total", "tl.cumsum(total, axis=0)", "wrong"),
        ("turn = (rank + tokens", "turn = (tokens", "wrong"),
        ("total += weight * output", "total += output", "wrong"),
    ],
)
def test_a_fault_is_found(old: str, new: str, symptom: str, tmp_path: Path) -> None:
    found = symptoms(planted(module, tmp_path, (old, new), parts=[expert_tokens]), symptom)
    assert found if symptom == "any" else symptom in found


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("old", "new", "symptom"),
    [
        ("peer_pointer(scales, peer", f"peer_pointer(scales, {NEXT}", "any"),
        (
            "peer_pointer(scales, rank, tl.float32) + slot",
            "peer_pointer(scales, rank, tl.float32) + 0",
            "any",
        ),
        ("y / divisor[:, :, None]", "y", "wrong"),
        ("tl.store(to_scales + group, divisor", "tl.store(to_scales + group, 1.0", "wrong"),
        (
            "copy_rows(row_scales, row, came_scales, tokens,",
            "copy_rows(row_scales, row, came_scales, 0 * tokens,",
            "any",
        ),
    ],
)
def test_a_fault_of_scales_is_found(old: str, new: str, symptom: str, tmp_path: Path) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=[expert_tokens])
    found = symptoms(faulty, symptom, fp8=True)
    assert found if symptom == "any" else symptom in found


def test_a_slot_that_is_reused_one_call_early_is_found(tmp_path: Path) -> None:
    """Of dispatch, where no combine is between; of combine, where two are on their way."""
    for what, width in (("peers.buffers", "K"), ("wanted", "TOP_K"), ("scales", "groups")):
        sent = f"peer_pointer({what}, peer, {DTYPE[what]}) + own * {width}"
        changes = [(sent, sent.replace("own", "(own - slot)"))]
        came = f"peer_pointer({what}, rank, {DTYPE[what]}) + slot * {width}"
        changes.append((came, came.replace("slot", "0")))
        if what == "wanted":
            changes.append(("(slot + source * chunks", "(source * chunks"))
        faulty = planted(module, tmp_path, *changes, parts=[expert_tokens])
        assert "race" in symptoms(faulty, "race", only_dispatch=True, fp8=what == "scales")
    combine = planted(
        module,
        tmp_path,
        ("slot_of(call) * (capacity * TOP_K * K)", "0"),
        ("slot_of(call) * (chunks * TOKENS * TOP_K * K)", "0"),
    )
    assert "race" in symptoms(combine, "race", ahead=1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sem="release", scope="sys")', 'sem="relaxed", scope="sys")'),
        ('value, sem="release", scope="sys")', 'value, sem="release", scope="gpu")'),
        (
            'seen = tl.atomic_add(signal, 0, sem="acquire"',
            'seen = tl.atomic_add(signal, 0, sem="relaxed"',
        ),
        ('0, sem="acquire", scope="sys")', '0, sem="acquire", scope="gpu")'),
    ],
)
def test_signals_that_order_nothing_are_found(old: str, new: str, tmp_path: Path) -> None:
    weak = planted(signals, tmp_path, (old, new))
    faulty = planted(module, tmp_path)
    faulty.notify, faulty.wait = weak.notify, weak.wait  # type: ignore[attr-defined]
    assert "race" in symptoms(faulty, "race")


def test_a_third_dispatch_before_the_first_combine_is_a_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Why that is refused: a rank without tokens waits for nobody in a combine."""
    monkeypatch.setattr(module, "require", lambda *_: None)
    assert "race" in symptoms(module, "race", ahead=3, tokens=(0, 3))
