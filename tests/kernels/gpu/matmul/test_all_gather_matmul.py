"""All-gather and product in one: against its oracle, its order, its faults, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import (
    BLOCKS,
    CALLS,
    DTYPES,
    FP8,
    SEEDS,
    SLOWNESS,
    close,
    findings,
    run_calls,
)
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.matmul import all_gather_matmul as module
from weft.kernels.gpu.matmul.all_gather_matmul import (
    ahead_of,
    all_gather_matmul,
    all_gather_matmul_workspace,
    behind,
    step_and_part,
)
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.symmetric.memory import Home


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(0, 36),
    widths=st.lists(st.integers(0, 20), min_size=1, max_size=3),
    k=st.integers(0, 20),
    dtype=DTYPES,
    transposed=st.booleans(),
    topology=st.sampled_from(["switch", "mesh"]),
    nodes=st.booleans(),
    programs=st.integers(1, 5),
    senders=st.integers(0, 3),
    collect=st.booleans(),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_any_shape_and_order(
    size: int,
    m: int,
    widths: list[int],
    k: int,
    dtype: torch.dtype,
    transposed: bool,
    topology: str,
    nodes: bool,
    programs: int,
    senders: int,
    collect: bool,
    slowness: list[float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    xs = [[torch.randn(m, k).to(dtype) for _ in range(size)] for _ in range(CALLS)]
    ws = [[torch.randn(k, n).to(dtype) for n in widths] for _ in range(size)]
    options = {
        "topology": topology,
        "ranks_per_node": size // 2 if nodes and size % 2 == 0 else 0,
        "blocks": BLOCKS,
        "programs": programs,
        "senders": senders,
    }

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_matmul_workspace(home, m, k, dtype, block_m=BLOCKS[0])
        mine = [w.T.contiguous().T if transposed else w for w in ws[home.rank]]
        results = []
        for call in xs:
            gathered = torch.full((size * m, k), float("nan"), dtype=dtype) if collect else None
            out = all_gather_matmul(
                call[home.rank],
                mine if len(mine) > 1 else mine[0],
                workspace,
                gathered=gathered,
                **options,
            )
            results += [out] if gathered is None else [out, gathered]
        workspace.check()
        return results

    got = run_calls(work, size, seed, slowness)
    joined = [torch.cat(mine, dim=1) for mine in ws]
    for call in xs:
        for mine, expected in zip(
            got.pop(0), reference.all_gather_matmul(call, joined), strict=True
        ):
            close(mine, expected, dtype)
        if collect:
            for mine, expected in zip(got.pop(0), reference.all_gather(call), strict=True):
                assert torch.equal(mine, expected)


@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(1, 20),
    n=st.integers(1, 12),
    gate_up=st.sampled_from(["", "alternate", "halves"]),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_epilogues(
    size: int, m: int, n: int, gate_up: str, slowness: list[float], seed: int
) -> None:
    torch.manual_seed(seed)
    k, columns = 24, 2 * n
    xs = [[torch.randn(m, k).bfloat16() for _ in range(size)] for _ in range(CALLS)]
    ws = [torch.randn(k, columns).bfloat16() / 4 for _ in range(size)]
    biases = [torch.randn(columns) for _ in range(size)]
    residuals = [torch.randn(size * m, n if gate_up else columns) for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = all_gather_matmul_workspace(home, m, k, torch.bfloat16, block_m=BLOCKS[0])
        epilogue = Epilogue(
            bias=biases[rank],
            silu_multiply=bool(gate_up),
            residual=residuals[rank],
            out_dtype=torch.float32,
        )
        halves = [half.contiguous() for half in ws[rank].split(n, dim=1)]
        w = halves if gate_up == "halves" else ws[rank]
        return [
            all_gather_matmul(call[rank], w, workspace, epilogue=epilogue, blocks=BLOCKS)
            for call in xs
        ]

    for got, call in zip(run_calls(work, size, seed, slowness), xs, strict=True):
        products = reference.all_gather_matmul(call, ws)
        for mine, product, bias, residual in zip(got, products, biases, residuals, strict=True):
            expected = reference.epilogue(product, bias=bias, gate_up=gate_up, residual=residual)
            torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    size=st.integers(1, 4),
    m=st.integers(1, 20),
    by_row=st.none() | st.booleans(),
    by_column=st.none() | st.booleans(),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_scales_of_fp8_travel_with_their_rows(
    size: int,
    m: int,
    by_row: bool | None,
    by_column: bool | None,
    slowness: list[float],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    k, n = 16, 12
    xs = [[torch.randn(m, k).to(FP8) for _ in range(size)] for _ in range(CALLS)]
    scales = [[torch.rand(m if by_row else 1) + 0.5 for _ in range(size)] for _ in range(CALLS)]
    ws = [torch.randn(n, k).to(FP8).T for _ in range(size)]
    w_scales = [torch.rand(n if by_column else 1) + 0.5 for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = all_gather_matmul_workspace(home, m, k, FP8, block_m=BLOCKS[0])
        out = []
        for call, scale in zip(xs, scales, strict=True):
            epilogue = Epilogue(
                x_scale=None if by_row is None else scale[rank],
                w_scale=None if by_column is None else w_scales[rank],
            )
            x, w = call[rank], ws[rank]
            out.append(all_gather_matmul(x, w, workspace, epilogue=epilogue, blocks=BLOCKS))
        return out

    for got, call, scale in zip(run_calls(work, size, seed, slowness), xs, scales, strict=True):
        left = [
            x.float() * (1 if by_row is None else s[:, None])
            for x, s in zip(call, scale, strict=True)
        ]
        right = [
            w.float() * (1 if by_column is None else s) for w, s in zip(ws, w_scales, strict=True)
        ]
        for mine, expected in zip(got, reference.all_gather_matmul(left, right), strict=True):
            close(mine, expected, torch.bfloat16)


def test_calls_of_several_shapes_share_a_workspace() -> None:
    shapes = [(40, 24, 20), (3, 24, 20), (17, 8, 33), (40, 24, 20)]
    xs = [[torch.randn(m, k) for _ in range(3)] for m, k, _ in shapes]
    ws = [[torch.randn(k, n) for _ in range(3)] for _, k, n in shapes]

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_matmul_workspace(home, 40, 24, torch.float32, block_m=BLOCKS[0])
        return [
            all_gather_matmul(x[home.rank], w[home.rank], workspace, blocks=BLOCKS)
            for x, w in zip(xs, ws, strict=True)
        ]

    for got, x, w in zip(run_calls(work, 3, seed=5), xs, ws, strict=True):
        for mine, expected in zip(got, reference.all_gather_matmul(x, w), strict=True):
            close(mine, expected, torch.float32)


def test_the_tiling_that_it_chooses() -> None:
    xs = [torch.randn(130, 40) for _ in range(2)]
    ws = [torch.randn(40, 130) for _ in range(2)]

    def work(home: Home) -> list[Tensor]:
        workspace = all_gather_matmul_workspace(home, 130, 40, torch.float32)
        return [all_gather_matmul(xs[home.rank], ws[home.rank], workspace)]

    for mine, expected in zip(
        run_calls(work, 2, seed=0)[0], reference.all_gather_matmul(xs, ws), strict=True
    ):
        close(mine, expected, torch.float32)


# The order.


@triton.jit
def list_steps(
    sources,
    targets,
    order,
    parts,
    WORLD: tl.constexpr,
    NODE: tl.constexpr,
    MESH: tl.constexpr,
):
    for rank in range(WORLD):
        for step in range(WORLD):
            tl.store(sources + rank * WORLD + step, ahead_of(rank, step, WORLD, NODE))
            tl.store(targets + rank * WORLD + step, behind(rank, step, WORLD, NODE))
    for index in range(WORLD * parts):
        step, part = step_and_part(index, parts, WORLD, MESH)
        tl.store(order + 2 * index, step)
        tl.store(order + 2 * index + 1, part)


@pytest.fixture
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("world", "node"), [(1, 1), (2, 2), (4, 4), (4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("mesh", [False, True])
def test_what_is_sent_first_is_wanted_first(world: int, node: int, mesh: bool) -> None:
    parts = 3
    sources, targets = torch.zeros(2, world, world, dtype=torch.int32)
    order = torch.zeros(world * parts, 2, dtype=torch.int32)
    list_steps[(1,)](sources, targets, order, parts, WORLD=world, NODE=node, MESH=mesh)
    ranks = list(range(world))
    for rank in ranks:
        assert sources[rank, 0] == rank
        assert sorted(sources[rank].tolist()) == ranks
        assert {source // node for source in sources[rank, :node].tolist()} == {rank // node}
        for step in ranks:
            assert sources[targets[rank, step], step] == rank
    for step in ranks:  # at each step all ranks take from different ones
        assert sorted(sources[:, step].tolist()) == ranks
    steps = [(step, part) for step, part in order.tolist()]
    assert sorted(steps) == [(step, part) for step in ranks for part in range(parts)]
    own = [(0, part) for part in range(parts)]
    others = sorted(set(steps) - set(own), key=lambda s: (s[1], s[0]) if mesh else s)
    assert steps == own + others


# Faults.


def faulty_calls(faulty: ModuleType, **options: object) -> list[str]:
    def work(home: Home) -> None:
        workspace = faulty.all_gather_matmul_workspace(home, 20, 16, torch.float32, 16)
        x, w, gathered = torch.randn(20, 16), torch.randn(16, 20), torch.empty(60, 16)
        for _ in range(3):
            faulty.all_gather_matmul(
                x, w, workspace, gathered=gathered, blocks=BLOCKS, programs=2, **options
            )

    return findings(work)


WAIT = "wait(peers, rank, chunk * WORLD + shard, call)"
NOTIFY = "notify(peers, peer, chunk * WORLD + rank, call)"
PEER = "peer = behind(rank, step, WORLD, NODE)\n        row = chunk * BLOCK_M"
PUSH_SLOT = "place = slot_of(call) * peers.slot_numel"


@pytest.mark.sweep
@pytest.mark.parametrize("topology", ["switch", "mesh"])
def test_nothing_is_found_without_a_fault(topology: str) -> None:
    assert faulty_calls(module, topology=topology) == []


ORDER = "no order between"
FAULTS = {
    "no wait": ([(WAIT, "pass")], ORDER),
    "another chunk's wait": (
        [(WAIT, WAIT.replace("chunk *", "(chunk + 1) % tl.cdiv(m, BLOCK_M) *"))],
        ORDER,
    ),
    "one slot": (
        [
            (PUSH_SLOT, "place = 0 * peers.slot_numel"),
            ("slot_of(call) * peers.slot_numel", "0 * peers.slot_numel"),
        ],
        ORDER,
    ),
    "wrong rank": ([(NOTIFY, NOTIFY.replace(" peer", " (peer + 1) % WORLD"))], ORDER),
    "wrong source": (
        [("= ahead_of(rank, step, WORLD", "= ahead_of(rank, step + 1, WORLD")],
        "waits for all_gather_matmul.signals",
    ),
    "no signal": (
        [(NOTIFY, f"if rank != 1:\n            {NOTIFY}")],
        "rank 0 waits for all_gather_matmul.signals",
    ),
    "early signal": ([(PEER, f"{PEER}\n        {NOTIFY}")], ORDER),
}


@pytest.mark.sweep
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    found = faulty_calls(planted(module, tmp_path, *changes))
    assert any(message in finding for finding in found)


def test_signals_that_change_hands_between_shapes_are_found(tmp_path: Path) -> None:
    changes = [
        (NOTIFY, "notify(peers, peer, rank * chunks + chunk, call)"),
        (WAIT, "wait(peers, rank, shard * tl.cdiv(m, BLOCK_M) + chunk, call)"),
    ]

    def found(faulty: ModuleType) -> list[str]:
        def work(home: Home) -> None:
            workspace = faulty.all_gather_matmul_workspace(home, 24, 16, torch.float32, 16)
            for rows in (8, 24, 8):
                x, w = torch.randn(rows, 16), torch.randn(16, 16)
                faulty.all_gather_matmul(x, w, workspace, blocks=BLOCKS, programs=1, senders=1)

        return findings(work, slowness=[1.0, 1.0, 50.0])

    assert found(module) == []
    assert found(planted(module, tmp_path, *changes))


def test_scales_that_come_after_the_signal_are_found(tmp_path: Path) -> None:
    early = "        if x_scale is not None:\n            at_m"
    faulty = planted(module, tmp_path, (early, f"        {NOTIFY}\n{early}"))

    def work(home: Home) -> None:
        workspace = faulty.all_gather_matmul_workspace(home, 20, 16, FP8, 16)
        x, w = torch.randn(20, 16).to(FP8), torch.randn(16, 20).to(FP8)
        epilogue = Epilogue(x_scale=torch.rand(20))
        for _ in range(3):
            faulty.all_gather_matmul(x, w, workspace, epilogue=epilogue, blocks=BLOCKS)

    assert any("all_gather_matmul.scales[" in finding for finding in findings(work))


# Bad input.


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(1, 3))
def test_bad_input_is_named_on_every_rank_before_anything_is_launched(
    data: st.DataObject, size: int
) -> None:
    x, w, options = torch.randn(20, 16), torch.randn(16, 20), {"blocks": BLOCKS}
    fault = data.draw(st.sampled_from(["rows", "k", "dtype", "small blocks", "shape", *OPTIONS]))
    match fault:
        case "rows":
            rows = data.draw(st.integers(21, 40))
            x, named = torch.randn(rows, 16), "what x_shard needs of the workspace is"
        case "k":
            k = data.draw(st.integers(0, 15))
            w, named = torch.randn(k, 20), f"w's shape is [{k}, 20]; it must have 16 rows"
        case "dtype":
            x, named = x.half(), "x_shard's dtype is torch.float16; it must be torch.float32"
        case "small blocks":
            x = torch.randn(80, 4)
            w, named = torch.randn(4, 20), "x_shard's rows is 80"
        case "shape":
            shape = data.draw(st.sampled_from([(20 * size, 15), (20 * size + 1, 16), (16,)]))
            options, named = {"gathered": torch.empty(shape)}, f"gathered's shape is {list(shape)}"
        case _:
            options, named = {fault: OPTIONS[fault]}, f"{fault} is {OPTIONS[fault]!r}"
    messages = []

    def work(home: Home) -> None:
        workspace = all_gather_matmul_workspace(home, 20, 16, torch.float32, 16)
        try:
            all_gather_matmul(x, w, workspace, **options)  # type: ignore[arg-type]
        except KernelError as error:
            assert workspace.calls.item() == 0
            messages.append(str(error))

    run(work, size)
    assert len(messages) == size
    assert len(set(messages)) == 1
    assert messages[0].startswith("all_gather_matmul: ")
    assert named in messages[0]


OPTIONS = {"topology": "ring", "ranks_per_node": 4, "programs": -1, "senders": -2, "warps": 5}


def test_ranks_that_make_different_workspaces_are_told() -> None:
    def work(home: Home) -> None:
        all_gather_matmul_workspace(home, 20 + home.rank, 16, torch.float32)

    with pytest.raises(
        RankError, match="max_rows is 20 on rank 0 and 21 on rank 1; it must be the same"
    ):
        run(work, 2)
