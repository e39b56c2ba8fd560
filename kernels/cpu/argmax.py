"""The largest number of each row: greedy sampling over a vocabulary.

torch takes 60 us a row of 151,936 bfloat16 logits, one row after the other;
csrc/argmax.cpp a sixth of that, and its threads share the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.cpu import native


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest number of each row and where it is first; NaN, and where, if there is one.

    Args:
        x: [R, N], N > 0.

    Returns:
        float32 [R], int64 [R].
    """
    if not (x.is_cpu and native.supports(x.dtype)):
        # max propagates NaN, and is several times faster than argmax in bfloat16.
        largest, index = x.max(dim=-1)
        return largest.float(), index
    x = x.contiguous()
    largest = torch.empty(len(x), dtype=torch.float32)
    index = torch.empty(len(x), dtype=torch.int64)
    native.kernels().weft_argmax(
        x.data_ptr(), len(x), x.shape[1], largest.data_ptr(), index.data_ptr()
    )
    return largest, index
