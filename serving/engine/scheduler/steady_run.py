"""Many steps of a scheduler at once, while the same requests decode and nothing else happens.

The simulator uses it. The scheduler then is in the same state as after the single steps, except
for the numbers of blocks, and for full blocks of answers: they enter the prefix cache later, but
before they are freed. Neither changes what later steps compute.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from weft.serving.engine.scheduler.scheduler import Scheduler


def steady_steps(scheduler: Scheduler, most: int) -> int:
    """Return how many steps `advance` can take.

    All requests must be decoding, without grammars, in the two steps in flight. No request may end
    in these steps, and blocks must suffice. A request that waits for admission cannot get it
    meanwhile, because the number of available blocks only falls.

    Args:
        scheduler: has one pipeline stage, and its last call was `schedule`.
        most: maximum number of steps to look ahead.
    """
    table = scheduler._slots
    flight = scheduler._in_flight
    if len(flight) != 2 or scheduler._prefilling or table.matchers:
        return 0
    if any(step.chunks or len(step.slots) != table.in_use for step in flight):
        return 0
    slots = flight[0].slots
    steps = min(most, int((table.limit - table.length)[slots].min()))
    if steps < 1 or table.retired:
        return 0
    # The two steps that will be in flight then need blocks too.
    enough = _missing_blocks(scheduler, table.length[slots] + steps) <= scheduler.kv.available
    return steps if enough else 0


def advance(scheduler: Scheduler, steps: int) -> list[str]:
    """Finish this many steps, each with one token for each running request.

    No step is in flight afterwards. The caller calls `schedule` twice, for the steps that are.

    Args:
        scheduler: its state has not changed since `steady_steps`.
        steps: at least 1, at most the result of `steady_steps`.

    Returns:
        Ids of the running requests.
    """
    table, kv, counters = scheduler._slots, scheduler.kv, scheduler._counters
    slots = scheduler._in_flight[0].slots
    scheduler._in_flight.clear()
    table.steps_in_flight[slots] = 0
    table.length[slots] += steps - 2
    table.computed[slots] += steps
    counters.submitted += steps - 2
    counters.finished += steps
    counters.generation_tokens += steps * len(slots)
    new_tokens = array("i", bytes(4 * steps))
    requests = table.requests_in(slots.tolist())
    for request in requests:
        request.token_ids += new_tokens
    # The newest token gets its block from `schedule`.
    lengths = table.length[slots] - 1
    growing = lengths > kv.num_blocks[slots] * kv.block_size
    for slot, length in zip(slots[growing].tolist(), lengths[growing].tolist(), strict=True):
        kv.allocate(slot, length)
    return [request.id for request in requests]


def _missing_blocks(scheduler: Scheduler, lengths: npt.NDArray[np.int32]) -> int:
    """Return how many blocks running requests lack to have this many tokens each."""
    kv = scheduler.kv
    slots = scheduler._in_flight[0].slots
    return int((-(-lengths // kv.block_size) - kv.num_blocks[slots]).clip(0).sum())
