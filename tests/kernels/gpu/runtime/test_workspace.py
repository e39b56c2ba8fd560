"""What all ops do with their workspace: streams, programs that wait, and waits that run out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.overlapped import BLOCKS, close
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from weft.kernels.check.ops import collectives
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.ops.quantized import PACKED
from weft.kernels.check.ops.rows import ROW_OPS
from weft.kernels.check.ops.table import OPS
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import CheckedHome, RankError, run
from weft.kernels.gpu.runtime import workspace as workspace_module
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.runtime.signals import polls_left, report
from weft.kernels.gpu.runtime.workspace import Workspace, counted_together
from weft.kernels.gpu.tuning.costs import Config
from weft.kernels.interpreter import gpu as interpreter
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

F32 = torch.float32
NAMED = {op.name: op for op in OPS}


def call(op: Op, home: Home, sizes: Sizes, tensors: list[list[Tensor]]) -> Tensor:
    """One call of it on one rank."""
    workspace = op.workspace(home, sizes)
    out = op.call([tensor[home.rank] for tensor in tensors], workspace, sizes)
    workspace.check()
    return out


def operands(op: Op, sizes: Sizes) -> list[list[Tensor]]:
    return [[torch.randn(shape) for _ in range(sizes.world)] for shape in op.shapes(sizes)]


# Streams. A CUDA graph is captured only if every fork is joined, and what is joined was forked.


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """What each rank does with its second stream."""
    seen: dict[int, list[str]] = {}
    beside, rejoin = CheckedHome.beside, CheckedHome.rejoin

    @contextmanager
    def fork(self: CheckedHome) -> Iterator[None]:
        seen.setdefault(self.rank, []).append("fork")
        with beside(self):
            yield

    def join(self: CheckedHome) -> None:
        seen.setdefault(self.rank, []).append("join")
        rejoin(self)

    monkeypatch.setattr(CheckedHome, "beside", fork)
    monkeypatch.setattr(CheckedHome, "rejoin", join)
    return seen


BESIDE = [op for op in OPS if op.name.startswith(("decomposed", "all_gather_matmul", "reduce_"))]


@pytest.mark.parametrize("op", BESIDE, ids=lambda op: op.name)
@pytest.mark.parametrize(("world", "columns"), [(1, 20), (2, 20), (2, 0)])
def test_what_is_joined_was_forked_and_what_was_forked_is_joined(
    op: Op, world: int, columns: int, streams: dict[int, list[str]]
) -> None:
    sizes = Sizes(world, 6, columns, 16, F32, BLOCKS)
    tensors = operands(op, sizes)
    run(lambda home: call(op, home, sizes, tensors), world, ranks_per_node=op.reach(world))
    for events in streams.values():
        forked = False
        for event in events:
            assert forked or event == "fork"
            forked = event == "fork"
        assert not forked


# Programs that wait.


def grids(work: Callable[[], object]) -> dict[str, tuple[int, ...]]:
    """The largest grid of each kernel that is launched."""
    seen: dict[str, tuple[int, ...]] = {}
    launch = InterpretedFunction.run

    def listen(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        seen[self.__name__] = max(seen.get(self.__name__, ()), tuple(grid))
        return launch(self, *args, grid=grid, warmup=warmup, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", listen)
        work()
    return seen


SEND_ONLY = {"push_chunks", "publish_chunks", "multicast_chunks", "push_across"}
SEND_ONLY |= {"scatter_local", "publish_parts", "push_rows", "put", "attend_and_send"}
SEND_ONLY |= {"push_shard", "find_pairs", "place_tokens", "return_tokens"}
SEND_ONLY |= {"cross_nodes", "return_sums"}
SEND_ONLY |= {"add_and_send"}  # waits for its own rank's product alone, which waits for nobody
SEND_ONLY |= {"push_parts"}  # waits for an earlier call alone
"""Kernels that wait for nobody: of them there may be as many programs as there is work."""


ALONE = {"matmul", "paged_attention", "paged_attention_fp8", "decode_attention"}
ALONE |= {"mixed_attention", "mixed_attention_fp8"}
ALONE |= {"mla_decode_attention", "mla_decode_attention_fp8"}
ALONE |= {op.name for op in OPS if op.name.startswith("grouped_") and "scatter" not in op.name}
ALONE |= {op.name for op in (*ROW_OPS, *PACKED)}
"""Ops of one rank."""


@pytest.mark.sweep
@pytest.mark.parametrize("processors", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, marks=pytest.mark.slow if "fp8" in op.name else ())
        for op in OPS
        if op.name not in ALONE
    ],
    ids=lambda op: op.name,
)
def test_no_more_programs_wait_than_there_are_processors(
    op: Op, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the result is the same."""
    monkeypatch.setattr(CheckedHome, "processors", processors)
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        make = getattr(collectives, f"{name}_workspace")
        monkeypatch.setattr(collectives, f"{name}_workspace", partial(make, chunk=64))
    sizes = Sizes(2, 40, 36, 24, F32, BLOCKS)
    tensors = operands(op, sizes)
    races, results = RaceDetector(), []
    launched = grids(
        lambda: results.extend(
            run(
                lambda home: call(op, home, sizes, tensors),
                2,
                seed=processors,
                races=races,
                ranks_per_node=op.reach(2),
            )
        )
    )
    assert races.findings == []
    for got, expected in zip(results, op.oracle(*tensors), strict=True):
        if "fp8" not in op.name:
            close(got, expected, F32)
    waiting = {name: grid for name, grid in launched.items() if name not in SEND_ONLY}
    assert waiting
    for name, grid in waiting.items():
        assert grid[0] <= processors, name
    for name, grid in launched.items():  # axes y and z hold 65535
        if name not in ("attend_and_send", "find_pairs"):  # whose are KV heads, ranks
            assert set(grid[1:]) <= {1}, name


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_reduce"])
def test_programs_that_would_keep_out_what_they_wait_for_are_refused(name: str) -> None:
    def work(home: Home, programs: int) -> Tensor:
        op, sizes = NAMED[name], Sizes(2, 8, 8, 8, F32, BLOCKS, programs)
        workspace = op.workspace(home, sizes)
        workspace.concurrent = True
        workspace.processors = 4
        return op.call([torch.ones(8, 8)] * 2, workspace, sizes)

    most = 3 if name == "all_gather_matmul" else 4
    with pytest.raises(RankError, match=f"programs is {most + 1}; it must be from 1 to {most}, or"):
        run(lambda home: work(home, most + 1), 2)
    for out in run(lambda home: work(home, most), 2):
        assert set(out.flatten().tolist()) == {8.0 if name == "all_gather_matmul" else 16.0}


