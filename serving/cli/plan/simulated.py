"""A plan's latencies from a simulation of the scheduler, in place of formulas."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from rich.console import Console
from rich.progress import track

from weft.models.plan.load import Load
from weft.models.plan.plan import Row
from weft.serving.engine.simulator.fleet import EngineLimits, simulate


def simulated(rows: Sequence[Row], load: Load, requests: int, routing: str) -> Iterator[Row]:
    """Yield the rows with simulated latencies; rows that do not keep up with the load stay.

    Args:
        rows: a plan.
        load: all requests.
        requests: number of requests in the simulation.
        routing: between the engines of a row; see serving/engine/simulator/routing.py.

    Raises:
        ConfigError: there is no such routing.
    """
    console = Console(stderr=True)
    hidden = not sys.stderr.isatty()
    for row in track(rows, "simulating", console=console, transient=True, disable=hidden):
        if row.steady is None:
            yield row
            continue
        ledger, limits = row.choice.ledger, row.choice.limits
        groups = row.choice.layout.dp_size  # simulated as one scheduler
        result = simulate(
            islice(load.arrivals(limits.max_model_len), requests),
            EngineLimits(
                max_num_seqs=groups * limits.max_num_seqs,
                max_num_batched_tokens=groups * limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                num_blocks=groups * ledger.num_blocks,
                block_size=ledger.block_size,
                prefix_caching=load.hit > 0,
            ),
            row.choice.engine.seconds,
            replicas=row.choice.replicas,
            routing=routing,
            users=load.users,
        )
        yield replace(row, steady=replace(row.steady, latency=result.latency))
