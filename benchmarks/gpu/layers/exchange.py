"""Tokens to the ranks of their experts and back: over a copy of the bytes, and over NCCL.

`exchange` is one rank's part, on one GPU: what the others send has come before,
and stays. What it sends goes to the others' memory on the same GPU, so its time
is that of a link which is as fast as the memory.

`nccl` runs in a process for each GPU. NCCL's all-to-all is given what it likes
best: every rank sends as many rows to each other one, known to all, and is not
asked to count, place or add them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from harness.ranks import alone
from harness.report import Case, Figure, LeftOut
from harness.timing import Times, copying, in_step, interleaved, ratio
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from layers.scale import Exchange, Scale
from weft.kernels.gpu.experts.dispatch import (
    LowLatencyWorkspace,
    moe_combine,
    moe_dispatch,
    moe_workspace,
)
from weft.kernels.gpu.experts.placement import even
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.clock import Call
from weft.kernels.symmetric.memory import Home

OURS, COPY, NCCL = "ours", "copy", "NCCL's"

TOGETHER = 20
"""Calls between two looks at the clock, of all ranks."""


def exchange(scale: Scale, repetitions: int) -> Iterator[Case]:
    """One rank's dispatch and combine over the copying of what it moves."""
    for of in scale.exchanges:
        name = f"{of}, 1 of {scale.world} ranks"
        yield Case(name, partial(_exchange, scale, of, repetitions))


def _exchange(scale: Scale, of: Exchange, repetitions: int) -> Figure:
    ids = [chosen(of, rank) for rank in range(scale.world)]

    def measure(home: Home, workspaces: list[Workspace]) -> dict[str, Times]:
        (workspace,) = workspaces
        assert isinstance(workspace, LowLatencyWorkspace)
        receive(workspace, ids)
        calls = {
            OURS: round_trip(scale, of, ids[home.rank].to(home.device), workspace),
            COPY: copying(nbytes, scale.device),
        }
        return interleaved(calls, repetitions, tiny=scale.tiny, graphs=True)

    sent, nbytes = count_bytes(scale, of, ids)
    make = [partial(_workspace, of, scale)]
    times = alone(measure, make, scale.world, scale.processors, tiny=scale.tiny)
    details = {f"us {name}": 1e6 * each.median for name, each in times.items()}
    return Figure(
        *ratio(times[OURS], times[COPY]), details={**details, "MB to other ranks": 1e-6 * sent}
    )


def _workspace(of: Exchange, scale: Scale, home: Home) -> LowLatencyWorkspace:
    placement = even(of.experts, home.world_size)
    return moe_workspace(home, of.tokens, of.width, of.top_k, scale.dtype, placement)


def chosen(of: Exchange, rank: int) -> Tensor:
    """The experts of a rank's tokens, all equally likely: int32 [tokens, top_k]."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.rand(of.tokens, of.experts, generator=numbers).topk(of.top_k).indices.int()


def round_trip(scale: Scale, of: Exchange, ids: Tensor, workspace: LowLatencyWorkspace) -> Call:
    """Tokens to experts that leave them as they are, and back."""
    x = scale.random(of.tokens, of.width).to(workspace.device)
    weights = torch.full(ids.shape, 1 / of.top_k, device=workspace.device)

    def call() -> Tensor:
        sent = moe_dispatch(x, ids, workspace)
        return moe_combine(sent.rows, weights, sent, workspace)

    return call


def receive(workspace: LowLatencyWorkspace, ids: list[Tensor]) -> None:
    """What all ranks' tokens want of this one, and outputs for its own, in both slots."""
    slots = workspace.placement.slots_per_rank
    workspace.wanted.local.fill_(-1)
    for rank, experts in enumerate(ids):
        here = torch.where(experts // slots == workspace.rank, experts % slots, -1)
        workspace.wanted.local[:, rank, : len(experts)] = here.to(workspace.device)
    workspace.returned.local.normal_()


def count_bytes(scale: Scale, of: Exchange, ids: list[Tensor]) -> tuple[int, int]:
    """Of the first rank: bytes that it sends to others, and all that it reads and writes.

    A token goes once to each rank that it is for; its copies there are placed, and returned, one
    for each expert; and as many as a token has experts are added.
    """
    slots, row = of.experts // scale.world, of.width * scale.dtype.itemsize
    ranks = [experts // slots for experts in ids]
    to = torch.stack([(ranks[0] == rank).any(dim=1).sum() for rank in range(scale.world)])
    of_others = [int((of_rank == 0).sum()) for of_rank in ranks]
    sent = int(to[1:].sum()) + sum(of_others[1:])
    added = of.tokens * (of.top_k + 1)
    return sent * row, (2 * int(to.sum()) + 4 * sum(of_others) + added) * row


def nccl(scale: Scale, repetitions: int) -> Iterator[Case]:
    """Dispatch and combine over NCCL's all-to-all there and back."""
    for world in scale.gpus:
        for of in scale.exchanges:
            yield Case(f"{of}, {world} ranks", partial(_nccl, scale, of, world, repetitions))


def _nccl(scale: Scale, of: Exchange, world: int, repetitions: int) -> Figure:
    if not scale.tiny and torch.cuda.device_count() < world:
        raise LeftOut(f"needs {world} GPUs; there are {torch.cuda.device_count()}")
    if of.tokens * of.top_k % world:
        raise LeftOut(f"{of.tokens * of.top_k} rows are not as many for each of {world} ranks")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, Path(folder), scale, of, repetitions)
        spawn(_on_rank, arguments, nprocs=world)  # type: ignore[no-untyped-call]
        found = json.loads((Path(folder) / "times").read_text())
    times = {name: Times(tuple(values)) for name, values in found.items()}
    details = {f"us {name}": 1e6 * each.median for name, each in times.items()}
    return Figure(*ratio(times[OURS], times[NCCL]), details=details)


def _on_rank(
    rank: int, world: int, folder: Path, scale: Scale, of: Exchange, repetitions: int
) -> None:
    """One process; the first writes the times."""
    from torch import distributed

    from weft.kernels.symmetric.p2p import P2pHome
    from weft.kernels.symmetric.shared import SharedHome

    if not scale.tiny:
        torch.cuda.set_device(rank)
    store = distributed.FileStore(str(folder / "store"), world)  # type: ignore[attr-defined]
    distributed.init_process_group(
        "gloo" if scale.tiny else "nccl", store=store, rank=rank, world_size=world
    )
    group = distributed.group.WORLD
    assert group is not None
    with SharedHome(store, rank, world) if scale.tiny else P2pHome(group, store) as home:
        workspace = _workspace(of, scale, home)
        ids = chosen(of, rank).to(home.device)
        there = scale.random(of.tokens * of.top_k, of.width).to(home.device)
        here, back = torch.empty_like(there), torch.empty_like(there)

        def theirs() -> None:
            distributed.all_to_all_single(here, there)
            distributed.all_to_all_single(back, here)

        calls = {OURS: round_trip(scale, of, ids, workspace), NCCL: theirs}
        times = in_step(home, calls, repetitions, 1 if scale.tiny else TOGETHER, tiny=scale.tiny)
        workspace.check()
        if rank == 0:
            values = {name: each.values for name, each in times.items()}
            (folder / "times").write_text(json.dumps(values))
    distributed.destroy_process_group()
