"""Ranks that call an op with different arguments, or one of them with a bad one, are all told.

Nothing may be launched by any of them: launches fail here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.kernels.gpu.attention.sequence_parallel import (
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.collectives.all_gather import all_gather, all_gather_workspace
from weft.kernels.gpu.collectives.all_reduce import all_reduce, all_reduce_workspace
from weft.kernels.gpu.collectives.all_reduce_norm import (
    all_reduce_rms_norm,
    all_reduce_rms_norm_workspace,
)
from weft.kernels.gpu.collectives.reduce_scatter import reduce_scatter, reduce_scatter_workspace
from weft.kernels.gpu.matmul import decomposed
from weft.kernels.gpu.matmul.all_gather_matmul import all_gather_matmul, all_gather_matmul_workspace
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.runtime.launches import Action, decided, loaded
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.costs import Config
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError
from weft.kernels.symmetric.virtual import ThreadMeeting, VirtualHome, VirtualWorld

SIZE, ODD = 4, 2
"""Ranks, and the one that differs."""

F32, F16 = torch.float32, torch.float16
X, W = torch.zeros(16, 16), torch.zeros(16, 16)
HEADS = torch.zeros(16, 2, 16)
TILE = {"blocks": (16, 16, 16)}
SPLIT = "sequence_parallel_attention"
GATHERS = {"methods": ("push", "two_level"), "ranks_per_node": 2, "chunk": 16}
REDUCES = {"methods": ("one_shot", "two_shot"), "chunk": 16}

# Of each op: what makes its workspace, what calls it, and their arguments.
OPS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "all_gather": (
        all_gather_workspace,
        {"max_numel": 256, "dtype": F32, **GATHERS},
        all_gather,
        {"x_shard": X, "method": "push"},
    ),
    "reduce_scatter": (
        reduce_scatter_workspace,
        {"max_numel": 256, "dtype": F32, **GATHERS},
        reduce_scatter,
        {"x": X, "method": "push"},
    ),
    "all_reduce": (
        all_reduce_workspace,
        {"max_numel": 256, "dtype": F32, **REDUCES},
        all_reduce,
        {"x": X, "method": "one_shot"},
    ),
    "all_reduce_rms_norm": (
        all_reduce_rms_norm_workspace,
        {"max_rows": 16, "max_columns": 16, "dtype": F32},
        all_reduce_rms_norm,
        {"x": X, "residual": X, "weight": X[0], "eps": 1e-5},
    ),
    "all_gather_matmul": (
        all_gather_matmul_workspace,
        {"max_rows": 16, "k": 16, "dtype": F32, "block_m": 16},
        all_gather_matmul,
        {"x_shard": X, "w": W, **TILE},
    ),
    "matmul_reduce_scatter": (
        matmul_reduce_scatter_workspace,
        {"max_rows": 16, "n": 16, "dtype": F32, "block_m": 16, "block_n": 16},
        matmul_reduce_scatter,
        {"x": X, "w": W, **TILE},
    ),
    "matmul_all_reduce": (
        matmul_all_reduce_workspace,
        {"max_rows": 16, "n": 16, "dtype": F32, "block_m": 16, "block_n": 16},
        matmul_all_reduce,
        {"x": X, "w": W, **TILE},
    ),
    "sequence_parallel_attention": (
        sequence_parallel_attention_workspace,
        {"max_tokens": 16, "kv_heads": 2, "head_dim": 16, "dtype": F32, "chunk": 16},
        sequence_parallel_attention,
        {"q": HEADS, "k": HEADS, "v": HEADS, "scale": 0.25},
    ),
    "decomposed all_gather_matmul": (
        decomposed.all_gather_matmul_workspace,
        {"max_rows": 16, "k": 16, "dtype": F32},
        decomposed.all_gather_matmul,
        {"x_shard": X, "w": W, "method": "chunks"},
    ),
    "decomposed matmul_reduce_scatter": (
        decomposed.matmul_reduce_scatter_workspace,
        {"max_rows": 16, "n": 16, "dtype": F32},
        decomposed.matmul_reduce_scatter,
        {"x": X, "w": W, "method": "chunks"},
    ),
    "decomposed matmul_all_reduce": (
        decomposed.matmul_all_reduce_workspace,
        {"max_rows": 16, "n": 16, "dtype": F32},
        decomposed.matmul_all_reduce,
        {"x": X, "w": W},
    ),
}


def forbid(kernel: str) -> Action:
    raise AssertionError(f"{kernel} was launched")


def errors(
    work: Callable[[Home], object], size: int = SIZE, timeout: float = 20.0
) -> list[BaseException | None]:
    """What each rank raises, of `size` that run at the same time."""
    world = VirtualWorld(size, ThreadMeeting(size, timeout))
    raised: list[BaseException | None] = [None] * size

    def body(rank: int) -> None:
        try:
            with decided(forbid):
                work(VirtualHome(world, rank))
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            raised[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def told(op: str, at_workspace: dict[str, Any], at_call: dict[str, Any]) -> str:
    """The one message that all ranks have when one of them makes or calls the op with these."""
    make, made_for, call, called_with = OPS[op]

    def work(home: Home) -> None:
        odd = home.rank == ODD
        workspace = make(home, **made_for | (at_workspace if odd else {}))
        call(workspace=workspace, **called_with | (at_call if odd else {}))

    raised = errors(work)
    assert [type(error) for error in raised] == [KernelError] * SIZE, raised
    messages = {str(error) for error in raised}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith(f"{op}: ")
    return message


DIFFERENT_WORKSPACES = [
    *((op, "chunk", 24) for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, "ranks_per_node", 4) for op in ("all_gather", "reduce_scatter")),
    *((op, "max_numel", 264) for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, "methods", ("push",)) for op in ("all_gather", "reduce_scatter")),
    ("all_reduce", "methods", ("two_shot",)),
    *((op, "dtype", F16) for op in OPS),
    *((op, "max_rows", 17) for op in OPS if "matmul" in op),
    ("all_reduce_rms_norm", "max_columns", 24),
    ("all_gather_matmul", "k", 24),
    ("matmul_reduce_scatter", "n", 24),
    *((SPLIT, argument, 32) for argument in ("max_tokens", "kv_heads", "head_dim", "chunk")),
    *((op, "block_m", 32) for op in OPS if "block_m" in OPS[op][1]),
    *((op, "block_n", 32) for op in OPS if "block_n" in OPS[op][1]),
]


@pytest.mark.parametrize(("op", "argument", "value"), DIFFERENT_WORKSPACES)
def test_workspaces_that_differ_in_one_argument(op: str, argument: str, value: object) -> None:
    usual = OPS[op][1][argument]
    if argument == "methods":
        usual, shown = ", ".join(usual), ", ".join(value)  # type: ignore[call-overload]
    else:
        shown = str(value)
    message = told(op, {argument: value}, {})
    assert f"{argument} is {usual} on ranks 0, 1, 3 and {shown} on rank 2" in message
    assert "it must be the same on all ranks" in message


BAD_WORKSPACES = [
    *((op, "chunk", 12, "8") for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, "chunk", 0, "8") for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, "ranks_per_node", 3, "the 4 ranks") for op in ("all_gather", "reduce_scatter")),
    *((op, "ranks_per_node", 0, "the 4 ranks") for op in ("all_gather", "reduce_scatter")),
    *((op, "max_numel", -8, "0") for op in ("all_gather", "reduce_scatter", "all_reduce")),
    *((op, "max_numel", 2**40, "2147483647") for op in ("all_gather", "all_reduce")),
    *((op, "methods", ("shout",), "shot, ll") for op in ("all_reduce",)),
    *((op, "dtype", torch.int8, "torch.float16") for op in OPS),
    *((op, "max_rows", -1, "0") for op in OPS if "matmul" in op),
    *((op, "max_rows", 1.5, "whole number") for op in OPS if "matmul" in op),
    *((SPLIT, argument, 0, "1") for argument in ("kv_heads", "head_dim", "chunk")),
    (SPLIT, "max_tokens", -1, "0"),
    (SPLIT, "head_dim", 257, "256"),
    *((op, "block_m", 0, "1") for op in OPS if "block_m" in OPS[op][1]),
    *((op, "block_m", -16, "1") for op in OPS if "block_m" in OPS[op][1]),
    *((op, "block_n", 0, "1") for op in OPS if "block_n" in OPS[op][1]),
    ("all_gather_matmul", "k", -1, "0"),
    ("matmul_all_reduce", "n", -1, "0"),
]


@pytest.mark.parametrize(("op", "argument", "value", "allowed"), BAD_WORKSPACES)
def test_a_workspace_that_one_rank_refuses(
    op: str, argument: str, value: object, allowed: str
) -> None:
    message = told(op, {argument: value}, {})
    assert "on rank 2 " in message
    shown = value[0] if argument == "methods" else value  # type: ignore[index]
    assert f"{shown}" in message
    assert "must" in message
    assert allowed in message


DIFFERENT_CALLS = [
    *((SPLIT, option, 2) for option in ("programs", "senders", "warps", "stages", "scale")),
    *((SPLIT, option, value) for option, value in (("zigzag", True), ("blocks", (32, 16)))),
    (SPLIT, "query_start", torch.zeros(2, dtype=torch.int32)),
    ("all_reduce_rms_norm", "eps", 1e-6),
    ("all_gather", "method", "two_level"),
    ("reduce_scatter", "method", "two_level"),
    ("all_reduce", "method", "two_shot"),
    *(("all_gather_matmul", option, 2) for option in ("programs", "senders", "ranks_per_node")),
    *(("all_gather_matmul", option, value) for option, value in (("warps", 4), ("stages", 2))),
    ("all_gather_matmul", "topology", "mesh"),
    ("matmul_reduce_scatter", "topology", "mesh"),
    ("matmul_reduce_scatter", "ranks_per_node", 2),
    *((op, "programs", 2) for op in ("matmul_reduce_scatter", "matmul_all_reduce")),
    *((op, "blocks", (32, 16, 16)) for op in OPS if "blocks" in OPS[op][3]),
    *((op, "x_shard", torch.zeros(8, 16)) for op in OPS if "x_shard" in OPS[op][3]),
    *((op, "x", torch.zeros(8, 16)) for op in OPS if "x" in OPS[op][3]),
    *((op, "w", torch.zeros(16, 8)) for op in OPS if "reduce" in op and "w" in OPS[op][3]),
    *((op, "method", "ring") for op in OPS if OPS[op][3].get("method") == "chunks"),
]


@pytest.mark.parametrize(("op", "argument", "value"), DIFFERENT_CALLS)
def test_calls_that_differ_in_one_argument(op: str, argument: str, value: object) -> None:
    message = told(op, {}, {argument: value})
    assert argument in message
    assert "on ranks 0, 1, 3 and " in message
    assert "on rank 2; it must be the same on all ranks" in message


CHOSEN = {
    "all_gather_matmul": "BLOCK_M is 16 on ranks 0, 1, 3 and 32 on rank 2",
    "matmul_reduce_scatter": r"(16, 16) on ranks 0, 1, 3 and (32, 16) on rank 2",
    "matmul_all_reduce": r"(16, 16) on ranks 0, 1, 3 and (32, 16) on rank 2",
}


@pytest.mark.parametrize("op", CHOSEN)
def test_tiles_that_ranks_choose_differently(op: str) -> None:
    """As where a rank has another number of columns, or another tuning file."""
    make, made_for, call, called_with = OPS[op]

    def work(home: Home) -> None:
        workspace = make(home, **made_for)
        rows = 32 if home.rank == ODD else 16
        config = Config("push", rows, 16, 16, 4, 2)
        workspace.choice = SimpleNamespace(of_product=lambda *operands: config)
        call(workspace=workspace, **called_with | {"blocks": None})

    raised = errors(work)
    assert [type(error) for error in raised] == [KernelError] * SIZE, raised
    (message,) = {str(error) for error in raised}
    assert "the chosen BLOCK_M" in message
    assert CHOSEN[op] in message


BAD_CALLS = [
    *((SPLIT, option, -1) for option in ("programs", "senders", "warps", "stages")),
    (SPLIT, "blocks", (16, 24)),
    (SPLIT, "q", HEADS.half()),
    *((SPLIT, argument, torch.zeros(8, 2, 16)) for argument in ("k", "v")),
    (SPLIT, "query_start", torch.zeros(2)),
    (SPLIT, "lse", torch.zeros(16, 3)),
    *((op, "method", "shout") for op in OPS if "method" in OPS[op][3]),
    *((op, "method", "ll") for op in ("all_gather", "all_reduce")),
    *((op, "x", X.half()) for op in ("reduce_scatter", "all_reduce")),
    *((op, "x_shard", X.half()) for op in ("all_gather", "all_gather_matmul")),
    *((op, "w", torch.zeros(15, 16)) for op in OPS if "matmul" in op),
    *((op, "programs", -1) for op in OPS if "blocks" in OPS[op][3]),
    *((op, "blocks", (16, 16, 24)) for op in OPS if "blocks" in OPS[op][3]),
    ("all_gather_matmul", "gathered", torch.zeros(16, 16)),
    *(
        (op, argument, [[1.0]])
        for op in OPS
        for argument, value in OPS[op][3].items()
        if isinstance(value, torch.Tensor)
    ),
]


@pytest.mark.parametrize(("op", "argument", "value"), BAD_CALLS)
def test_a_call_that_one_rank_refuses(op: str, argument: str, value: object) -> None:
    message = told(op, {}, {argument: value})
    assert f"on rank 2 {argument}" in message
    assert "must" in message


@pytest.mark.parametrize("op", OPS)
def test_a_workspace_of_another_op(op: str) -> None:
    make, made_for, call, called_with = OPS[op]
    other = "all_reduce" if op == "all_gather" else "all_gather"
    make_other, other_for, _, _ = OPS[other]

    def work(home: Home) -> None:
        own, others = make(home, **made_for), make_other(home, **other_for)
        call(workspace=others if home.rank == ODD else own, **called_with)

    for error in errors(work):
        assert str(error) == f"{op}: on rank 2 workspace is one of {other}; it must be one of {op}"


def test_ranks_that_call_different_ops_are_told() -> None:
    def work(home: Home) -> None:
        gather = all_gather_workspace(home, 256, F32)
        reduce = all_reduce_workspace(home, 256, F32)
        if home.rank == ODD:
            all_reduce(X, reduce)
        else:
            all_gather(X, gather)

    for error in errors(work):
        assert isinstance(error, KernelError)
        assert "the op is all_gather on ranks 0, 1, 3 and all_reduce on rank 2" in str(error)


def test_what_was_agreed_on_is_not_compared_again() -> None:
    compared: list[str] = []

    class Listening(VirtualHome):
        def compare(self, value: str) -> list[str]:
            compared.append(value)
            return super().compare(value)

    workspace = Workspace(Listening(VirtualWorld(1), 0), "op", 1, F32, 1)
    for rows in (1, 2, 1, 2):
        with workspace.agreed("op", {"rows": rows}):
            pass
    assert len(compared) == 2
    for _ in range(2):  # a refusal is, for another rank may not refuse
        with (
            pytest.raises(KernelError, match="op: rows is 1; it must be 2"),
            workspace.agreed("op", {"rows": 1}),
        ):
            workspace.require("rows", 1, False, "be 2")
    assert len(compared) == 4


def test_without_arguments_a_later_refusal_is_not_compared() -> None:
    """All ranks have compared them, so nobody else would come."""
    compared: list[str] = []

    class Listening(VirtualHome):
        def compare(self, value: str) -> list[str]:
            compared.append(value)
            return super().compare(value)

    workspace = Workspace(Listening(VirtualWorld(1), 0), "op", 1, F32, 1)
    for refuses in (True, False, False, True):
        with (
            pytest.raises(KernelError, match="op: x is 1; it must be 2")
            if refuses
            else nullcontext(),
            workspace.agreed("op", {}),
        ):
            workspace.require("x", 1, not refuses, "be 2")
    assert len(compared) == 2


def test_calls_that_only_load_kernels_are_not_collective() -> None:
    def work(home: Home) -> None:
        workspace = Workspace(home, "op", 1, F32, 1)
        if home.rank == 0:
            with loaded(), workspace.agreed("op", {"rows": 1}):
                pass
        home.exchange("loaded")
        with workspace.agreed("op", {"rows": 1}):  # was not compared yet
            workspace.require("rows", 1, home.rank != 1, "be 2")

    for error in errors(work, size=2):
        assert str(error) == "op: on rank 1 rows is 1; it must be 2"


def test_a_rank_that_does_not_come_is_named_and_a_refusal_is_not_lost() -> None:
    def work(home: Home) -> None:
        workspace = Workspace(home, "op", 1, F32, 1)
        if home.rank == 0:
            return
        with workspace.agreed("op", {"rows": 1}):
            workspace.require("rows", 1, home.rank != 1, "be 2")

    absent, refused, waited = errors(work, size=3, timeout=1.0)
    assert absent is None
    assert isinstance(refused, KernelError)
    assert str(refused) == "op: rows is 1; it must be 2"
    assert isinstance(waited, SymmetricMemoryError)
    assert "did not arrive" in str(waited)
