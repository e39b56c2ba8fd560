"""Whole-op tuning: an overlapped op is timed as a whole, on all ranks together.

Timing its kernels alone would select the wrong ones: the product that is fastest by itself leaves
no processors to the senders. So one measurement is a call of the op on all ranks, and its time is
the slowest rank's.

    1. every rank orders the same candidates by the cost model (costs.py)
    2. each candidate is called once without timing, on all ranks: this compiles and loads its
       kernels; if one rank cannot compile a candidate, all ranks drop it
    3. in each repetition all ranks meet, call the next candidate, and time the calls; a temporary
       slowdown affects all candidates alike
    4. ranks exchange their times, so all choose the same winner; variations of stages, warps,
       senders and splits around it are timed alike
    5. the first rank records the winner (table.py)

Ranks leave a meeting on the host at different times. So the op is called once before the clock
starts. In that call each rank waits for all others, which aligns their devices far better than the
host can.

A `Choice` selects the configuration to run: the tuned one, or else the cost model's. Ops use it for
options that their caller leaves open; ops without a workspace take one as an argument.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from msgspec import structs
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import OPERANDS
from weft.kernels.gpu.matmul.matmul import Weights
from weft.kernels.gpu.runtime.launches import is_refusal, loaded
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.clock import Call, Clock, gpu_clock, host_clock
from weft.kernels.gpu.tuning.costs import SENDING, Config, Problem, device_named, space
from weft.kernels.gpu.tuning.table import Entry, TuningError
from weft.kernels.symmetric.memory import Home

Prepare = Callable[[Config], Call]
"""Config -> one call of the op with it, on this rank. No config allocates symmetric memory of its
own: one workspace, made for the smallest tile, serves all.
"""

PRODUCT_METHODS = {
    "all_gather_matmul": ("push",),
    "matmul_reduce_scatter": ("push",),
    "matmul_all_reduce": ("one_shot",),
    "grouped_matmul": ("local",),
    "all_gather_grouped_matmul": ("push",),
    "grouped_matmul_reduce_scatter": ("push",),
}
"""The methods of each op that multiplies."""

CANDIDATES = 16
REPETITIONS = 7
CALLS = 5
"""Calls between two readings of the clock."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate's time in each repetition, in seconds, on the slowest rank."""

    config: Config
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def options_of(problem: Problem, config: Config) -> dict[str, Any]:
    """Turn a configuration into keyword arguments of the problem's op; for moe_dispatch, of its
    workspace.
    """
    if problem.op == "moe_dispatch":
        return {"chunk": config.block_m}
    options: dict[str, Any] = {"warps": config.warps, "stages": config.stages}
    if problem.op in SENDING:
        options["senders"] = config.senders
    if problem.attends:
        splits = {"splits": config.splits} if problem.decodes else {}
        return {"blocks": (config.block_m, config.block_n), **options, **splits}
    if not problem.multiplies:
        return {"method": config.method}
    return {"blocks": (config.block_m, config.block_n, config.block_k), **options}


def tune(
    home: Home,
    problem: Problem,
    methods: Sequence[str],
    prepare: Prepare,
    *,
    path: Path | None = None,
    clock: Clock | None = None,
    candidates: int = CANDIDATES,
    repetitions: int = REPETITIONS,
    calls: int = CALLS,
) -> list[Measured]:
    """Find the fastest configuration, and record it. Collective.

    Args:
        methods: the op's methods.
        prepare: makes calls; a configuration is dropped if it raises a KernelError or does not
            compile.
        path: of the file; tuned.default_path() if None. The first rank's is written.
        clock: if None, events on a GPU, otherwise the host's clock.
        candidates: in the first round, each with another method or tile.
        repetitions: in each round.
        calls: for one time.

    Returns:
        The measurements of the last round, the fastest first; equal on all ranks.

    Raises:
        TuningError: no candidate runs, or the file cannot be written; raised on all ranks.
    """
    if home.world_size != problem.world_size:
        raise TuningError(
            f"{problem.op}: world size is {problem.world_size}; it must be the home's, "
            f"{home.world_size}"
        )
    clock = clock or (gpu_clock if home.device.type == "cuda" else host_clock)
    name = home.device_name
    configs = space(problem, device_named(name), methods)
    first = measure(home, _distinct_tiles(configs)[:candidates], prepare, clock, repetitions, calls)
    around = _variations(first[0].config, configs)
    best = measure(home, around, prepare, clock, repetitions, calls)
    key = tuned.key_of(problem, name)
    fields = {field: getattr(key, field) for field in key.__struct_fields__}
    entry = Entry(**fields, config=best[0].config, microseconds=best[0].median * 1e6)

    def write() -> None:
        if home.rank == 0:
            tuned.record(path or tuned.default_path(), {key: entry})

    from_first_rank(home, write)
    return best


