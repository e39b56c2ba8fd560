"""Expert products and reduce-scatter in one: against its oracle, faults, bad plans, bad input."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.experts import ROUTINGS, own_experts, plans_of
from support.faults import planted
from support.overlapped import (
    BLOCKS,
    CALLS,
    DTYPES,
    FP8,
    IN_PARTS,
    SEEDS,
    SLOWNESS,
    close,
    findings,
    run_calls,
)
from torch import Tensor
from torch.nn import functional

from weft.kernels import reference
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.experts import grouped_matmul_reduce_scatter as module
from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    all_gather_grouped_matmul,
    all_gather_grouped_matmul_workspace,
    make_plan,
)
from weft.kernels.gpu.experts.grouped_matmul_reduce_scatter import (
    grouped_matmul_reduce_scatter,
    grouped_matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.symmetric.memory import Home

TILE = (16, 16)


@IN_PARTS
@settings(max_examples=4, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(0, 18),
    n=st.integers(0, 20),
    k=st.integers(1, 24),
    experts=st.integers(1, 4),
    top_k=st.integers(1, 3),
    routing=ROUTINGS,
    dtype=DTYPES,
    travels=DTYPES,
    transposed=st.booleans(),
    cut=st.booleans(),
    nodes=st.booleans(),
    programs=st.integers(1, 5),
    senders=st.integers(0, 3),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_any_routing(
    part: int,
    size: int,
    m: int,
    n: int,
    k: int,
    experts: int,
    top_k: int,
    routing: str,
    dtype: torch.dtype,
    travels: torch.dtype,
    transposed: bool,
    cut: bool,
    nodes: bool,
    programs: int,
    senders: int,
    slowness: list[float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    rows = size * m * top_k
    xs = [[torch.randn(rows, k).to(dtype) for _ in range(size)] for _ in range(CALLS)]
    plans = [plans_of(size, m, experts, top_k, routing) for _ in range(CALLS)]
    ws = [torch.randn(experts, k, n).to(dtype) for _ in range(size)]
    options = {
        "ranks_per_node": size // 2 if nodes and size % 2 == 0 else 0,
        "blocks": BLOCKS,
        "programs": programs,
        "senders": senders,
    }

    def work(home: Home) -> list[Tensor]:
        workspace = grouped_matmul_reduce_scatter_workspace(
            home, m, n, experts, top_k, travels, *TILE
        )
        own = own_experts(home.rank, experts, cut)
        w = ws[home.rank][own.start : own.stop]
        w = w.mT.contiguous().mT if transposed else w
        results = []
        for call, call_plans in zip(xs, plans, strict=True):
            mine = (call[home.rank], w, torch.stack(call_plans), workspace)
            results.append(
                grouped_matmul_reduce_scatter(
                    *mine,
                    own=own if cut else None,
                    **options,  # type: ignore[arg-type]
                )
            )
        workspace.check()
        return results

    coarse = torch.bfloat16 if torch.bfloat16 in (dtype, travels) else travels
    for rank, w in enumerate(ws):
        own = own_experts(rank, experts, cut)
        w[: own.start] = w[own.stop :] = 0
    for got, call, call_plans in zip(run_calls(work, size, seed, slowness), xs, plans, strict=True):
        oracle = reference.grouped_matmul_reduce_scatter(call, ws, call_plans, top_k)
        for mine, expected in zip(got, oracle, strict=True):
            assert mine.dtype == travels
            close(mine.to(coarse), expected, coarse)


@pytest.mark.parametrize("size", [1, 3])
def test_both_halves_are_an_expert_layer(size: int) -> None:
    """Gate and up gathered, down reduced: what `reference.moe` makes of all tokens."""
    m, hidden, inner, experts, top_k = 7, 24, 16 * size, 4, 2
    x = torch.randn(size * m, hidden)
    gate, up = (torch.randn(experts, inner, hidden) / 5 for _ in range(2))
    down = torch.randn(experts, hidden, inner) / 5
    weights, ids = torch.randn(size * m, experts).softmax(dim=1).topk(top_k)

    def work(home: Home) -> list[Tensor]:
        mine = slice(home.rank * m, (home.rank + 1) * m)
        part = slice(home.rank * inner // size, (home.rank + 1) * inner // size)
        gather = all_gather_grouped_matmul_workspace(home, m, hidden, experts, top_k, torch.float32)
        scatter = grouped_matmul_reduce_scatter_workspace(
            home, m, hidden, experts, top_k, torch.float32, *TILE
        )
        plan = make_plan(ids[mine], weights[mine], experts)
        plans = torch.empty(size, len(plan), dtype=torch.int32)
        both = [w[:, part].contiguous().mT for w in (gate, up)]
        silu = Epilogue(silu_multiply=True)
        rows = all_gather_grouped_matmul(
            x[mine], both, plan, gather, plans=plans, epilogue=silu, blocks=BLOCKS
        )
        back = down[:, :, part].contiguous().mT
        out = grouped_matmul_reduce_scatter(rows, back, plans, scatter, blocks=BLOCKS)
        gather.check()
        scatter.check()
        return [out]

    (got,) = run_calls(work, size, seed=1)
    close(torch.cat(got), reference.moe(x, gate, up, down, ids, weights), torch.float32)


@settings(max_examples=6, deadline=None)
@given(
    size=st.integers(1, 3),
    m=st.integers(1, 10),
    by_row=st.none() | st.booleans(),
    by=st.sampled_from(["nothing", "one", "expert", "column"]),
    residual=st.booleans(),
    seed=SEEDS,
)
def test_scales_and_residuals(
    size: int, m: int, by_row: bool | None, by: str, residual: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    k, n, experts, top_k = 16, 12, 2, 2
    rows = size * m * top_k
    xs = [torch.randn(rows, k).to(FP8) for _ in range(size)]
    ws = [torch.randn(experts, n, k).to(FP8).mT for _ in range(size)]
    scales = [torch.rand(rows if by_row else 1) + 0.5 for _ in range(size)]
    shapes = {"nothing": (1,), "one": (1,), "expert": (experts, 1), "column": (experts, n)}
    w_scales = [torch.rand(shapes[by]) + 0.5 for _ in range(size)]
    added = [torch.randn(m, n) for _ in range(size)]
    plans = plans_of(size, m, experts, top_k, "any")

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = grouped_matmul_reduce_scatter_workspace(
            home, m, n, experts, top_k, torch.float32, *TILE
        )
        epilogue = Epilogue(
            x_scale=None if by_row is None else scales[rank],
            w_scale=None if by == "nothing" else w_scales[rank],
            residual=added[rank] if residual else None,
        )
        mine = (xs[rank], ws[rank], torch.stack(plans), workspace)
        return [grouped_matmul_reduce_scatter(*mine, epilogue=epilogue, blocks=BLOCKS)]

    (got,) = run_calls(work, size, seed)
    left = [
        x.float() * (1 if by_row is None else s[:, None]) for x, s in zip(xs, scales, strict=True)
    ]
    factors = [s if by in ("nothing", "one") else s[:, None, :] for s in w_scales]
    right = [w.float() * (1 if by == "nothing" else s) for w, s in zip(ws, factors, strict=True)]
    oracle = reference.grouped_matmul_reduce_scatter(left, right, plans, top_k)
    for mine, expected, more in zip(got, oracle, added, strict=True):
        close(mine, expected + more if residual else expected, torch.float32)


def test_calls_of_several_shapes_share_a_workspace() -> None:
    shapes = [(20, 24), (3, 24), (9, 17), (20, 24)]
    experts, top_k, size = 3, 2, 3
    xs = [[torch.randn(size * m * top_k, 16) for _ in range(size)] for m, _ in shapes]
    ws = [[torch.randn(experts, 16, n) for _ in range(size)] for _, n in shapes]
    plans = [plans_of(size, m, experts, top_k, "any") for m, _ in shapes]

    def work(home: Home) -> list[Tensor]:
        workspace = grouped_matmul_reduce_scatter_workspace(
            home, 20, 24, experts, top_k, torch.float32, *TILE
        )
        return [
            grouped_matmul_reduce_scatter(
                *(x[home.rank], w[home.rank], torch.stack(plan), workspace), blocks=BLOCKS
            )
            for x, w, plan in zip(xs, ws, plans, strict=True)
        ]

    for got, x, w, plan in zip(run_calls(work, size, seed=5), xs, ws, plans, strict=True):
        oracle = reference.grouped_matmul_reduce_scatter(x, w, plan, top_k)
        for mine, expected in zip(got, oracle, strict=True):
            close(mine, expected, torch.float32)


def test_sums_have_the_same_bits_in_every_run() -> None:
    m, k, n, experts, top_k, size = 9, 24, 20, 3, 3, 3
    xs = [torch.randn(size * m * top_k, k).bfloat16() for _ in range(size)]
    ws = [torch.randn(experts, k, n).bfloat16() for _ in range(size)]
    plans = torch.stack(plans_of(size, m, experts, top_k, "any"))

    def work(home: Home) -> list[Tensor]:
        workspace = grouped_matmul_reduce_scatter_workspace(
            home, m, n, experts, top_k, torch.bfloat16, *TILE
        )
        mine = (xs[home.rank], ws[home.rank], plans, workspace)
        return [
            grouped_matmul_reduce_scatter(*mine, blocks=BLOCKS, programs=programs)
            for programs in (1, 3)
        ]

    first, *others = (
        got
        for seed, slowness in ((0, [1.0, 1.0, 1.0]), (1, [20.0, 1.0, 1.0]))
        for got in run_calls(work, size, seed, slowness)
    )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


# Faults.


def faulty_calls(faulty: ModuleType) -> list[str]:
    """Tiles with rows of two owners, and programs that have no tile of every owner."""
    plans = torch.stack(plans_of(3, 9, 2, 2, "one"))

    def work(home: Home) -> None:
        workspace = faulty.grouped_matmul_reduce_scatter_workspace(
            home, 9, 16, 2, 2, torch.float32, *TILE
        )
        x, w = torch.randn(54, 16), torch.randn(2, 16, 16)
        for _ in range(3):
            faulty.grouped_matmul_reduce_scatter(
                x, w, plans, workspace, blocks=BLOCKS, programs=4, senders=2
            )

    return findings(work)


def test_nothing_is_found_without_a_fault() -> None:
    assert faulty_calls(module) == []


ORDER = "no order between"
WAIT = "wait(peers, rank, ready + waited, call)"
NOTIFY = "notify(peers, owner, tile * WORLD + rank, call)"
COUNTED = "if count_off(finished, rank, stage, tiles):"
FAULTS = {
    "no wait for the products": ([(WAIT, "pass")], ORDER),
    "only the own stage's wait": (
        [
            (
                "        while waited <= stage:",
                "        waited = stage\n        while waited <= stage:",
            )
        ],
        ORDER,
    ),
    "each tile is ready": ([(COUNTED, "if True:")], ORDER),
    "a stage is never ready": (
        [(COUNTED, "if count_off(finished, rank, stage, tiles + 1):")],
        "waits for grouped_matmul_reduce_scatter.signals",
    ),
    "the owner before": ([("WORLD - 1 - step, WORLD", "step, WORLD")], ORDER),
    "one slot": ([("tile_offsets(call,", "tile_offsets(call * 0,")], ORDER),
    "wrong rank": ([(NOTIFY, NOTIFY.replace("owner", "(owner + 1) % WORLD"))], ORDER),
    "no signal": (
        [(NOTIFY, f"if rank != 1:\n            {NOTIFY}")],
        "waits for grouped_matmul_reduce_scatter.signals",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    found = faulty_calls(planted(module, tmp_path, *changes))
    assert any(message in finding for finding in found)


NUMBERS = {
    "without weights": ("bits.to(tl.float32, bitcast=True)[:, None] * product", "product"),
    "one choice too few": ("for choice in range(top_k):", "for choice in range(top_k - 1):"),
    "weights of another owner": ("weights = plans + owner *", "weights = plans + rank *"),
    "tiles of a stage from the first": ("(pick(done, expert, GROUPS) + row)", "row"),
}


@pytest.mark.parametrize("fault", ["none", *NUMBERS])
def test_wrong_numbers_are_found(fault: str, tmp_path: Path) -> None:
    m, k, n, experts, top_k, size = 10, 16, 20, 2, 2, 2
    plans = plans_of(size, m, experts, top_k, "one")
    xs = [torch.randn(size * m * top_k, k) for _ in range(size)]
    ws = [torch.randn(experts, k, n) for _ in range(size)]

    def right(faulty: ModuleType) -> bool:
        def work(home: Home) -> Tensor:
            workspace = faulty.grouped_matmul_reduce_scatter_workspace(
                home, m, n, experts, top_k, torch.float32, *TILE
            )
            workspace.products.local.zero_()
            mine = (xs[home.rank], ws[home.rank], torch.stack(plans), workspace)
            out: Tensor = faulty.grouped_matmul_reduce_scatter(*mine, blocks=BLOCKS, programs=3)
            return out

        expected = reference.grouped_matmul_reduce_scatter(xs, ws, plans, top_k)
        return all(
            torch.allclose(got, oracle, atol=1e-3)
            for got, oracle in zip(run(work, size), expected, strict=True)
        )

    changes = [NUMBERS[fault]] if fault in NUMBERS else []
    assert right(planted(module, tmp_path, *changes)) == (fault not in NUMBERS)


# Bad plans and input.


@IN_PARTS
@settings(max_examples=5, deadline=None)
@given(
    place=st.integers(0, 11),
    value=st.sampled_from([-(2**31), -1, 8, 9, 2**31 - 1]),
    bad=st.integers(0, 2),
    seed=SEEDS,
)
def test_bad_plans_are_flagged_and_hurt_no_other(
    part: int, place: int, value: int, bad: int, seed: int
) -> None:
    """Offsets (places 0 to 3) and pairs (4 to 11) of one rank's plan, of which 8 is too much."""
    torch.manual_seed(seed)
    m, k, n, experts, top_k, size = 4, 8, 5, 3, 2, 3
    plans = plans_of(size, m, experts, top_k, "one" if place > 3 else "any")
    if place in (0, 3) and value == 8:
        value = 9
    plans[bad][place] = value
    wrong = place > 3 or not (0 <= value <= 8 and (plans[bad][:4].diff() >= 0).all())
    xs = [torch.randn(size * m * top_k, k) for _ in range(size)]
    ws = [torch.randn(experts, k, n) for _ in range(size)]
    stacked, messages = torch.stack(plans), []

    def work(home: Home) -> list[Tensor]:
        workspace = grouped_matmul_reduce_scatter_workspace(
            home, m, n, experts, top_k, torch.float32, *TILE
        )
        mine = (xs[home.rank], ws[home.rank], stacked, workspace)
        out = grouped_matmul_reduce_scatter(*mine, blocks=BLOCKS, programs=2)
        try:
            workspace.check()
        except KernelError as error:
            messages.append(str(error))
        workspace.check()  # said once
        return [out]

    races = RaceDetector()
    by_rank = run(work, size, seed=seed, races=races)
    assert races.findings == []
    assert len(messages) == (size if wrong else 0)
    assert all(f"the plan of rank {bad} has" in message for message in messages)
    if wrong and place > 3:  # that one pair counts nothing
        return
    if wrong:
        plans[bad][: experts + 1] = 0
        plans[bad][experts + 1 :][: m * top_k] = 0
    oracle = reference.grouped_matmul_reduce_scatter(xs, ws, plans, top_k)
    for rank, ((mine,), expected) in enumerate(zip(by_rank, oracle, strict=True)):
        if rank != bad or wrong:
            close(mine, expected, torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(15, 16)}, "x's rows is 15; it must be 2 for each token of 2 ranks"),
        ({"x": torch.randn(20, 16)}, r"plans's shape is \[2, 20\]"),
        ({"w": torch.randn(3, 15, 20)}, r"w's shape is \[3, 15, 20\]; it must have 16 rows"),
        ({"w": torch.randn(2, 16, 20)}, r"w's shape is \[2, 16, 20\]; it must be 3 matrices"),
        ({"w": torch.randn(3, 16, 40)}, "what the result needs of the workspace is"),
        ({"plans": torch.zeros(2, 20)}, "plans's dtype is torch.float32"),
        ({"epilogue": Epilogue(bias=torch.zeros(3, 20))}, "epilogue is one with a bias or SiLU"),
        ({"epilogue": Epilogue(silu_multiply=True)}, "epilogue is one with a bias or SiLU"),
        ({"own": range(1)}, r"w's shape is \[3, 16, 20\]; it must be 1 matrices"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3"),
        ({"senders": -2}, "senders is -2"),
        ({"programs": -1}, "programs is -1"),
        ({"stages": 9}, "stages is 9"),
    ],
)
def test_bad_input_is_named_on_every_rank(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.randn(16, 16),
        "w": torch.randn(3, 16, 20),
        "plans": torch.zeros(2, 20, dtype=torch.int32),
        "blocks": BLOCKS,
    }
    arguments |= changes
    x, w, plans = (arguments.pop(name) for name in ("x", "w", "plans"))

    def work(home: Home) -> None:
        workspace = grouped_matmul_reduce_scatter_workspace(home, 4, 20, 3, 2, torch.float32, *TILE)
        with pytest.raises(KernelError, match=f"grouped_matmul_reduce_scatter: {message}"):
            grouped_matmul_reduce_scatter(x, w, plans, workspace, **arguments)  # type: ignore[arg-type]
        assert workspace.calls.item() == 0

    run(work, 2)


