"""Whole-op tuning: all ranks together time an overlapped op as a whole.

Timing single kernels would choose the wrong ones: the product that is fastest by itself leaves no
processors for the programs that send. One measurement is therefore a call on all ranks, and the
slowest rank decides its time.

    1. every rank orders the same candidates by the cost model (costs.py)
    2. all ranks call each candidate once, without timing, to compile and load its kernels; if a
       candidate does not compile on one rank, all ranks drop it
    3. in each repetition, all ranks meet, call the next candidate and time the calls; a machine
       that is slow for a while thus affects all candidates alike
    4. the ranks exchange their times, so all choose the same winner; then they time variations of
       its stages, warps, senders and splits in the same way
    5. rank 0 writes the winner to the tuning file (table.py)

Ranks leave a meeting on the host at different times. Therefore the op is called once before the
clock starts. In this call each rank waits for all others, which aligns the ranks on their devices
far better than the host can.

A `Choice` selects the configuration for a call: the tuned one, else the best one in the cost model.
An op uses it for arguments that its caller leaves open. An op without a workspace uses the `Choice`
that its caller passes.
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
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.runtime.launches import is_refusal, loaded
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.clock import Call, Clock, gpu_clock, host_clock
from weft.kernels.gpu.tuning.costs import SENDING, Config, Problem, device_named, space
from weft.kernels.gpu.tuning.products import PRODUCT_METHODS
from weft.kernels.gpu.tuning.table import Entry, TuningError
from weft.kernels.symmetric.memory import Home

Prepare = Callable[[Config], Call]
"""Config -> a function that calls the op with this config, on this rank. It allocates no symmetric
memory for a config: one workspace, made for the smallest tile, serves all configs."""

_entries = msgspec.json.Decoder(list[tuple[tuple[str, int, int, int, int, int], Config]])

CANDIDATES = 16
REPETITIONS = 7
CALLS = 5
"""Number of calls for one time measurement."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate's times in seconds: for each repetition, the time on the slowest rank."""

    config: Config
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def options_of(problem: Problem, config: Config) -> dict[str, Any]:
    """Convert a configuration to keyword arguments for the problem's op.

    For moe_dispatch, the arguments are for its workspace.
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
    """Find the fastest configuration, and write it to the tuning file. Collective.

    Args:
        methods: methods that the op has.
        prepare: makes the calls. A configuration is dropped if `prepare` raises a KernelError for
            it, or if it does not compile.
        path: tuning file; tuned.default_path() if None. Only rank 0 writes its file.
        clock: if None, events on a GPU, else the host's clock.
        candidates: number of candidates in the first round; each has another method or tile.
        repetitions: number of repetitions in each round.
        calls: number of calls for one time measurement.

    Returns:
        The measurements of the last round, the fastest first; equal on all ranks.

    Raises:
        TuningError: on all ranks, if no candidate runs or the file cannot be written.
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
    """Time configurations on all ranks in lock step, and sort them, the fastest first. Collective.

    Raises:
        TuningError: no configuration runs. The message has the reason for the first one.
    """
    ready = _prepare_all(home, configs, prepare)
    times: list[list[float]] = [[] for _ in ready]
    for _ in range(repetitions):
        for (_, call), mine in zip(ready, times, strict=True):
            home.barrier()
            call()  # aligns the ranks
            mine.append(clock(call, calls))
    by_rank = [json.loads(text) for text in home.exchange(json.dumps(times))]
    measured = [
        Measured(config, tuple(max(repetition) for repetition in zip(*ranks, strict=True)))
        for (config, _), *ranks in zip(ready, *by_rank, strict=True)
    ]
    return sorted(measured, key=lambda one: (one.median, one.config))


class Choice:
    """Selection for arguments that a caller leaves open: tuned, else best in the cost model.

    All ranks create it together, with the op's workspace. All of them use the tuning file on rank
    0, so ranks with different files still run the same kernels. The result depends only on the
    arguments and the file. It is computed once and cached: a call costs two dictionary look-ups.

    Args:
        home: this rank's home.
        op: a key in `costs.PAYLOADS`.
        block_m, block_n: sides of the smallest tile that the workspace has signals for.
        path: tuning file; tuned.default_path() if None.

    Raises:
        TuningError: on all ranks, if the file on rank 0 is damaged.
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
        self._tuned = dict(_entries.decode(found))

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
        """Select a configuration. All numbers of rows in a bucket get the same one.

        Args:
            dtype: operand dtype.
            rows, n, k, groups, top_k: as in `costs.Problem`.
            methods: methods that this call can use; keys in `costs.METHODS`.
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
        """Select a configuration for an op with a product, from the operands of its caller.

        Several weights count as one weight with all their columns. For gate and up a tile has two
        sums, and therefore half as many columns.

        Returns:
            None if the operands must be loaded number by number, because no tile is good then, or
            if their dtype cannot be multiplied.
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
        """Select a configuration for attention with q [T, H, D], keys [num_blocks, Hk, ..., D].

        Args:
            rows: as in `costs.Problem`.
            context: number of keys in the longest request.

        Returns:
            None if nothing was tuned for this shape. The ops then choose a tile by its registers,
            and the number of splits by the cost model.
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
        """Tell if the workspace has a signal for each tile.

        Each side must be at least the smallest side, or cover the whole result.
        """
        needed = (-(-problem.rows // problem.parts), problem.n)
        sides = (config.block_m, config.block_n)
        return all(
            not least or side >= least or side >= need
            for side, least, need in zip(sides, self._smallest, needed, strict=True)
        )


def _distinct_tiles(configs: Sequence[Config]) -> list[Config]:
    """Keep the cheapest configuration for each method and tile, in order of cost."""
    first: dict[tuple[object, ...], Config] = {}
    for config in configs:
        first.setdefault((config.method, config.block_m, config.block_n, config.block_k), config)
    return list(first.values())


def _variations(center: Config, configs: Sequence[Config]) -> list[Config]:
    """Keep the center and the configurations that differ from it in one field only.

    This field is stages, warps, senders or splits.
    """

    def differences(config: Config) -> list[str]:
        fields = Config.__struct_fields__
        return [field for field in fields if getattr(config, field) != getattr(center, field)]

    free: tuple[list[str], ...] = ([], ["stages"], ["warps"], ["senders"], ["splits"])
    return [config for config in configs if differences(config) in free]


def _prepare_all(
    home: Home, configs: Sequence[Config], prepare: Prepare
) -> list[tuple[Config, Call]]:
    """Make calls for the configurations that run on all ranks. Collective.

    Every rank has loaded all kernels before the first one runs.
    """
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
    """Run `work` on all ranks, and return the result of rank 0, or raise its error. Collective."""
    try:
        mine = {"result": work() or ""}
    except TuningError as error:
        mine = {"error": str(error)}
    found = json.loads(home.exchange(json.dumps(mine))[0])
    if "error" in found:
        raise TuningError(f"rank 0: {found['error']}")
    return str(found["result"])