@pytest.mark.parametrize(
    ("items", "senders", "divided"),
    [
        (0, 0, (0, 132)),
        (4, 0, (4, 128)),
        (56, 0, (16, 116)),
        (56, 32, (32, 100)),
        (99, 99, (66, 66)),
    ],
)
def test_programs_that_copy_and_compute_fit_the_device_together(
    items: int, senders: int, divided: tuple[int, int]
) -> None:
    workspace = NAMED["all_gather_matmul"].workspace(
        VirtualHome(VirtualWorld(1), 0), Sizes(1, 8, 8, 8, F32, BLOCKS)
    )
    workspace.concurrent, workspace.processors = True, 132
    assert workspace.divide(items, senders) == divided


@pytest.mark.parametrize("name", ["all_gather_matmul", "sequence_parallel_attention"])
def test_a_product_leaves_processors_to_its_copies(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With fewer programs than pieces to copy, and a tile for each program that computes."""
    monkeypatch.setattr(CheckedHome, "processors", 8)
    monkeypatch.setattr(workspace_module, "SENDERS", 3)
    op, sizes = NAMED[name], Sizes(2, 160, 160, 24, F32, BLOCKS)
    tensors = operands(op, sizes)
    launched = grids(lambda: run(lambda home: call(op, home, sizes, tensors), 2))
    copying = {"push_rows", "push_parts"} & {*launched}
    computing = {"multiply_gathered", "attend_parts"} & {*launched}
    assert [launched[each][0] for each in copying] == [3]
    assert [launched[each][0] for each in computing] == [5]


@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("slowness", [[1.0, 9.0], [9.0, 1.0]])
def test_the_checker_finds_ranks_that_choose_different_tiles(
    name: str, slowness: list[float]
) -> None:
    """Whichever rank comes first; it does not wait for the others."""

    def work(home: Home) -> None:
        op, sizes = NAMED[name], Sizes(2, 32, 32, 32, F32, BLOCKS)
        workspace = op.workspace(home, sizes)
        config = Config("push", 16 << home.rank, 16, 16, 4, 2)
        workspace.choice = SimpleNamespace(of_product=lambda *operands: config)
        rows = 32 if name == "all_gather_matmul" else 64
        op.function(torch.ones(rows, 32), torch.ones(32, 32), workspace)

    with pytest.raises(RankError, match=r"the chosen BLOCK_M.* it must be the same on all ranks"):
        run(work, 2, slowness=slowness)


# Waits that run out.


@triton.jit
def give_up(peers, left):
    tl.store(left, polls_left(peers))
    report(peers, 3, 14, 2, 1)
    tl.store(left + 1, polls_left(peers))
    report(peers, 3, 15, 9, 8)


@pytest.fixture
def installed() -> Iterator[None]:
    with interpreter.installed():
        yield


@pytest.mark.usefixtures("installed")
def test_the_first_wait_that_runs_out_is_reported_and_the_others_do_not_poll() -> None:
    workspace = Workspace(VirtualHome(VirtualWorld(1), 0), "op", 1, F32, 1)
    left = torch.zeros(2, dtype=torch.int32)
    give_up[(1,)](workspace.peers(), left)
    assert left.tolist() == [workspace.max_polls, 0]
    with pytest.raises(
        KernelError, match="op: rank 3 gave up waiting for its signal 14 to reach 2"
    ):
        workspace.check()
    workspace.check()  # it has been told


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what never came may be any number
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name",
    [
        "all_gather",
        "all_gather_ll",
        "all_gather_ll128",
        "all_gather_copy_engine",
        "reduce_scatter_two_level",
        "all_reduce_two_shot",
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "matmul_all_reduce",
        "decomposed_all_gather_matmul_ring",
    ],
)
def test_a_rank_that_never_comes_is_reported(name: str) -> None:
    """It has made its workspace, and agreed to the call."""
    op, sizes = NAMED[name], Sizes(2, 8, 8, 8, F32, BLOCKS)
    world, tensors = VirtualWorld(2), operands(op, sizes)
    with ThreadPoolExecutor(2) as pool:
        homes = [VirtualHome(world, rank) for rank in range(2)]
        workspace, _ = pool.map(lambda home: op.workspace(home, sizes), homes)
    workspace.compare = lambda value: [value] * 2
    workspace.max_polls = 50
    op.call([tensor[0] for tensor in tensors], workspace, sizes)
    with pytest.raises(KernelError, match=r"rank 0 gave up waiting .* to reach 1; it is"):
        workspace.check()


# Calls that are counted together.


def test_calls_count_together_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six calls in a row, the device counts four when its table is full, then two."""
    monkeypatch.setattr(workspace_module, "AHEAD", 4)
    sizes = Sizes(2, 6, 20, 16, F32, BLOCKS)
    op = NAMED["matmul_all_reduce"]
    given = [operands(op, sizes) for _ in range(7)]
    counts: list[list[int]] = []
    races = RaceDetector()

    def work(home: Home) -> list[Tensor]:
        workspace = op.workspace(home, sizes)
        outs, seen = [], []

        def again(tensors: list[list[Tensor]]) -> None:
            outs.append(op.call([each[home.rank] for each in tensors], workspace, sizes))
            seen.append(int(workspace.calls))

        with counted_together([workspace]):
            for tensors in given[:6]:
                again(tensors)
        again(given[6])
        workspace.check()
        counts.append(seen)
        return outs

    launched: list[str] = []
    launch = InterpretedFunction.run

    def listen(self: Any, *args: Any, **kwargs: Any) -> Any:
        launched.append(self.__name__)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", listen)
    by_rank = run(work, 2, races=races)
    assert races.findings == []
    assert counts == [[1, 2, 3, 4, 5, 6, 7]] * 2
    assert launched.count("count_calls") == 2 * 3
    for outs in by_rank:
        for got, tensors in zip(outs, given, strict=True):
            close(got, op.oracle(*tensors)[0], F32)


def test_a_step_that_fails_counts_its_calls() -> None:
    home = VirtualHome(VirtualWorld(1), 0)
    op, sizes = NAMED["matmul_all_reduce"], Sizes(1, 6, 20, 16, F32, BLOCKS)
    with interpreter.installed():
        workspace = op.workspace(home, sizes)
        tensors = [each[0] for each in operands(op, sizes)]

        def fail() -> None:
            with counted_together([workspace]):
                op.call(tensors, workspace, sizes)
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            fail()
        op.call(tensors, workspace, sizes)
    assert workspace.calls.item() == 2
