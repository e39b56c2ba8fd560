"""A step's numbers on the model's device, in one asynchronous copy.

A GPU copies asynchronously only from pinned host memory. The step's arrays are therefore packed
into one pinned buffer, and one copy moves them to the device, on the stream that launches the
step's kernels. torch's allocator does not reuse the buffer before the copy is done.

Each array begins at a multiple of ALIGN numbers. Triton compiles a kernel again for pointers that
are not multiples of 16 bytes; alignment would otherwise change with the step's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.models.interface import Int32, StepInput

ALIGN = 16
"""Alignment in int32 numbers."""

IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Where a step's keys and values go, and what its queries attend to.

    Attributes:
        pages, slots: int32 [T]; each token's page in the cache and its offset there. Page -1 is not
            written.
        batch: the requests that the tokens belong to.
    """

    pages: Tensor
    slots: Tensor
    batch: PagedBatch


@dataclass(frozen=True, slots=True)
class StepTensors:
    """A step's inputs to the layers.

    Attributes:
        token_ids: int32 [T]; as in StepInput.
        positions: int32 [T].
        plan: for T tokens.
    """

    token_ids: Tensor
    positions: Tensor
    plan: PagedPlan


def put(device: torch.device, *arrays: IntArray) -> list[Tensor]:
    """Copy arrays to int32 tensors on a device, for kernels on the current stream."""
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


def put_as_is(device: torch.device, *arrays: npt.NDArray[Any]) -> list[Tensor]:
    """Copy arrays with 4 or 8 bytes a number to a device, in their dtypes."""
    arrays = tuple(np.ascontiguousarray(array) for array in arrays)
    words = put(device, *(array.ravel().view(np.int32) for array in arrays))
    return [
        part.view(torch.from_numpy(array).dtype).view(array.shape)
        for part, array in zip(words, arrays, strict=True)
    ]


def put_step(
    device: torch.device, batch: StepInput, plan: AttentionPlan, max_model_len: int
) -> StepTensors:
    """Copy a step to the device without padding.

    Attention then splits keys as in a recorded step, for `max_model_len` tokens. The number of
    splits, and with it the kernel, depends on the number of requests alone.
    """
    token_ids, positions, pages, slots, query_start, context_len, table = put(
        device,
        *(batch.token_ids, batch.positions, plan.pages.numpy(), plan.slots.numpy()),
        *(plan.query_start, plan.context_len, plan.block_table),
    )
    queries = np.diff(plan.query_start)
    paged = PagedBatch(
        *(query_start, context_len, table),
        torch.zeros(len(context_len), dtype=torch.int32, device=device),
        max_queries=int(queries.max()),
        max_context=max_model_len,
        decodes=int((queries == 1).sum()),
    )
    return StepTensors(token_ids, positions, PagedPlan(pages, slots, paged))


def rows_of(array: Int32, count: int, fill: int) -> Int32:
    """Pad [n, ...] with rows of `fill` to [count, ...]."""
    out = np.full((count, *array.shape[1:]), fill, np.int32)
    out[: len(array)] = array
    return out