def test_ranks_that_make_different_workspaces_are_told() -> None:
    def work(home: Home) -> None:
        grouped_matmul_reduce_scatter_workspace(
            home, 20, 16, 4, 2, torch.float32, 16 << home.rank, 16
        )

    with pytest.raises(RankError, match="block_m is 16 on rank 0 and 32 on rank 1; it must be"):
        run(work, 2)


def test_an_expert_layer_of_torch_agrees_with_the_oracle() -> None:
    """The two oracles, one after the other, for one rank, against torch's own operators."""
    m, k, n, experts, top_k = 6, 8, 12, 3, 2
    x, w, back = torch.randn(m, k), torch.randn(experts, k, n), torch.randn(experts, n, k)
    weights, ids = torch.randn(m, experts).softmax(dim=1).topk(top_k)
    plan = make_plan(ids, weights, experts)
    rows = reference.all_gather_grouped_matmul([x], [w], [plan], top_k)[0]
    (got,) = reference.grouped_matmul_reduce_scatter([functional.silu(rows)], [back], [plan], top_k)
    each = functional.silu(torch.einsum("mk,ekn->men", x, w))
    each = torch.einsum("men,enk->mek", each, back)
    mixed = torch.zeros(m, experts).scatter(1, ids, weights)
    torch.testing.assert_close(got, torch.einsum("me,mek->mk", mixed, each))
