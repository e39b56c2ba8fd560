"""All-gather and expert products in one: against its oracle, faults, bad plans, bad input."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.experts import ROUTINGS, own_experts, plans_of, routed
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

from weft.kernels import reference
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.experts import all_gather_grouped_matmul as module
from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    all_gather_grouped_matmul,
    all_gather_grouped_matmul_workspace,
    make_plan,
)
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.runtime import signals
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.symmetric.memory import Home


@IN_PARTS
@settings(max_examples=5, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(0, 12),
    widths=st.lists(st.integers(0, 20), min_size=1, max_size=2),
    k=st.integers(1, 20),
    experts=st.integers(1, 4),
    top_k=st.integers(1, 3),
    routing=ROUTINGS,
    dtype=DTYPES,
    transposed=st.booleans(),
    cut=st.booleans(),
    topology=st.sampled_from(["switch", "mesh"]),
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
    widths: list[int],
    k: int,
    experts: int,
    top_k: int,
    routing: str,
    dtype: torch.dtype,
    transposed: bool,
    cut: bool,
    topology: str,
    nodes: bool,
    programs: int,
    senders: int,
    slowness: list[float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    xs = [[torch.randn(m, k).to(dtype) for _ in range(size)] for _ in range(CALLS)]
    plans = [plans_of(size, m, experts, top_k, routing) for _ in range(CALLS)]
    ws = [[torch.randn(experts, k, n).to(dtype) for n in widths] for _ in range(size)]
    options = {
        "topology": topology,
        "ranks_per_node": size // 2 if nodes and size % 2 == 0 else 0,
        "blocks": BLOCKS,
        "programs": programs,
        "senders": senders,
    }

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_grouped_matmul_workspace(home, m, k, experts, top_k, dtype)
        own = own_experts(home.rank, experts, cut)
        mine = [w[own.start : own.stop] for w in ws[home.rank]]
        mine = [w.mT.contiguous().mT if transposed else w for w in mine]
        results = []
        for call, call_plans in zip(xs, plans, strict=True):
            gathered = torch.full((size, len(call_plans[0])), -7, dtype=torch.int32)
            out = all_gather_grouped_matmul(
                call[home.rank],
                mine if len(mine) > 1 else mine[0],
                call_plans[home.rank],
                workspace,
                plans=gathered,
                own=own if cut else None,
                **options,  # type: ignore[arg-type]
            )
            results += [out, gathered]
        workspace.check()
        return results

    got = run_calls(work, size, seed, slowness)
    joined = [torch.cat(mine, dim=2) for mine in ws]
    for call, call_plans in zip(xs, plans, strict=True):
        oracle = reference.all_gather_grouped_matmul(call, joined, call_plans, top_k)
        for rank, (mine, expected) in enumerate(zip(got.pop(0), oracle, strict=True)):
            rows = routed(call_plans, own_experts(rank, experts, cut), m * top_k)
            assert mine.shape == expected.shape
            close(mine[rows], expected[rows], dtype)
        for mine in got.pop(0):
            assert torch.equal(mine, torch.stack(call_plans))


@settings(max_examples=6, deadline=None)
@given(
    size=st.integers(1, 3),
    m=st.integers(1, 10),
    n=st.integers(1, 12),
    gate_up=st.sampled_from(["", "alternate", "halves"]),
    seed=SEEDS,
)
def test_epilogues(size: int, m: int, n: int, gate_up: str, seed: int) -> None:
    torch.manual_seed(seed)
    k, columns, experts, top_k = 24, 2 * n, 3, 2
    xs = [torch.randn(m, k).bfloat16() for _ in range(size)]
    plans = plans_of(size, m, experts, top_k, "any")
    rows = routed(plans, range(experts), m * top_k)
    ws = [torch.randn(experts, k, columns).bfloat16() / 4 for _ in range(size)]
    biases = [torch.randn(experts, columns) for _ in range(size)]
    shape = (len(rows), n if gate_up else columns)
    residuals = [torch.randn(shape) for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = all_gather_grouped_matmul_workspace(home, m, k, experts, top_k, torch.bfloat16)
        epilogue = Epilogue(
            bias=biases[rank],
            silu_multiply=bool(gate_up),
            residual=residuals[rank],
            out_dtype=torch.float32,
        )
        halves = [half.contiguous() for half in ws[rank].split(n, dim=2)]
        w = halves if gate_up == "halves" else ws[rank]
        mine = (xs[rank], w, plans[rank], workspace)
        return [all_gather_grouped_matmul(*mine, epilogue=epilogue, blocks=BLOCKS)]

    (got,) = run_calls(work, size, seed)
    products = reference.all_gather_grouped_matmul(xs, ws, plans, top_k)
    pairs = m * top_k
    for mine, product, bias, residual in zip(got, products, biases, residuals, strict=True):
        for rank, plan in enumerate(plans):
            for e in range(experts):
                begin, end = (rank * pairs + int(plan[i]) for i in (e, e + 1))
                product[begin:end] += bias[e]
        expected = reference.epilogue(product, gate_up=gate_up, residual=residual)
        torch.testing.assert_close(mine[rows], expected[rows], atol=1e-3, rtol=1e-4)


@settings(max_examples=6, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(1, 10),
    by_row=st.none() | st.booleans(),
    by=st.sampled_from(["nothing", "one", "expert", "column"]),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_scales_of_fp8_travel_with_their_rows(
    size: int, m: int, by_row: bool | None, by: str, slowness: list[float], seed: int
) -> None:
    torch.manual_seed(seed)
    k, n, experts, top_k = 16, 12, 2, 2
    xs = [[torch.randn(m, k).to(FP8) for _ in range(size)] for _ in range(2)]
    scales = [[torch.rand(m if by_row else 1) + 0.5 for _ in range(size)] for _ in range(2)]
    plans = plans_of(size, m, experts, top_k, "any")
    rows = routed(plans, range(experts), m * top_k)
    ws = [torch.randn(experts, n, k).to(FP8).mT for _ in range(size)]
    shapes = {"nothing": (1,), "one": (1,), "expert": (experts, 1), "column": (experts, n)}
    w_scales = [torch.rand(shapes[by]) + 0.5 for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = all_gather_grouped_matmul_workspace(home, m, k, experts, top_k, FP8)
        out = []
        for call, scale in zip(xs, scales, strict=True):
            epilogue = Epilogue(
                x_scale=None if by_row is None else scale[rank],
                w_scale=None if by == "nothing" else w_scales[rank],
            )
            mine = (call[rank], ws[rank], plans[rank], workspace)
            out.append(all_gather_grouped_matmul(*mine, epilogue=epilogue, blocks=BLOCKS))
        return out

    for got, call, scale in zip(run_calls(work, size, seed, slowness), xs, scales, strict=True):
        left = [
            x.float() * (1 if by_row is None else s[:, None])
            for x, s in zip(call, scale, strict=True)
        ]
        factors = [s if by in ("nothing", "one") else s[:, None, :] for s in w_scales]
        right = [
            w.float() * (1 if by == "nothing" else s) for w, s in zip(ws, factors, strict=True)
        ]
        oracle = reference.all_gather_grouped_matmul(left, right, plans, top_k)
        for mine, expected in zip(got, oracle, strict=True):
            close(mine[rows], expected[rows], torch.bfloat16)


def test_calls_of_several_shapes_share_a_workspace() -> None:
    shapes = [(12, 24), (3, 24), (7, 8), (12, 24)]
    experts, top_k, size = 3, 2, 3
    xs = [[torch.randn(m, k) for _ in range(size)] for m, k in shapes]
    ws = [[torch.randn(experts, k, 20) for _ in range(size)] for _, k in shapes]
    plans = [plans_of(size, m, experts, top_k, "any") for m, _ in shapes]

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_grouped_matmul_workspace(home, 12, 24, experts, top_k, torch.float32)
        return [
            all_gather_grouped_matmul(
                *(x[home.rank], w[home.rank], plan[home.rank], workspace), blocks=BLOCKS
            )
            for x, w, plan in zip(xs, ws, plans, strict=True)
        ]

    for got, x, w, plan in zip(run_calls(work, size, seed=5), xs, ws, plans, strict=True):
        rows = routed(plan, range(experts), len(x[0]) * top_k)
        for mine, expected in zip(
            got, reference.all_gather_grouped_matmul(x, w, plan, top_k), strict=True
        ):
            close(mine[rows], expected[rows], torch.float32)


def test_shards_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 24)
    size, m, k, experts, top_k = 3, 9, 16, 2, 2
    xs = [torch.randn(m, k) for _ in range(size)]
    w = torch.randn(experts, k, 8)
    plans = plans_of(size, m, experts, top_k, "one")

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_grouped_matmul_workspace(home, m, k, experts, top_k, torch.float32)
        mine = (xs[home.rank], w, plans[home.rank], workspace)
        return [all_gather_grouped_matmul(*mine, blocks=BLOCKS) for _ in range(3)]

    oracle = reference.all_gather_grouped_matmul(xs, [w] * size, plans, top_k)
    for got in run_calls(work, size, seed=3, slowness=[1.0, 20.0, 1.0]):
        for mine, expected in zip(got, oracle, strict=True):
            close(mine, expected, torch.float32)


def test_a_plan_has_every_pair_of_an_expert() -> None:
    ids = torch.tensor([[2, 0], [7, 2], [-1, 1]])
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    plan = make_plan(ids, weights, 3)
    assert plan.dtype == torch.int32
    assert plan[:4].tolist() == [1, 2, 3, 5]
    assert plan[4:10].tolist() == [4, 1, 5, 0, 3, 2]
    assert plan[10:].view(torch.float32).tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]


# Faults.


def faulty_calls(faulty: ModuleType, **options: object) -> list[str]:
    plans = plans_of(3, 7, 2, 2, "any")

    def work(home: Home) -> None:
        workspace = faulty.all_gather_grouped_matmul_workspace(home, 7, 16, 2, 2, torch.float32)
        x, w = torch.randn(7, 16), torch.randn(2, 16, 20)
        gathered = torch.empty(3, len(plans[0]), dtype=torch.int32)
        for _ in range(3):
            faulty.all_gather_grouped_matmul(
                *(x, w, plans[home.rank], workspace),
                plans=gathered,
                blocks=BLOCKS,
                programs=2,
                **options,
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faulty, "CHUNK", 48)
        return findings(work)


@pytest.mark.parametrize("topology", ["switch", pytest.param("mesh", marks=pytest.mark.slow)])
def test_nothing_is_found_without_a_fault(topology: str) -> None:
    assert faulty_calls(module, topology=topology) == []


ORDER = "no order between"
WAIT = "wait(peers, rank, shard, call)"
COUNT = "tl.atomic_add(counter, 1, sem="
FAULTS = {
    "no wait": ([(WAIT, "pass")], ORDER),
    "another rank's wait": ([(WAIT, WAIT.replace("shard", "(shard + 1) % WORLD"))], ORDER),
    "one slot": ([("slot_of(call) *", "0 *")], ORDER),
    "wrong rank": (
        [("notify(peers, peer, rank", "notify(peers, (peer + 1) % WORLD, rank")],
        ORDER,
    ),
    "no signal": (
        [("if count_off(sent, rank, peer, parts):", "if count_off(sent, rank, peer, parts + 1):")],
        "waits for all_gather_grouped_matmul.signals",
    ),
    "each part signals": (
        [("if count_off(sent, rank, peer, parts):", "if True:")],
        ORDER,
    ),
    "a count that orders nothing": ([(f'{COUNT}"acq_rel"', f'{COUNT}"relaxed"')], ORDER),
    "a count that releases only": ([(f'{COUNT}"acq_rel"', f'{COUNT}"release"')], ORDER),
    "a count within one GPU": (
        [(f'{COUNT}"acq_rel", scope="sys"', f'{COUNT}"acq_rel", scope="gpu"')],
        ORDER,
    ),
    "a counter that is not set back": (
        [("        tl.store(counter, 0)\n", "        pass\n")],
        "waits for all_gather_grouped_matmul.signals",
    ),
    "rows of a stage to come": (
        [("(steps == stage) &", "(steps == stage + 1) &")],
        "",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    found = faulty_calls(planted(module, tmp_path, *changes, parts=[signals]))
    assert any(message in finding for finding in found)


NUMBERS = {
    "tiles of whole rows only": ("tl.where(stage < WORLD - 1,", "tl.where(stage < WORLD,"),
    "tiles of a stage from the first": ("(pick(done, expert, GROUPS) + row)", "row"),
    "the first rank's experts": (", first + expert, by_step", ", expert, by_step"),
    "the wrong token": ("(source * m + token)", "(source * m)"),
    "the wrong place": ("(source * pairs + place)", "(source * pairs)"),
    "tiles left out": ("tile -= tiles", "tile -= tiles - 1"),
}


@pytest.mark.parametrize("fault", ["none", *NUMBERS])
def test_wrong_numbers_are_found(fault: str, tmp_path: Path) -> None:
    """Of three experts, the ranks have the last two."""
    plans = [
        make_plan(1 + torch.full((12, 2), rank), torch.rand(12, 2) + 0.5, 3) for rank in range(2)
    ]
    xs, w = [torch.randn(12, 16) for _ in range(2)], torch.randn(2, 16, 20)

    def results(faulty: ModuleType) -> list[Tensor]:
        def work(home: Home) -> Tensor:
            workspace = faulty.all_gather_grouped_matmul_workspace(
                home, 12, 16, 3, 2, torch.float32
            )
            mine = (xs[home.rank], w, plans[home.rank], workspace)
            out: Tensor = faulty.all_gather_grouped_matmul(
                *mine, own=range(1, 3), blocks=BLOCKS, programs=3
            )
            return out

        return run(work, 2)

    all_three = torch.cat([torch.zeros(1, 16, 20), w])
    expected = reference.all_gather_grouped_matmul(xs, [all_three] * 2, plans, 2)

    def right(got: list[Tensor]) -> bool:
        return all(torch.allclose(g, e, atol=1e-4) for g, e in zip(got, expected, strict=True))

    changes = [NUMBERS[fault]] if fault in NUMBERS else []
    assert right(results(planted(module, tmp_path, *changes))) == (fault not in NUMBERS)


# Bad plans and input.


@settings(max_examples=10, deadline=None)
@given(
    place=st.integers(0, 11),
    value=st.sampled_from([-(2**31), -1, 8, 9, 2**31 - 1]),
    bad=st.integers(0, 2),
    seed=SEEDS,
)
def test_bad_plans_are_flagged_and_hurt_no_other(
    place: int, value: int, bad: int, seed: int
) -> None:
    """Offsets (places 0 to 3) and pairs (4 to 11) of one rank's plan, of which 8 is too much."""
    torch.manual_seed(seed)
    m, k, experts, top_k, size = 4, 8, 3, 2, 3
    plans = plans_of(size, m, experts, top_k, "one" if place > 3 else "any")
    if place in (0, 3) and value == 8:
        value = 9
    plans[bad][place] = value
    wrong = place > 3 or not (0 <= value <= 8 and (plans[bad][:4].diff() >= 0).all())
    xs = [torch.randn(m, k) for _ in range(size)]
    w = torch.randn(experts, k, 5)
    messages = []

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_grouped_matmul_workspace(home, m, k, experts, top_k, torch.float32)
        mine = (xs[home.rank], w, plans[home.rank], workspace)
        out = all_gather_grouped_matmul(*mine, blocks=BLOCKS, programs=2)
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
    if wrong:
        plans[bad] = torch.zeros_like(plans[bad])  # what its rows are, nobody knows
    rows = routed(plans, range(experts), m * top_k)
    oracle = reference.all_gather_grouped_matmul(xs, [w] * size, plans, top_k)
    for (mine,), expected in zip(by_rank, oracle, strict=True):
        close(mine[rows], expected[rows], torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(5, 16)}, "what x_shard needs of the workspace is"),
        ({"x": torch.randn(4, 16).half()}, "x_shard's dtype is torch.float16"),
        ({"w": torch.randn(3, 15, 20)}, r"w's shape is \[3, 15, 20\]; it must have 16 rows"),
        ({"w": torch.randn(2, 16, 20)}, r"w's shape is \[2, 16, 20\]; it must be 3 matrices"),
        ({"plan": torch.zeros(12).int()}, r"plan's shape is \[12\]; it must be \[20\]"),
        ({"plan": torch.zeros(20)}, "plan's dtype is torch.float32"),
        ({"plans": torch.zeros(1, 20).int()}, r"plans's shape is \[1, 20\]; it must be \[2, 20\]"),
        ({"own": range(2, 4)}, r"own is range\(2, 4\); it must be consecutive numbers in range"),
        ({"own": range(1, 3)}, r"w's shape is \[3, 16, 20\]; it must be 2 matrices"),
        ({"topology": "ring"}, "topology is 'ring'"),
        ({"ranks_per_node": 3}, "ranks_per_node is 3"),
        ({"senders": -2}, "senders is -2"),
        ({"programs": -1}, "programs is -1"),
        ({"warps": 5}, "warps is 5"),
    ],
)
def test_bad_input_is_named_on_every_rank(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.randn(4, 16),
        "w": torch.randn(3, 16, 20),
        "plan": torch.zeros(20, dtype=torch.int32),
        "blocks": BLOCKS,
    }
    arguments |= changes
    x, w, plan = (arguments.pop(name) for name in ("x", "w", "plan"))

    def work(home: Home) -> None:
        workspace = all_gather_grouped_matmul_workspace(home, 4, 16, 3, 2, torch.float32)
        with pytest.raises(KernelError, match=f"all_gather_grouped_matmul: {message}"):
            all_gather_grouped_matmul(x, w, plan, workspace, **arguments)  # type: ignore[arg-type]
        assert workspace.calls.item() == 0

    run(work, 2)


def test_ranks_that_make_different_workspaces_are_told() -> None:
    def work(home: Home) -> None:
        all_gather_grouped_matmul_workspace(home, 20, 16, 4 + home.rank, 2, torch.float32)

    with pytest.raises(RankError, match="experts is 4 on rank 0 and 5 on rank 1; it must be the"):
        run(work, 2)
