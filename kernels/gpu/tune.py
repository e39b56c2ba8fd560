"""Whole-op tuning: an overlapped op is timed as one thing, on all ranks together.

Timing its kernels alone would choose the wrong ones: the product that is
fastest by itself leaves no processors to those that send. So one measurement is
a call of the op on all ranks, and its time is the slowest rank's.

    1. every rank orders the same candidates by the cost model (costs.py)
    2. each candidate is called once without being timed, on all ranks: kernels
       are compiled and loaded; one that a rank cannot compile is dropped by all
    3. repetition by repetition, all ranks meet, call the next candidate, and
       time the calls; a machine that slows down for a while touches all alike
    4. the times of all ranks are exchanged, so all choose the same winner; the
       variations of stages, warps and senders around it are timed in the same way
    5. the first rank writes the winner down (tuned.py)

Ranks come from a meeting on the host at different times. So the op is called
once before the clock starts: each rank of it waits for all others, which lines
them up on their devices far better than the host can.

`choose` answers what to run: what was tuned, else what the cost model prefers.
It is collective, so that ranks with different files still run the same.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from weft.kernels.gpu import tuned
from weft.kernels.gpu.clock import Call, Clock, gpu_clock, host_clock
from weft.kernels.gpu.costs import Config, Problem, device_named, space
from weft.kernels.gpu.launches import is_refusal, loaded
from weft.kernels.gpu.tuned import Entry, TuningError
from weft.kernels.symmetric.memory import Home

Prepare = Callable[[Config], Call]
"""Config -> one call of the op with it, on this rank. Allocates nothing for each config that is
symmetric: one workspace, made for the smallest tile, serves all."""

CANDIDATES = 16
REPETITIONS = 7
CALLS = 5
"""Between two looks at the clock."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate's time in each repetition, in seconds, on the rank that was slowest in it."""

    config: Config
    times: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def options_of(problem: Problem, config: Config) -> dict[str, Any]:
    """A configuration as the keyword arguments of the problem's op."""
    if not problem.multiplies:
        return {"method": config.method}
    blocks = (config.block_m, config.block_n, config.block_k)
    options = {"blocks": blocks, "warps": config.warps, "stages": config.stages}
    return options | ({"senders": config.senders} if problem.op == "all_gather_matmul" else {})


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
    """Find the fastest configuration, and write it down. Collective.

    Args:
        methods: that the op has.
        prepare: makes calls; a configuration that it raises a KernelError for, or that does not
            compile, is dropped.
        path: of the file; tuned.default_path() if None. The first rank's is written.
        clock: of events on a GPU, else of the host, if None.
        candidates: of the first round, each with another method or tile.
        repetitions: of each round.
        calls: for one time.

    Returns:
        What was measured in the last round, the fastest first; equal on all ranks.

    Raises:
        TuningError: no candidate runs, or the file cannot be written; on all ranks.
    """
    if home.world_size != problem.world_size:
        raise TuningError(
            f"{problem.op}: world size is {problem.world_size}; it must be the home's, "
            f"{home.world_size}"
        )
    clock = clock or (gpu_clock if home.device.type == "cuda" else host_clock)
    name = device_name(home.device)
    configs = space(problem, device_named(name), methods)
    first = measure(home, _distinct_tiles(configs)[:candidates], prepare, clock, repetitions, calls)
    around = _variations(first[0].config, configs)
    best = measure(home, around, prepare, clock, repetitions, calls)
    key = tuned.key_of(problem, name)
    fields = {field: getattr(key, field) for field in key.__struct_fields__}
    entry = Entry(**fields, config=best[0].config, microseconds=best[0].median * 1e6)
    _on_first_rank(home, lambda: tuned.record(path or tuned.default_path(), {key: entry}))
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
        TuningError: none of them runs; with the first one's reason.
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


def choose(
    home: Home,
    problem: Problem,
    methods: Sequence[str],
    *,
    path: Path | None = None,
) -> dict[int, Config]:
    """What to run, for each bucket of rows up to the problem's. Collective.

    Args:
        problem: of the most rows that will come.
        methods: that the op has.
        path: of the file; tuned.default_path() if None. The first rank's counts.

    Returns:
        Configurations by bucket, equal on all ranks: `chosen[bucket(rows)]`.

    Raises:
        TuningError: the first rank's file is damaged; on all ranks.
    """

    def look() -> str:
        name = device_name(home.device)
        table = tuned.load(path or tuned.default_path())
        found = {}
        for rows in tuned.buckets(problem.rows):
            one = replace(problem, rows=rows)
            entry = table.get(tuned.key_of(one, name))
            if entry is None or entry.config.method not in methods:
                found[rows] = space(one, device_named(name), methods)[0]
            else:
                found[rows] = entry.config
        return msgspec.json.encode(found).decode()

    return msgspec.json.decode(_on_first_rank(home, look), type=dict[int, Config])


def device_name(device: torch.device) -> str:
    """What the driver calls it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _distinct_tiles(configs: Sequence[Config]) -> list[Config]:
    """The cheapest of each method and tile, in order of cost."""
    first: dict[tuple[object, ...], Config] = {}
    for config in configs:
        first.setdefault((config.method, config.block_m, config.block_n, config.block_k), config)
    return list(first.values())


def _variations(center: Config, configs: Sequence[Config]) -> list[Config]:
    """The center, and what differs from it in stages, warps or senders, one of them at a time."""

    def differences(config: Config) -> list[str]:
        fields = Config.__struct_fields__
        return [field for field in fields if getattr(config, field) != getattr(center, field)]

    free: tuple[list[str], ...] = ([], ["stages"], ["warps"], ["senders"])
    return [config for config in configs if differences(config) in free]


def _prepare_all(
    home: Home, configs: Sequence[Config], prepare: Prepare
) -> list[tuple[Config, Call]]:
    """Calls of what all ranks can run, loaded on all of them before any runs. Collective."""
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


def _on_first_rank(home: Home, work: Callable[[], str | None]) -> str:
    """The first rank's result or error, on all of them. Collective."""
    result: dict[str, str] = {}
    if home.rank == 0:
        try:
            result = {"result": work() or ""}
        except TuningError as error:
            result = {"error": str(error)}
    found = json.loads(home.exchange(json.dumps(result))[0])
    if "error" in found:
        raise TuningError(f"rank 0: {found['error']}")
    return str(found["result"])