def measure(
    home: Home,
    configs: Sequence[Config],
    prepare: Prepare,
    clock: Clock,
    repetitions: int,
    calls: int,
) -> list[Measured]:
    """Time configurations on all ranks in lock step; the fastest first. Collective.

    Raises:
        TuningError: no configuration runs; gives the first one's reason.
    """
    ready = _prepare_all(home, configs, prepare)
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(repetitions):
        for (_, call), mine in zip(ready, times, strict=True):
            home.barrier()
            call()  # lines the ranks up
            mine.append(clock(call, calls))
    by_rank = [json.loads(text) for text in home.exchange(json.dumps(times))]
    measured = [
        Measured(config, tuple(max(repetition) for repetition in zip(*ranks, strict=True)))
        for (config, _), *ranks in zip(ready, *by_rank, strict=True)
    ]
    return sorted(measured, key=lambda one: (one.median, one.config))


class Choice:
    """Selects an op's configuration where its caller does not: the tuned one, or else the model's
    choice.

    All ranks create it together, with the op's workspace. All use the first rank's file, so ranks
    with different files still agree. The answer depends only on the arguments and is cached: a call
    costs two dictionary lookups.

    Args:
        home: this rank's.
        op: a key of `costs.PAYLOADS`.
        block_m, block_n: the smallest sides of a tile that the workspace has signals for.
        path: of the file; tuned.default_path() if None.

    Raises:
        TuningError: the first rank's file is damaged; raised on all ranks.
    """

    def __init__(
        self, home: Home, op: str, block_m: int = 0, block_n: int = 0, path: Path | None = None
    ) -> None:
        self._op = op
        self._world_size = home.world_size
        self._device = device_named(home.device_name)
        self._smallest = (block_m, block_n)
        self._chosen: dict[tuple[object, ...], Config] = {}

        def look() -> str:
            table = tuned.load(path or tuned.default_path())
            found = [
                ((key.dtype, key.rows, key.n, key.k, key.groups, key.top_k), entry.config)
                for key, entry in table.items()
                if (key.op, key.device, key.world_size, key.triton)
                == (op, home.device_name, home.world_size, triton.__version__)
            ]
            return msgspec.json.encode(found).decode()

        found = from_first_rank(home, look)
        kind = list[tuple[tuple[str, int, int, int, int, int], Config]]
        self._tuned = dict(msgspec.json.decode(found, type=kind))

    def __call__(
        self,
        dtype: torch.dtype,
        rows: int,
        n: int,
        k: int = 0,
        *,
        methods: tuple[str, ...],
        groups: int = 1,
        top_k: int = 1,
    ) -> Config:
        """Return a configuration; the same for all rows in a bucket.

        Args:
            dtype: of the operands.
            rows, n, k, groups, top_k: as in a `costs.Problem`.
            methods: the methods that this call can use, from `costs.METHODS`.
        """
        largest = tuned.bucket(rows)
        key = (dtype, largest, n, k, groups, top_k, methods)
        config = self._chosen.get(key)
        if config is None:
            name = str(dtype).removeprefix("torch.")
            problem = Problem(self._op, self._world_size, largest, n, k, name, groups, top_k)
            config = self._choose(problem, methods)
            self._chosen[key] = config
        return config

    def of_product(
        self,
        x: Tensor,
        weights: Weights,
        rows: int,
        silu_multiply: bool = False,
        groups: int = 1,
        top_k: int = 1,
    ) -> Config | None:
        """Select for an op that multiplies, given its caller's operands.

        Several weights count as one weight with their total width. With gate and up a tile has two
        sums, and so half the columns.

        Returns:
            None if numbers must be loaded one by one, where no tile is good, or cannot be
            multiplied.
        """
        k, n = x.shape[1], sum(weights.widths)
        if x.dtype not in OPERANDS or any(size % 16 for size in (k, *weights.widths)):
            return None
        methods = PRODUCT_METHODS[self._op]
        config = self(x.dtype, rows, n, k, methods=methods, groups=groups, top_k=top_k)
        if silu_multiply and len(weights.tensors) == 2:
            config = structs.replace(config, block_n=min(64, config.block_n // 2))
        return config

    def of_attention(self, q: Tensor, keys: Tensor, rows: int, context: int) -> Config | None:
        """Select for attention, given q [T, H, D] and keys [num_blocks, Hk, ..., D].

        Args:
            rows: as in a `costs.Problem`.
            context: keys of the longest request.

        Returns:
            None if nothing was tuned for this. The ops' own rules are then better than the model,
            which knows only the longest request.
        """
        kv_heads, name = keys.shape[1], str(keys.dtype).removeprefix("torch.")
        shape = (tuned.bucket(rows), tuned.bucket(context), q.shape[2], kv_heads)
        return self._tuned.get((name, *shape, q.shape[1] // kv_heads))

    def _choose(self, problem: Problem, methods: tuple[str, ...]) -> Config:
        shape = (problem.rows, problem.n, problem.k, problem.groups, problem.top_k)
        config = self._tuned.get((problem.dtype, *shape))
        if config is not None and config.method in methods and self._has_signals(problem, config):
            return config
        configs = space(problem, self._device, methods)
        return next((c for c in configs if self._has_signals(problem, c)), configs[0])

    def _has_signals(self, problem: Problem, config: Config) -> bool:
        """Return whether the workspace has a signal for each tile of that size, or of one that
        covers all.
        """
        needed = (-(-problem.rows // problem.parts), problem.n)
        sides = (config.block_m, config.block_n)
        return all(
            not least or side >= least or side >= need
            for side, least, need in zip(sides, self._smallest, needed, strict=True)
        )


def _distinct_tiles(configs: Sequence[Config]) -> list[Config]:
    """Return the cheapest configuration of each method and tile, in order of cost."""
    first: dict[tuple[object, ...], Config] = {}
    for config in configs:
        first.setdefault((config.method, config.block_m, config.block_n, config.block_k), config)
    return list(first.values())


def _variations(center: Config, configs: Sequence[Config]) -> list[Config]:
    """Return the center and its variations in stages, warps, senders or splits, one at a time."""

    def differences(config: Config) -> list[str]:
        fields = Config.__struct_fields__
        return [field for field in fields if getattr(config, field) != getattr(center, field)]

    free: tuple[list[str], ...] = ([], ["stages"], ["warps"], ["senders"], ["splits"])
    return [config for config in configs if differences(config) in free]


def _prepare_all(
    home: Home, configs: Sequence[Config], prepare: Prepare
) -> list[tuple[Config, Call]]:
    """Prepare calls that all ranks can run, loaded on all of them before any runs. Collective."""
    mine: list[Call | str] = []
    for config in configs:
        try:
            call = prepare(config)
            with loaded():
                call()
            mine.append(call)
        except Exception as error:
            if not is_refusal(error):
                raise
            mine.append(f"{type(error).__name__}: {error}")
    failures = [
        json.loads(text)
        for text in home.exchange(json.dumps([x if isinstance(x, str) else "" for x in mine]))
    ]
    ready = []
    for config, call, *reasons in zip(configs, mine, *failures, strict=True):
        if not any(reasons) and not isinstance(call, str):
            ready.append((config, call))
    if not ready:
        rank, reason = next((r, each[0]) for r, each in enumerate(failures) if each[0])
        raise TuningError(
            f"none of {len(configs)} configurations runs; {configs[0]} on rank {rank}: {reason}"
        )
    return ready


def from_first_rank(home: Home, work: Callable[[], str | None]) -> str:
    """Return the first rank's result or error on all ranks. Collective."""
    try:
        mine = {"result": work() or ""}
    except TuningError as error:
        mine = {"error": str(error)}
    found = json.loads(home.exchange(json.dumps(mine))[0])
    if "error" in found:
        raise TuningError(f"rank 0: {found['error']}")
    return str(found["result"])
