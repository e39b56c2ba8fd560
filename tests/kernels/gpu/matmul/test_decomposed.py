"""The baselines, against the same oracles as what has to beat them; their faults, bad input."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import planted
from support.overlapped import CALLS, DTYPES, FP8, SEEDS, SLOWNESS, close, findings, run_calls
from torch import Tensor

from weft.kernels import reference
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.matmul import decomposed
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.symmetric.memory import Home

NAMES = ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"]
CASES = [
    (name, method)
    for name in NAMES
    for method in ("chunks", "ring")
    if (name, method) != ("matmul_all_reduce", "ring")
]


@settings(max_examples=30, deadline=None)
@given(
    case=st.sampled_from(CASES),
    size=st.integers(1, 4),
    m=st.integers(0, 20),
    n=st.integers(0, 20),
    k=st.integers(0, 20),
    dtype=DTYPES,
    ended=st.booleans(),
    slowness=SLOWNESS,
    seed=SEEDS,
)
def test_any_shape(
    case: tuple[str, str],
    size: int,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    ended: bool,
    slowness: list[float],
    seed: int,
) -> None:
    name, method = case
    torch.manual_seed(seed)
    if ended:  # the product of gate and up is as far off as both together
        dtype = torch.float32
    rows = size * m if name == "matmul_reduce_scatter" else m
    xs = [[torch.randn(rows, k).to(dtype) for _ in range(size)] for _ in range(CALLS)]
    ws = [torch.randn(k, 2 * n).to(dtype) / 2 for _ in range(size)]
    bias = torch.randn(2 * n)
    epilogue = Epilogue(bias=bias, silu_multiply=True) if ended else Epilogue()
    options = {} if name == "matmul_all_reduce" else {"method": method}

    def work(home: Home) -> list[Tensor]:
        make, op = getattr(decomposed, f"{name}_workspace"), getattr(decomposed, name)
        workspace = make(home, m, k if name == "all_gather_matmul" else 2 * n, dtype)
        w = ws[home.rank]
        out = [op(call[home.rank], w, workspace, epilogue=epilogue, **options) for call in xs]
        workspace.check()
        return out

    for got, call in zip(run_calls(work, size, seed, slowness), xs, strict=True):
        expected = getattr(reference, name)(call, ws)
        for mine, product in zip(got, expected, strict=True):
            if ended:
                product = reference.epilogue(product, bias=bias, gate_up="alternate")
            close(mine, product, dtype)
        if name == "matmul_all_reduce":
            assert all(torch.equal(got[0], other) for other in got[1:])


@pytest.mark.parametrize("method", ["chunks", "ring"])
def test_several_weights_and_the_gathered_rows(method: str) -> None:
    size, m, k = 3, 7, 12
    xs = [torch.randn(m, k) for _ in range(size)]
    ws = [[torch.randn(n, k).T for n in (6, 6)] for _ in range(size)]

    def work(home: Home) -> list[Tensor]:
        workspace = decomposed.all_gather_matmul_workspace(home, m, k, torch.float32)
        gathered = torch.full((size * m, k), float("nan"))
        x, w = xs[home.rank], ws[home.rank]
        epilogue = Epilogue(silu_multiply=True)
        options = {"method": method, "gathered": gathered}
        return [
            decomposed.all_gather_matmul(x, w, workspace, epilogue=epilogue, **options),
            gathered,
        ]

    out, gathered = run_calls(work, size, seed=1)
    products = reference.all_gather_matmul(xs, [torch.cat(w, dim=1) for w in ws])
    for mine, product in zip(out, products, strict=True):
        close(mine, reference.epilogue(product, gate_up="halves"), torch.float32)
    for mine, expected in zip(gathered, reference.all_gather(xs), strict=True):
        assert torch.equal(mine, expected)


def test_the_ring_sends_to_neighbours_only() -> None:
    sent = set()
    send = decomposed._Parts.send

    def listen(self: decomposed._Parts, data: Tensor, peer: int, part: int) -> None:
        sent.add((self.workspace.rank, peer % 4))
        send(self, data, peer, part)

    def work(home: Home) -> None:
        for name, rows in (("all_gather_matmul", 6), ("matmul_reduce_scatter", 24)):
            workspace = getattr(decomposed, f"{name}_workspace")(home, 6, 8, torch.float32)
            x, w = torch.randn(rows, 8), torch.randn(8, 8)
            getattr(decomposed, name)(x, w, workspace, method="ring")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decomposed._Parts, "send", listen)
        run(work, 4)
    assert sent == {(rank, (rank + way) % 4) for rank in range(4) for way in (1, -1)}


# Faults. What torch reads of a buffer is not seen by the checker: it sees the values.


def wrong_results(faulty: ModuleType, name: str, method: str) -> list[str]:
    """What the checker reports, or which results are wrong."""
    wrong = []

    def work(home: Home) -> None:
        workspace = getattr(faulty, f"{name}_workspace")(home, 6, 8, torch.float32)
        rows = 18 if name == "matmul_reduce_scatter" else 6
        for call in range(3):
            xs = [torch.full((rows, 8), 1.0 + call + 3 * rank) for rank in range(3)]
            w = torch.ones(8, 8)
            out = getattr(faulty, name)(xs[home.rank], w, workspace, method=method)
            if not torch.equal(out, getattr(reference, name)(xs, [w] * 3)[home.rank]):
                wrong.append(f"wrong result of call {call} on rank {home.rank}")

    return findings(work, seeds=8) + wrong


RACES = [case for case in CASES if case[0] != "matmul_all_reduce"]


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "method"), RACES)
def test_nothing_is_found_without_a_fault(name: str, method: str) -> None:
    assert wrong_results(decomposed, name, method) == []


FAULTS = {
    "no barrier": ("        meet[(1,)](", "        (lambda *a, **k: None)("),
    "no wait": (
        "    wait(peers, rank, index, tl.load(peers.calls)",
        "    (peers, rank, index, (peers.calls)",
    ),
    "no signal": ("        tell[(1,)](", "        (lambda *a, **k: None)("),
    "wrong part": (
        "index = workspace.world_size + part",
        "index = workspace.world_size + part - 1",
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("name", "method"), RACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(name: str, method: str, fault: str, tmp_path: Path) -> None:
    assert wrong_results(planted(decomposed, tmp_path, FAULTS[fault]), name, method)


# Bad input.

X, W = torch.zeros(6, 8), torch.zeros(8, 8)
BAD = {
    "x_shard's dtype is torch.float16; it must be torch.float32": {"x_shard": X.half()},
    "w's shape is [7, 8]; it must have 8 rows": {"w": W[:7]},
    "method is 'star'; it must be chunks or ring": {"method": "star"},
    "gathered's shape is [6, 8]; it must be [12, 8]": {"gathered": X},
    "what x_shard needs of the workspace is": {"x_shard": torch.zeros(7, 8)},
    "bias's shape is [3]; it must be [8]": {"epilogue": Epilogue(bias=torch.zeros(3))},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_named(message: str) -> None:
    def work(home: Home) -> None:
        workspace = decomposed.all_gather_matmul_workspace(home, 6, 8, torch.float32)
        decomposed.all_gather_matmul(**{"x_shard": X, "w": W, **BAD[message]}, workspace=workspace)

    with pytest.raises(RankError) as error:
        run(work, 2)
    assert f"decomposed all_gather_matmul: {message}" in str(error.value)


def test_fp8_is_not_raced() -> None:
    def work(home: Home) -> None:
        workspace = decomposed.matmul_reduce_scatter_workspace(home, 6, 8, FP8)
        decomposed.matmul_reduce_scatter(X.to(FP8), W.to(FP8), workspace)

    with pytest.raises(RankError, match="x's dtype is torch"):
        run(work, 2)
