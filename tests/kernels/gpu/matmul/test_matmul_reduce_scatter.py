"""Product and reduce-scatter or all-reduce in one: against their oracles, faults, bad input."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
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
from weft.kernels.gpu.matmul import matmul_reduce_scatter as module
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.runtime import signals
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.symmetric.memory import Home

OPS = {
    "matmul_reduce_scatter": (
        matmul_reduce_scatter_workspace,
        matmul_reduce_scatter,
        reference.matmul_reduce_scatter,
    ),
    "matmul_all_reduce": (
        matmul_all_reduce_workspace,
        matmul_all_reduce,
        reference.matmul_all_reduce,
    ),
}
NAMES = st.sampled_from(list(OPS))


@settings(max_examples=20, deadline=None)
@given(
    name=NAMES,
    size=st.integers(1, 4),
    m=st.integers(0, 24),
    n=st.integers(0, 24),
    k=st.integers(0, 24),
    dtype=DTYPES,
    travels=DTYPES,
    transposed=st.booleans(),
    topology=st.sampled_from(["switch", "mesh"]),
    nodes=st.booleans(),
    programs=st.integers(1, 5),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_any_shape_and_order(
    name: str,
    size: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    travels: torch.dtype,
    transposed: bool,
    topology: str,
    nodes: bool,
    programs: int,
    slowness: list[float],
    seed: int,
) -> None:
    make, op, oracle = OPS[name]
    scatter = name == "matmul_reduce_scatter"
    torch.manual_seed(seed)
    rows = size * m if scatter else m
    xs = [[torch.randn(rows, k).to(dtype) for _ in range(size)] for _ in range(CALLS)]
    ws = [torch.randn(k, n).to(dtype) for _ in range(size)]
    options = {"blocks": BLOCKS, "programs": programs}
    if scatter:
        options |= {
            "topology": topology,
            "ranks_per_node": size // 2 if nodes and size % 2 == 0 else 0,
        }

    def work(home: Home) -> list[Tensor]:
        workspace = make(home, m, n, travels, *BLOCKS[:2])
        w = ws[home.rank]
        w = w.T.contiguous().T if transposed else w
        out = [op(call[home.rank], w, workspace, **options) for call in xs]
        workspace.check()
        return out

    coarse = torch.bfloat16 if torch.bfloat16 in (dtype, travels) else travels
    for got, call in zip(run_calls(work, size, seed, slowness), xs, strict=True):
        for mine, expected in zip(got, oracle(call, ws), strict=True):
            assert mine.dtype == travels
            close(mine.to(coarse), expected, coarse)
        if not scatter:
            assert all(torch.equal(got[0], other) for other in got[1:])


@settings(max_examples=10, deadline=None)
@given(
    name=NAMES,
    size=st.integers(1, 4),
    m=st.integers(1, 20),
    n=st.integers(1, 12),
    silu=st.booleans(),
    residual=st.booleans(),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_epilogues_come_once_after_the_sum(
    name: str,
    size: int,
    m: int,
    n: int,
    silu: bool,
    residual: bool,
    slowness: list[float],
    seed: int,
) -> None:
    make, op, oracle = OPS[name]
    scatter = name == "matmul_reduce_scatter"
    torch.manual_seed(seed)
    k, columns = 24, 2 * n
    rows = size * m if scatter else m
    xs = [[torch.randn(rows, k).half() / 4 for _ in range(size)] for _ in range(CALLS)]
    ws = [torch.randn(k, columns).half() / 4 for _ in range(size)]
    bias = torch.randn(columns)
    owners = size if scatter else 1
    residuals = [torch.randn(m, n if silu else columns).half() for _ in range(owners)]

    def work(home: Home) -> list[Tensor]:
        workspace = make(home, m, columns, torch.float32, *BLOCKS[:2])
        epilogue = Epilogue(
            bias=bias,
            silu_multiply=silu,
            residual=residuals[home.rank % owners] if residual else None,
            out_dtype=torch.float32,
        )
        return [
            op(call[home.rank], ws[home.rank], workspace, epilogue=epilogue, blocks=BLOCKS)
            for call in xs
        ]

    for got, call in zip(run_calls(work, size, seed, slowness), xs, strict=True):
        for rank, (mine, product) in enumerate(zip(got, oracle(call, ws), strict=True)):
            expected = reference.epilogue(
                product,
                bias=bias,
                gate_up="alternate" if silu else "",
                residual=residuals[rank % owners] if residual else None,
            )
            torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(
    name=NAMES,
    size=st.integers(1, 4),
    m=st.integers(1, 24),
    by_row=st.booleans(),
    by_column=st.booleans(),
    seed=SEEDS,
)
def test_scales_of_fp8_are_each_ranks_own(
    name: str, size: int, m: int, by_row: bool, by_column: bool, seed: int
) -> None:
    make, op, oracle = OPS[name]
    torch.manual_seed(seed)
    k, n = 24, 20
    rows = size * m if name == "matmul_reduce_scatter" else m
    xs = [torch.randn(rows, k).to(FP8) for _ in range(size)]
    ws = [torch.randn(n, k).to(FP8).T for _ in range(size)]
    x_scales = [torch.rand(rows if by_row else 1) + 0.5 for _ in range(size)]
    w_scales = [torch.rand(n if by_column else 1) + 0.5 for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        rank = home.rank
        workspace = make(home, m, n, torch.float32, *BLOCKS[:2])
        epilogue = Epilogue(x_scales[rank], w_scales[rank])
        return [op(xs[rank], ws[rank], workspace, epilogue=epilogue, blocks=BLOCKS)]

    left = [x.float() * s[:, None] for x, s in zip(xs, x_scales, strict=True)]
    right = [w.float() * s for w, s in zip(ws, w_scales, strict=True)]
    got = run_calls(work, size, seed)[0]
    for mine, expected in zip(got, oracle(left, right), strict=True):
        torch.testing.assert_close(mine, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", OPS)
def test_calls_of_several_shapes_share_a_workspace(name: str) -> None:
    make, op, oracle = OPS[name]
    shapes = [(30, 24, 20), (3, 24, 20), (18, 8, 17), (30, 24, 20)]
    xs = [[torch.randn(m, k) for _ in range(3)] for m, k, _ in shapes]
    ws = [[torch.randn(k, n) for _ in range(3)] for _, k, n in shapes]

    def work(home: Home) -> list[Tensor]:
        workspace = make(home, 30, 20, torch.float32, *BLOCKS[:2])
        return [
            op(x[home.rank], w[home.rank], workspace, blocks=BLOCKS)
            for x, w in zip(xs, ws, strict=True)
        ]

    for got, x, w in zip(run_calls(work, 3, seed=5), xs, ws, strict=True):
        for mine, expected in zip(got, oracle(x, w), strict=True):
            close(mine, expected, torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_the_tiling_that_it_chooses(name: str) -> None:
    make, op, oracle = OPS[name]
    xs = [torch.randn(130, 40) for _ in range(2)]
    ws = [torch.randn(40, 130) for _ in range(2)]

    def work(home: Home) -> list[Tensor]:
        return [op(xs[home.rank], ws[home.rank], make(home, 130, 130, torch.float32))]

    for mine, expected in zip(run_calls(work, 2, seed=0)[0], oracle(xs, ws), strict=True):
        close(mine, expected, torch.float32)


# Faults.


def faulty_calls(faulty: ModuleType, name: str) -> list[str]:
    def work(home: Home) -> None:
        rows = 20 if name == "matmul_all_reduce" else 60
        workspace = getattr(faulty, f"{name}_workspace")(home, 20, 20, torch.float32, 16, 16)
        x, w = torch.randn(rows, 16), torch.randn(16, 20)
        for _ in range(3):
            getattr(faulty, name)(x, w, workspace, blocks=BLOCKS, programs=2)

    return findings(work)


WAIT = "wait_all(peers, rank, tile * WORLD, call, WORLD)"
NOTIFY = "notify(peers, owner, tile * WORLD + rank, call)"
NOTIFY_ALL = "notify_all(peers, tile * WORLD + rank, call, WORLD)"
STORES = "for step in range(PEERS):"


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPS)
def test_nothing_is_found_without_a_fault(name: str) -> None:
    assert faulty_calls(module, name) == []


ORDER = "no order between"
FAULTS = {
    "no wait": ([(WAIT, "pass")], ORDER),
    "one wait less": ([(WAIT, WAIT.replace("call, WORLD", "call, WORLD - 1"))], ORDER),
    "one slot": ([("first = slot_of(call) * slot_numel", "first = 0 * slot_numel")], ORDER),
    "wrong rank": (
        [
            (NOTIFY, NOTIFY.replace(" owner", " (owner + WORLD - 1) % WORLD")),
            (NOTIFY_ALL, NOTIFY_ALL.replace(", WORLD)", ", WORLD - 1)")),
        ],
        r"no order between|no rank can go on",
    ),
    "no signal": (
        [(each, f"if rank != 1:\n            {each}") for each in (NOTIFY, NOTIFY_ALL)],
        "no rank can go on",
    ),
    "early signal": (
        [
            (
                STORES,
                f"if PEERS == 1:\n        {NOTIFY}\n    else:\n        {NOTIFY_ALL}\n    {STORES}",
            )
        ],
        ORDER,
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(name: str, fault: str, tmp_path: Path) -> None:
    changes, message = FAULTS[fault]
    found = faulty_calls(planted(module, tmp_path, *changes), name)
    assert any(re.search(message, finding) for finding in found)


@pytest.mark.sweep
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('sem="release"', 'sem="relaxed"'),
        ('sem="release", scope="sys")', 'sem="release", scope="gpu")'),
        ('sem="acquire"', 'sem="relaxed"'),
    ],
    ids=["relaxed release", "release within one GPU", "relaxed acquire"],
)
def test_signals_that_order_nothing_are_found(
    name: str, old: str, new: str, tmp_path: Path
) -> None:
    faulty = planted(module, tmp_path, (old, new), parts=[signals])
    assert any("no order between" in finding for finding in faulty_calls(faulty, name))


# Bad input.

OPTIONS = {"programs": -1, "warps": 5, "stages": 99, "blocks": (16, 16, 24)}


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=NAMES, size=st.integers(2, 3))
def test_bad_input_is_named_on_every_rank_before_anything_is_launched(
    data: st.DataObject, name: str, size: int
) -> None:
    make, op, _ = OPS[name]
    scatter = name == "matmul_reduce_scatter"
    x, w = torch.randn(20 * size if scatter else 20, 16), torch.randn(16, 20)
    options: dict[str, object] = {"blocks": BLOCKS}
    faults = ["rows", "k", "dtype", "epilogue", "several", *OPTIONS]
    match data.draw(st.sampled_from(faults + ["topology", "divide"] * scatter)):
        case "rows":
            rows = data.draw(st.integers(21, 40))
            x, named = torch.randn(rows * size if scatter else rows, 16), "the result needs"
        case "k":
            k = data.draw(st.integers(0, 15))
            w, named = torch.randn(k, 20), f"w's shape is [{k}, 20]; it must have 16 rows"
        case "dtype":
            x, w, named = x.double(), w.double(), "x's dtype is torch.float64"
        case "epilogue":
            options["epilogue"] = Epilogue(residual=torch.zeros(19, 20))
            named = "residual's shape is [19, 20]; it must be [20, 20]"
        case "several":
            w, named = [w, w], "w is 2 weights; it must be 1 to 1"  # type: ignore[assignment]
        case "topology":
            options["topology"], named = "star", "topology is 'star'; it must be switch or mesh"
        case "divide":
            rows = data.draw(st.integers(1, 19).filter(lambda rows: rows % size))
            x, named = torch.randn(rows, 16), f"x's rows is {rows}; it must be a multiple of"
        case fault:
            options[fault], named = OPTIONS[fault], f"{fault} is {OPTIONS[fault]}"
    messages = []

    def work(home: Home) -> None:
        workspace = make(home, 20, 20, torch.float32, *BLOCKS[:2])
        try:
            op(x, w, workspace, **options)
        except KernelError as error:
            assert workspace.calls.item() == 0
            messages.append(str(error))

    run(work, size)
    assert len(messages) == size
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"{name}: ")
    assert named in messages[0]


@pytest.mark.parametrize("name", OPS)
def test_blocks_smaller_than_the_workspaces_are_refused(name: str) -> None:
    make, op, _ = OPS[name]

    def work(home: Home) -> None:
        workspace = make(home, 40, 40, torch.float32, 32, 32)
        op(torch.randn(80, 16)[: 80 if "scatter" in name else 40], torch.randn(16, 40), workspace,
           blocks=BLOCKS)  # fmt: skip

    with pytest.raises(RankError, match=r"18 signals; it must be at most 8"):
        run(work, 2)
