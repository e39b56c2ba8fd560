"""A dense layer for the CPU whose weight is stored in oneDNN's blocked layout.

`torch.nn.functional.linear` takes a row-major weight and lets oneDNN reorder
it, tile by tile, in every call. For decoding, where each weight is read once
per step and used for a handful of rows, that reorder costs up to half of the
time. Here the weight is reordered once, when the model is loaded, with the two
operators that torch.compile's freezing pass emits
(torch/_inductor/fx_passes/mkldnn_fusion.py). At one row it then runs at the
speed of memory.

Not handled: weights that change (the row-major weight is not kept) and
gradients. Quantised weights are in int8.py.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear


class PackedLinear:
    """`x @ weight.T + bias` with a weight that was reordered ahead of time.

    The blocked copy replaces the weight: once the caller drops its own reference there is one
    copy in memory. Where oneDNN cannot pack (see `can_pack`), the weight is kept as it is and
    `torch.nn.functional.linear` computes the same thing.

    Args:
        weight: bfloat16 or float32 [N, K] (out, in), on the CPU.
        bias: [N], the weight's dtype.

    Raises:
        ValueError: the shapes or dtypes do not go together.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        check_linear(weight, bias)
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        # detach: the operator refuses tensors that require gradients.
        weight = weight.detach()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], in the weight's dtype, for any T from 0."""
        if self._packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return out
        return linear(x, self._weight, self._bias)


def check_linear(weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless weight is [N, K], and bias [N] of the same dtype."""
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; it must be [N, K]")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; it must be "
            f"{weight.dtype} {tuple(weight.shape[:1])} like the weight"
        )


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] @ b [N, K].T -> [M, N] through oneDNN, for matrices that are used once.

    torch multiplies float32 matrices with its BLAS; where that is MKL and the CPU is not
    Intel's, oneDNN is up to twice as fast from some 64 rows on.
    """
    if not can_pack(a.dtype):
        return a @ b.T
    out: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return out


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this CPU packs weights of `dtype`.

    Float32 needs a torch built with oneDNN; bfloat16 also needs a CPU with vector instructions
    that oneDNN has kernels for (AVX-512, or Arm with bf16).
    """
    mkldnn = torch.backends.mkldnn
    if not mkldnn.is_available() or not mkldnn.enabled:  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
