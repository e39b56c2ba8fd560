"""Runs every op against its oracle, on several ranks, in the interpreter, looking for races.

One check is an op, a world size and a seed. The seed draws shapes, dtype, tiles, programs per
launch, slow ranks, the numbers and the interleaving. A check with a finding can therefore be
repeated:

    weft check kernels --only matmul_reduce_scatter --world-size 3 --seeds 17-17

Each check calls the op several times with new numbers, and with other rows, tiles and programs in
the same workspace. Most protocol faults only show when buffers and signals are reused differently.
Half of the checks record a call and replay it, as a CUDA graph does (interpreter/recording.py):
what the host counts stays as it was then.
Some workspaces begin with billions of calls, where narrow counters would wrap.

Kernels must have been imported with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.ops.table import named
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import HangError, RankError, run
from weft.kernels.gpu.runtime.workspace import counted_together
from weft.kernels.interpreter.recording import recorded
from weft.kernels.symmetric.memory import Home

CALLS = 4
CALLED = 2
"""In half of the checks, the host makes only these calls. The others replay the last of them."""
TILES = (16, 32)
"""Sides of a tile. Workspaces are made for the smallest."""
CHUNKS = (256, 1024)
"""Numbers per signal, in ops that only move and add."""
CALLS_BEFORE = (0, 2**31 - 3, 2**32 - 1)
"""Numbers of calls before a check, by its seed: within the check, 32 bits would wrap, or be 0."""

LARGEST = 40
"""Maximum m, n and k: up to three tiles, with the last one cut off."""
SLOW = 20.0
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Absolute and relative tolerance, for sums of at most 4 x 40 products of normal numbers."""
MAX_WORLD_SIZE = 16


@dataclass(frozen=True, slots=True)
class Check:
    """One op with a world size and a seed."""

    op: Op
    world_size: int
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """A check's parameters and findings; no findings means that all is well.

    Attributes:
        op, world_size, seed: the check.
        m: rows in each call.
        n, k, dtype: the other sizes, and the dtype.
        slow_ranks: ranks that seldom got the turn.
        findings: races, hangs, errors and wrong numbers.
    """

    op: str
    world_size: int
    seed: int
    m: tuple[int, ...]
    n: int
    k: int
    dtype: str
    slow_ranks: tuple[int, ...]
    findings: tuple[str, ...]


def checks(names: Sequence[str], world_sizes: Sequence[int], seeds: Sequence[int]) -> list[Check]:
    """List the checks for the named ops; all ops for no names.

    Raises:
        ConfigError: an op does not exist, or a world size is out of range.
    """
    for size in world_sizes:
        if not 1 <= size <= MAX_WORLD_SIZE:
            raise ConfigError(f"world size is {size}; it must be in [1, {MAX_WORLD_SIZE}]")
    return [Check(op, size, seed) for op in named(names) for size in world_sizes for seed in seeds]


def perform(check: Check) -> Outcome:
    """Run one check."""
    draw = random.Random(f"{check.op.name} {check.world_size} {check.seed}")
    m, n, k = (draw.randint(1, LARGEST) for _ in range(3))
    dtype = draw.choice(list(TOLERANCE))
    largest = Sizes(
        check.world_size, m, n, k, dtype, tile=(min(TILES),) * 3, chunk=draw.choice(CHUNKS)
    )
    rows = [m, *(draw.randint(1, m) for _ in range(CALLS - 1))]
    draw.shuffle(rows)
    sizes = [
        replace(
            largest,
            m=call_rows,
            tile=tuple(draw.choice(TILES) for _ in largest.tile),
            programs=draw.randint(1, 5),
        )
        for call_rows in rows
    ]
    replays = draw.random() < 1 / 2
    called = CALLED if replays else CALLS
    sizes[called:] = [sizes[called - 1]] * (CALLS - called)
    slow = tuple(rank for rank in range(check.world_size) if draw.random() < 1 / 3)
    numbers = torch.Generator().manual_seed(draw.getrandbits(32))
    calls = [
        [
            [torch.randn(shape, generator=numbers).to(dtype) for _ in range(check.world_size)]
            for shape in check.op.shapes(call)
        ]
        for call in sizes
    ]
    together = draw.random() < 1 / 2

    def work(home: Home) -> list[Tensor]:
        workspace = check.op.workspace(home, largest)
        workspace.skip(CALLS_BEFORE[check.seed % len(CALLS_BEFORE)])
        counted = [workspace] if together else []
        results: list[Tensor] = []

        def end(given: Sequence[Tensor], out: Tensor) -> None:
            """Use the result and overwrite the operands, as a caller may after a call."""
            results.append(out.clone())
            for tensor in given:
                tensor.zero_()

        with counted_together([] if replays else counted):
            for call, tensors in zip(sizes[:called], calls, strict=False):
                given = [tensor[home.rank].clone() for tensor in tensors]
                with recorded() as recording, counted_together(counted if replays else []):
                    out = check.op.call(given, workspace, call)
                end(given, out)
        for tensors in calls[called:]:
            for tensor, new in zip(given, tensors, strict=True):
                tensor.copy_(new[home.rank])
            recording.replay()
            end(given, out)
        workspace.check()
        return results

    races = RaceDetector()
    slowness = [SLOW if rank in slow else 1.0 for rank in range(check.world_size)]
    wrong: list[str] = []
    try:
        by_rank = run(
            work,
            check.world_size,
            seed=check.seed,
            slowness=slowness,
            races=races,
            ranks_per_node=check.op.reach(check.world_size),
        )
    except (HangError, RankError) as error:
        wrong.append(str(error))
    else:
        tolerance = max(TOLERANCE[dtype], check.op.tolerance)
        for call, tensors in enumerate(calls):
            got = [results[call] for results in by_rank]
            wrong += _differences(call, got, check.op.oracle(*tensors), tolerance)
    return Outcome(
        op=check.op.name,
        world_size=check.world_size,
        seed=check.seed,
        m=tuple(call.m for call in sizes),
        n=n,
        k=k,
        dtype=str(dtype).removeprefix("torch."),
        slow_ranks=slow,
        findings=(*races.findings, *wrong),  # causes first
    )


def _differences(
    call: int, got: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float
) -> list[str]:
    """Describe each rank whose numbers differ from the oracle's."""
    found = []
    for rank, (ours, oracle) in enumerate(zip(got, expected, strict=True)):
        where = f"call {call}, rank {rank}"
        if ours.shape != oracle.shape:
            found.append(f"{where}: shape is {list(ours.shape)}, the oracle's {list(oracle.shape)}")
            continue
        ours, oracle = ours.float(), oracle.float()
        wrong = ~torch.isclose(ours, oracle, atol=tolerance, rtol=tolerance)
        if wrong.any():
            first = tuple(wrong.nonzero()[0].tolist())
            found.append(
                f"{where}: {int(wrong.sum())} of {wrong.numel()} numbers differ from the oracle's; "
                f"{list(first)} is {float(ours[first]):.6g}, not {float(oracle[first]):.6g}"
            )
    return found
