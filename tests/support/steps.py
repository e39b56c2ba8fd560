"""Drives a ModelRunner by hand: requests in scattered cache blocks, in any mix of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from weft.models.interface import Int32, ModelRunner, SlotSampling, StepInput, StepOutput


@dataclass
class Request:
    """A request as a scheduler knows it.

    Attributes:
        tokens: prompt and output; -1 - slot for one that only the runner knows.
        blocks: of the cache.
        done: how many of the tokens are in the cache.
        output: what was sampled.
    """

    sampling: SlotSampling
    tokens: list[int]
    blocks: list[int]
    done: int = 0
    output: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)


class Driver:
    """Builds the steps of some requests and keeps count.

    Args:
        runner: with its cache allocated.
        block_size: of the runner.
        num_blocks: of the runner; they are dealt out in random order.
    """

    def __init__(self, runner: ModelRunner, block_size: int, num_blocks: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._free = np.random.default_rng(0).permutation(num_blocks).tolist()
        self._steps = 0
        self._slots = 0

    def add(self, prompt: list[int], max_len: int, **sampling: Any) -> Request:
        """A request of at most `max_len` tokens, in the next slot."""
        count = -(-max_len // self._block_size)
        blocks, self._free = self._free[:count], self._free[count:]
        settings = replace(SlotSampling(self._slots), **sampling)
        self._slots += 1
        return Request(settings, list(prompt), blocks)

    def finish(self, request: Request) -> None:
        """Give the request's blocks to the requests that come next."""
        self._free = request.blocks + self._free

    def step(
        self,
        *chunks: tuple[Request, int],
        unknown: bool = False,
        prompt_logprobs: int = -1,
        pooled: Sequence[Request] = (),
    ) -> StepOutput:
        """Run the next tokens of some requests; those that reach their end are sampled.

        Args:
            chunks: (request, how many tokens).
            unknown: name what was sampled by its slot from here on, as a scheduler that runs
                ahead does.
            prompt_logprobs: score the tokens that follow the chunks' tokens in the prompts, with
                so many alternatives; not if negative.
            pooled: those whose hidden states are summed; they are not sampled.
        """
        step = self._build(chunks, prompt_logprobs, pooled)
        out = self._runner.step(step)
        self._steps += 1
        sampled = dict(zip(step.sample_slot.tolist(), range(len(step.sample_slot)), strict=True))
        for request, count in chunks:
            request.done += count
            if (row := sampled.get(request.sampling.slot)) is not None:
                token = int(out.token_ids[row])
                request.output.append(token)
                request.status.append(int(out.status[row]))
                request.tokens.append(-1 - request.sampling.slot if unknown else token)
        return out

    def _build(
        self,
        chunks: tuple[tuple[Request, int], ...],
        top: int,
        pooled: Sequence[Request] = (),
    ) -> StepInput:
        sizes = [count for _, count in chunks]
        ends = np.cumsum(sizes)
        table = np.zeros((len(chunks), max(len(r.blocks) for r, _ in chunks)), np.int32)
        for row, (request, _) in enumerate(chunks):
            table[row, : len(request.blocks)] = request.blocks
        slots = [request.sampling.slot for request, _ in chunks]
        last = [
            i
            for i, (r, count) in enumerate(chunks)
            if r.done + count == len(r.tokens) and r not in pooled
        ]
        summed = [
            range(end - count, end)
            for (request, count), end in zip(chunks, ends, strict=True)
            if request in pooled
        ]
        scored = [
            (end - count + i, request.tokens[request.done + i + 1])
            for (request, count), end in zip(chunks, ends, strict=True)
            for i in range(count)
            if top >= 0 and request.done + i + 1 < len(request.tokens)
        ]
        return StepInput(
            step=self._steps,
            token_ids=_int32(t for r, n in chunks for t in r.tokens[r.done : r.done + n]),
            positions=_int32(p for r, n in chunks for p in range(r.done, r.done + n)),
            query_start=_int32([0, *ends]),
            context_len=_int32(r.done + n for r, n in chunks),
            block_table=table,
            slot=_int32(slots),
            sample_index=_int32(ends[i] - 1 for i in last),
            sample_slot=_int32(slots[i] for i in last),
            output_index=_int32(len(chunks[i][0].output) for i in last),
            new_slots=tuple(chunks[i][0].sampling for i in last if not chunks[i][0].output),
            prompt_logprob_index=_int32(row for row, _ in scored),
            prompt_logprob_target=_int32(target for _, target in scored),
            prompt_logprob_top=max(top, 0),
            pool_index=_int32(row for rows in summed for row in rows),
            pool_count=_int32(map(len, summed)),
        )


def _int32(values: Iterable[int]) -> Int32:
    """A read-only array: a runner must not write to its input."""
    array = np.array(list(values), np.int32)
    array.flags.writeable = False
    return array
