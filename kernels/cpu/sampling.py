"""Greedy and random sampling on the CPU.

Both are bound by passing over a vocabulary:

- `argmax`: torch takes 60 us for a row of 151,936 bfloat16 logits, one row at a time.
  csrc/argmax.cpp takes a sixth, and its threads share the rows.
- `weigh`: weights are multiples of 2**-40, stored as integers. Their sums are exact in any order,
  so a draw does not depend on how the vocabulary is split. A weight must not depend on its place in
  a tensor either, nor on the device. Each device therefore computes the same polynomial with fused
  multiply-adds (csrc/vector.h, kernels/gpu/rowwise/sampling.py).
- `draw` draws tokens from rows in place, in float32 or bfloat16: csrc/draw.cpp. With torch's
  operators, 64 rows with top-p take 20 times longer. Each thread copies a row that is edited or
  masked, one at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels.cpu import native

BITS = 40
ONE = 1 << BITS
"""The largest weight; the weights of 2**23 tokens can be summed."""

LOWEST = -42.0
"""log2 below which a weight is 0."""


def argmax(x: Tensor) -> tuple[Tensor, Tensor]:
    """Find each row's largest number and its first column; NaN, and its column, if there is one.

    Args:
        x: [R, N], N > 0.

    Returns:
        float32 [R], int64 [R].
    """
    if not _passes(x):
        # max propagates NaN, and is several times faster than argmax in bfloat16.
        largest, index = x.max(dim=-1)
        return largest.float(), index
    x = x.contiguous()
    largest = torch.empty(len(x), dtype=torch.float32)
    index = torch.empty(len(x), dtype=torch.int64)
    native.kernels().weft_argmax(
        *(x.data_ptr(), x.dtype == torch.float32, len(x), x.shape[1]),
        *(largest.data_ptr(), index.data_ptr()),
    )
    return largest, index


def _passes(x: Tensor) -> bool:
    """True if compiled kernels pass over rows like these."""
    compiled = x.dtype in (torch.float32, torch.bfloat16) and native.library() is not None
    return x.is_cpu and compiled


def weigh(log2: Tensor) -> Tensor:
    """Compute floor(2**(40 + x)), with a relative error of at most 4e-7 in the power.

    Args:
        log2: float32, contiguous; 0 at most, also -inf.

    Returns:
        int64 of the same shape; ONE for 0, 0 below -41.
    """
    if not (log2.is_cpu and native.library() is not None):
        return _weigh_with_torch(log2)
    weights = torch.empty_like(log2, dtype=torch.int64)
    native.kernels().weft_weigh(log2.data_ptr(), log2.numel(), weights.data_ptr())
    return weights


def _weigh_with_torch(log2: Tensor) -> Tensor:
    """Compute weights with torch's operators: float64 holds products of two float32 exactly."""
    x = log2.clamp(min=LOWEST)
    n = x.round()
    r = (x - n).double()
    y = torch.full_like(x, 1.3333558e-3)  # ln(2)^i / i!, from the fifth on down
    for coefficient in (9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        y = y.double().mul_(r).add_(np.float32(coefficient).item()).float()
    power = (n.int() + (127 + BITS) << 23).view(torch.float32)
    return y.mul_(power).long().masked_fill_(log2 < LOWEST, 0)


DRAW = np.dtype(
    [
        ("row", np.int64),
        ("temperature", np.float32),
        ("min_log_weight", np.float32),
        ("top_k", np.int64),
        ("tail", np.int64),
        ("u", np.int64),
        ("first_edit", np.int64),
        ("last_edit", np.int64),
        ("mask", np.int64),
    ]
)
"""How one row's token is drawn; csrc/weft.h."""


def draws(x: Tensor) -> bool:
    """True if `draw` takes these logits here."""
    return _passes(x) and x.stride(-1) == 1


def draw(
    x: Tensor,
    how: npt.NDArray[np.void],
    edits: tuple[Tensor, Tensor] | None = None,
    masks: Tensor | None = None,
) -> Tensor:
    """Choose tokens as models/torch/draw.py does; call it only if `draws` is true.

    Args:
        x: [R, N], N > 0; the drawn rows are finite or -inf.
        how: DRAW [D], contiguous. A temperature of 0 takes the first of the largest numbers.
        edits: columns int64 [E] and numbers float32 [E] that take the place of x's. A row has those
            from `first_edit` to before `last_edit`.
        masks: int32 [M, ceil(N / 32)]; numbers without a bit are -inf in rows with this `mask`.

    Returns:
        int64 [D].
    """
    tokens = torch.empty(len(how), dtype=torch.int64)
    columns, numbers = (None, None) if edits is None else (each.contiguous() for each in edits)
    masks = None if masks is None else masks.contiguous()
    native.kernels().weft_draw(
        *(x.data_ptr(), x.dtype == torch.float32, x.stride(0), x.shape[1]),
        *(how.ctypes.data, len(how)),
        *(None if each is None else each.data_ptr() for each in (columns, numbers, masks)),
        tokens.data_ptr(),
    )
    return tokens
