"""Running requests by slot.

A slot is a request's row in the runner's state. NumPy arrays hold each request's counts, so
scheduling a step with decodes runs no Python code for each request.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.models.interface import Int32
from weft.serving.engine.grammar.matcher import Matcher
from weft.serving.engine.scheduler.block_manager import Slots
from weft.serving.engine.scheduler.request import Request


class SlotTable:
    """Assigns slots to requests and counts their tokens.

    When a request ends or is preempted, it is *retired*: it takes part in no further step. A step
    in flight may still write to its blocks, so its slot and blocks are freed once all steps with
    this slot have finished.

    Args:
        num_slots: number of slots.

    Attributes:
        requests: the request in each slot; None if the slot is free.
        matchers: by slot, the grammar matchers of running requests.
        retired: slots whose requests have ended or were preempted.
        length: int32[num_slots]; tokens of the request, including tokens that steps in flight
            sample.
        prompt_length: int32[num_slots]; tokens of the request's prompt.
        limit: int32[num_slots]; length at which the request ends.
        computed: int32[num_slots]; tokens that finished steps have computed.
        cached_blocks: int32[num_slots]; blocks that were offered to the prefix cache.
        steps_in_flight: int32[num_slots]; steps in flight that name the slot.
        decoding: bool[num_slots]; the request's next token follows from one that was sampled.
        routine: bool[num_slots]; the next output is just a token, unless it ends the request.
        sampled_in: int64[num_slots]; number of the last step that sampled for the request.
    """

    def __init__(self, num_slots: int) -> None:
        self.requests: list[Request | None] = [None] * num_slots
        self.matchers: dict[int, Matcher] = {}
        self.retired: set[int] = set()
        self._free = list(reversed(range(num_slots)))
        self.length = np.zeros(num_slots, np.int32)
        self.prompt_length = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.computed = np.zeros(num_slots, np.int32)
        self.cached_blocks = np.zeros(num_slots, np.int32)
        self.steps_in_flight = np.zeros(num_slots, np.int32)
        self.decoding = np.zeros(num_slots, np.bool_)
        self.routine = np.zeros(num_slots, np.bool_)
        self.sampled_in = np.zeros(num_slots, np.int64)

    @property
    def next_free(self) -> int | None:
        """The slot for the next call to `assign`; None if all are in use."""
        return self._free[-1] if self._free else None

    @property
    def in_use(self) -> int:
        """Number of slots with a request, retired ones included."""
        return len(self.requests) - len(self._free)

    @property
    def running(self) -> int:
        """Number of slots with a request in further steps."""
        return self.in_use - len(self.retired)

    def requests_in(self, slots: Iterable[int]) -> list[Request]:
        """Return the requests in these slots; free slots have none."""
        return [request for slot in slots if (request := self.requests[slot]) is not None]

    def assign(self, request: Request, cached_blocks: int) -> None:
        """Put a request into the next free slot.

        Args:
            request: its `computed` tokens are in the cache.
            cached_blocks: number of its first blocks that came from the prefix cache.
        """
        slot = request.slot = self._free.pop()
        self.requests[slot] = request
        self.length[slot] = len(request)
        self.prompt_length[slot] = request.prompt_length
        self.limit[slot] = request.limit
        self.computed[slot] = request.computed
        self.cached_blocks[slot] = cached_blocks
        self.decoding[slot] = False
        self.routine[slot] = False
        if request.matcher is not None:
            self.matchers[slot] = request.matcher

    def submitted(self, step: int, slots: Slots, sampled: Slots) -> None:
        """Count a submitted step and its sampled tokens.

        Args:
            step: the step's number.
            slots: slots that the step names.
            sampled: slots that it samples for.
        """
        self.steps_in_flight[slots] += 1
        self.length[sampled] += 1
        self.decoding[sampled] = True
        self.sampled_in[sampled] = step

    def finished(self, slots: Slots, context_len: Int32) -> None:
        """Count a finished step.

        Args:
            slots: slots that the step named.
            context_len: number of tokens that each of their requests now has in the cache.
        """
        self.steps_in_flight[slots] -= 1
        self.computed[slots] = context_len

    def retire(self, slot: int) -> None:
        """Let the request take part in no further step."""
        self.retired.add(slot)
        self.decoding[slot] = False
        self.routine[slot] = False

    def release(self) -> list[Request]:
        """Free retired slots after their last step; returns their requests.

        Each request's `slot` still has the old number.
        """
        if not self.retired:
            return []
        slots = [slot for slot in self.retired if self.steps_in_flight[slot] == 0]
        released = self.requests_in(slots)
        for slot in slots:
            self.retired.remove(slot)
            self.requests[slot] = None
            self.matchers.pop(slot, None)
            self._free.append(slot)
        return released
