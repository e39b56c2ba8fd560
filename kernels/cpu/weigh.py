"""The weights that tokens are drawn with: multiples of 2**-40, held as whole numbers.

Their sums are exact in any order, so that a draw does not depend on how the
vocabulary is split. Nor does a weight depend on where in a tensor it is, which rules
out torch's exp2: it computes the last numbers of each thread's part otherwise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.kernels.cpu import native

BITS = 40
ONE = 1 << BITS
"""The largest weight; those of 2**23 tokens can be summed."""


def weigh(log2: Tensor) -> Tensor:
    """floor(2**(40 + x)), but for a relative error of 4e-7 in the power.

    Args:
        log2: float32, contiguous; 0 at most, -inf too.

    Returns:
        int64 of the same shape; ONE for 0, 0 below -41.
    """
    if not (log2.is_cpu and native.library() is not None):
        return (log2 * math.log(2)).exp_().mul_(ONE).long()
    weights = torch.empty_like(log2, dtype=torch.int64)
    native.kernels().weft_weigh(log2.data_ptr(), log2.numel(), weights.data_ptr())
    return weights
