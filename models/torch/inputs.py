"""A step's numbers on the model's device, copied there at once and without waiting.

A GPU copies asynchronously only from pinned host memory. So the arrays of a step are put
into such memory, one after the other, and go to the device in one copy, on the stream that
the step's kernels are launched on. torch's allocator gives the memory to nobody else before
the copy is done.

Each array begins at a multiple of ALIGN numbers. Triton compiles a kernel anew for pointers
that are not multiples of 16 bytes, which would otherwise come and go with the sizes of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.models.interface import Int32, StepInput

ALIGN = 16
"""Numbers of int32."""

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Where a step's keys and values go, and what its queries attend to.

    Attributes:
        pages, slots: int32 [T]; of each token in the cache. One with page -1 is not written.
        batch: which requests they belong to.
    """

    pages: Tensor
    slots: Tensor
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What the layers take of a step.

    Attributes:
        token_ids: int32 [T]; as of a StepInput.
        positions: int32 [T].
        plan: of T tokens.
    """

    token_ids: Tensor
    positions: Tensor
    plan: PagedPlan


def put(device: torch.device, *arrays: IntArray) -> list[Tensor]:
    """Int32 tensors of the arrays' shapes on a device, for kernels of the current stream."""
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.size // ALIGN) * ALIGN
    host = torch.empty(end, dtype=torch.int32, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for start, array in zip(starts, arrays, strict=True):
        numbers[start : start + array.size] = array.ravel()
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.size].view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def put_step(device: torch.device, batch: StepInput, plan: AttentionPlan) -> StepTensors:
    """A step as it is."""
    token_ids, positions, pages, slots, query_start, context_len, table = put(
        device,
        *(batch.token_ids, batch.positions, plan.pages.numpy(), plan.slots.numpy()),
        *(plan.query_start, plan.context_len, plan.block_table),
    )
    paged = PagedBatch(
        *(query_start, context_len, table),
        torch.zeros(len(context_len), dtype=torch.int32, device=device),
        max_queries=int(np.diff(plan.query_start).max()),
        max_context=int(plan.context_len.max()),
    )
    return StepTensors(token_ids, positions, PagedPlan(pages, slots, paged))


def read_back(tensors: Sequence[Tensor]) -> list[IntArray]:
    """Integers of several tensors, in one copy: what makes the host wait for the device."""
    if not tensors:
        return []
    sizes = [tensor.numel() for tensor in tensors]
    numbers = torch.cat([tensor.flatten().long() for tensor in tensors]).cpu().numpy()
    return np.split(numbers, np.cumsum(sizes)[:-1])


def rows_of(array: Int32, count: int, fill: int) -> Int32:
    """[n, ...] -> [count, ...], with rows of `fill` behind."""
    out = np.full((count, *array.shape[1:]), fill, np.int32)
    out[: len(array)] = array
    return out
