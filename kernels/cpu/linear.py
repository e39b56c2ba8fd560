"""Dense layers for the CPU, with weights in the layout that the kernel needs.

`torch.nn.functional.linear` takes a row-major weight and reorders it, tile by tile, in every call.
A decode reads each weight once per step for a handful of rows, so the reordering costs up to half
of the time. Here a weight is reordered once, when the model is loaded. `make_linear` chooses a
class:

- NativeLinear: bfloat16, int8 or int4 weights with bfloat16 activations, where csrc/linear.cpp
  was compiled. The call includes a norm before the product, and a gate or residual after it.
  bfloat16 weights are compressed to 12 bits a number, without loss, so fewer bytes are read.
- PackedLinear: bfloat16 or float32 through oneDNN, with the two operators that torch.compile's
  freezing pass emits (torch/_inductor/fx_passes/mkldnn_fusion.py). At one row it runs at memory
  speed.
- Int8Linear and Int4Linear, in int8.py and int4.py.

Not handled: weights that change (the row-major weight is not kept) and gradients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import byref
from math import gcd
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, pad, rms_norm, silu

from weft.kernels.cpu import native

MAX_ESCAPES = 1 / 128
"""Maximum fraction of a weight's numbers that its compressed form lists separately."""

SAMPLE = 1 << 14
"""Number of elements sampled to find a weight's exponents."""

BLOCK_ELEMENTS = 1 << 21
"""Number of rounded weights converted at once: 4 MiB of bfloat16, which stay in cache."""

FORMATS = {
    torch.bfloat16: native.Format.PLAIN,
    torch.int8: native.Format.INT8,
    torch.uint8: native.Format.INT4,
}
"""How a weight of each dtype is packed."""


Weight = Tensor | Sequence[Tensor]
"""[N, K], or parts of it, stacked by row."""


def parts_of(weight: Weight) -> Sequence[Tensor]:
    """Return the weight's parts."""
    return (weight,) if isinstance(weight, Tensor) else weight


def whole(weight: Weight) -> Tensor:
    """Return the weight as one tensor."""
    parts = parts_of(weight)
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


class Norm:
    """A norm over the last dimension, in float32 inside.

    It is RMSNorm, x / rms(x) * weight (Zhang and Sennrich 2019). A centered one is layer norm: it
    subtracts the mean first, and adds a bias last (Ba et al. 2016).

    Args:
        weight: [K].
        eps: added to the mean square.
        is_centered: whether it is layer norm.
        bias: [K], of a layer norm, if it has one.
    """

    def __init__(
        self,
        weight: Tensor,
        eps: float,
        *,
        is_centered: bool = False,
        bias: Tensor | None = None,
    ) -> None:
        # Cloned, because a small view would keep the whole file mapped.
        self.weight = weight.clone()
        self.bias = None if bias is None else bias.clone()
        self.eps, self._is_centered = eps, is_centered

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, K]."""
        if self._is_centered:
            return layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight.shape, self.weight, self.eps)

    @property
    def native(self) -> native.Norm:
        """The norm's addresses, for bfloat16 weights; the norm must outlive them."""
        return native.Norm(
            weight=self.weight.data_ptr(),
            bias=native.address(self.bias),
            eps=self.eps,
            centered=self._is_centered,
        )


class Linear(Protocol):
    """A dense layer, together with the operations right before and after it."""

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Compute residual + f(norm(x) @ weight.T + bias): [T, K] -> [T, N], for any T from 0.

        f is the identity. In a gated layer, the weight is a gate's [N, K] above another [N, K], and
        f is silu(first half) * second half (SwiGLU, Shazeer 2020).
        """


class TorchLinear(ABC):
    """A Linear made from torch operators around a product."""

    def __init__(self, gated: bool) -> None:
        self._gated = gated

    @abstractmethod
    def product(self, x: Tensor) -> Tensor:
        """Compute x @ weight.T + bias."""

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        out = self.product(x if norm is None else norm(x))
        if self._gated:
            gate, up = out.chunk(2, dim=-1)
            out = silu(gate).mul_(up)
        return out if residual is None else residual + out


class PackedLinear(TorchLinear):
    """`x @ weight.T + bias` through oneDNN, with a weight that was reordered in advance.

    The blocked copy replaces the weight: once the caller drops its own reference, one copy is in
    memory. If oneDNN cannot pack (see `can_pack`), the weight is kept as it is, and
    `torch.nn.functional.linear` computes the same result.

    Args:
        weight: bfloat16 or float32 [N, K] (out, in), on the CPU; [2 N, K] if gated.
        bias: [N], the weight's dtype.
        gated: see `Linear`.

    Raises:
        ValueError: the shapes or dtypes do not match.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        check_linear(weight, bias, gated=gated)
        super().__init__(gated)
        self._bias = bias
        self._packed = can_pack(weight.dtype)
        # detach, because the operator refuses tensors with gradients.
        weight = weight.detach()
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous()) if self._packed else weight
        )

    def product(self, x: Tensor) -> Tensor:
        """[T, K] -> [T, N], in the weight's dtype, for any T from 0."""
        if self._packed:
            rows = len(x)
            out: Tensor = torch.ops.mkldnn._linear_pointwise(
                pad_rows(x), self._weight, self._bias, "none", [], ""
            )
            return out[:rows]
        return linear(x, self._weight, self._bias)


class NativeLinear:
    """A Linear that is one call to csrc/linear.cpp.

    Args:
        weight: bfloat16 [N, K], or with `scale` int8, or uint8 codes from int4.quantize;
            [2 N, K] if gated; not kept. It may come in parts, stacked by row, which are not copied
            together first.
        bias: bfloat16 [N], or [2 N] if gated.
        scale: [N] or [2 N]; a scale for each int8 row. Of int4 [N, groups] or [2 N, groups]; see
            `split_scales`.
        zeros: int8, shaped like int4's scales: what is subtracted from a group's integers.
        gated: see `Linear`.
        compress: compress a bfloat16 weight if nearly all its exponents are among fourteen
            neighbours (sixteen for negative numbers).

    Raises:
        ValueError: the shapes or dtypes do not match.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        scale: Tensor | None = None,
        zeros: Tensor | None = None,
        gated: bool = False,
        compress: bool = True,
    ) -> None:
        if scale is None:
            check_linear(weight, bias, gated=gated)
        parts = [part.contiguous() for part in parts_of(weight)]
        rows = torch.cat([_row_addresses(part) for part in parts])
        self.in_features = parts[0].shape[1]
        self.out_features = len(rows) // 2 if gated else len(rows)
        # The matrix holds addresses of these, so they must live as long as it does.
        self._bias = None if bias is None else _panels(bias, gated).flatten()
        halves = None
        if scale is not None and scale.dim() == 2:
            halves, scale = split_scales(scale)
        self._scale = None if scale is None else _panels(scale.float(), gated).flatten()
        self.matrix = native.Matrix(
            scale=native.address(self._scale),
            bias=native.address(self._bias),
            n=self.out_features,
            k=self.in_features,
            format=FORMATS[parts[0].dtype] if zeros is None else native.Format.INT4_ZEROS,
            gated=gated,
        )
        self._escapes: Tensor | None = None
        panels = -(-self.out_features // (native.COLUMNS // 2 if gated else native.COLUMNS))
        if not (compress and scale is None and self._compress(parts, rows, panels)):
            self._pack(rows, panels)
        self.format = native.Format(self.matrix.format)
        if halves is not None:
            # [panels, groups, COLUMNS]: before the codes of each group.
            groups = self._weight.view(panels, halves.shape[1], -1)
            start = 0
            for grid in (halves, zeros):
                if grid is not None:
                    columns = torch.stack([_panels(each, gated) for each in grid.T], dim=1)
                    numbers = columns.view(torch.uint8)
                    groups[..., start : start + numbers.shape[-1]] = numbers
                    start += numbers.shape[-1]
        self.matrix.weight = self._weight.data_ptr()
        self._call = native.kernels().weft_linear

    def _pack(
        self,
        rows: Tensor,
        panels: int,
        escapes: Tensor | None = None,
        start: Tensor | None = None,
    ) -> None:
        """Pack the rows, in the matrix's format; a compressed one also fills the last two."""
        bytes_each = native.Format(self.matrix.format).panel_bytes(self.in_features)
        self._weight = torch.empty(panels, bytes_each, dtype=torch.uint8)
        most = 0 if escapes is None else len(escapes)
        native.kernels().weft_pack(
            *(rows.data_ptr(), byref(self.matrix), self._weight.data_ptr()),
            *(native.address(escapes), most, native.address(start)),
        )

    def _compress(self, parts: Sequence[Tensor], rows: Tensor, panels: int) -> bool:
        """Pack the matrix compressed, if few enough numbers need more than 12 bits."""
        matrix = self.matrix
        matrix.top = _top_exponent(parts)
        matrix.format = native.Format.COMPRESSED
        most = int(len(rows) * self.in_features * MAX_ESCAPES)
        escapes = torch.empty(most, native.ESCAPE_BYTES, dtype=torch.uint8)
        start = torch.empty(panels + 1, dtype=torch.int64)
        self._pack(rows, panels, escapes, start)
        if int(start[-1]) > most:
            matrix.format = native.Format.PLAIN
            return False
        self._escapes, self._escape_start = escapes[: int(start[-1])].clone(), start
        matrix.escapes = self._escapes.data_ptr()
        matrix.escape_start = start.data_ptr()
        return True

    def __call__(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """[T, K] -> [T, N]; x and residual are bfloat16.

        Raises:
            ValueError: x or residual has another shape or dtype.
        """
        check_rows("x", x, (x.shape[0], self.in_features))
        if residual is not None:
            check_rows("residual", residual, (len(x), self.out_features))
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), self.out_features)
        rows = native_rows(x, norm)
        if residual is not None:
            residual = residual.contiguous()
        self._call(
            byref(self.matrix), byref(rows), len(x), native.address(residual), out.data_ptr()
        )
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weight."""
        return self._weight.nbytes + (0 if self._escapes is None else self._escapes.nbytes)

    @property
    def saved(self) -> int:
        """Bytes that compression saves."""
        if self.format is not native.Format.COMPRESSED:
            return 0
        rows = (2 if self.matrix.gated else 1) * self.out_features
        return rows * self.in_features * torch.bfloat16.itemsize - self.nbytes

    def weight_rows(self, index: Tensor) -> Tensor:
        """Look up rows in a bfloat16 weight without a gate: int [T], in [0, N) -> bfloat16 [T, K].

        Raises:
            IndexError: there is no such row.
            ValueError: the weight is rounded or gated.
        """
        if self.format not in (native.Format.PLAIN, native.Format.COMPRESSED) or self.matrix.gated:
            raise ValueError("rows are looked up in bfloat16 weights that are not gated")
        index = index.to(torch.int64).contiguous()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < self.out_features:
            raise IndexError(
                f"rows {int(index.min())} to {int(index.max())} of {self.out_features}"
            )
        out = torch.empty(len(index), self.in_features, dtype=torch.bfloat16)
        native.kernels().weft_weight_rows(
            *(byref(self.matrix), index.data_ptr(), len(index), out.data_ptr())
        )
        return out


def split_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's scales as float16, and the power of two that multiplies them.

    This is exact if a row's float16 or bfloat16 scales are within a factor of 2^28.

    Args:
        scale: [N, groups].

    Returns:
        float16 [N, groups], and float32 [N].
    """
    scale = scale.float()
    largest = scale.abs().nan_to_num(0, 0, 0).amax(dim=1)
    # The largest becomes 2^14 to 2^15: float16 is exact from 2^-14 on.
    power = (largest.frexp().exponent - 15).clamp(min=-126)
    return (scale * (-power).float().exp2()[:, None]).half(), power.float().exp2()


def _row_addresses(part: Tensor) -> Tensor:
    """Return the address of each row in a contiguous [N, K]: int64 [N]."""
    return torch.arange(len(part)) * (part.shape[1] * part.itemsize) + part.data_ptr()


def _top_exponent(parts: Sequence[Tensor]) -> int:
    """Return the highest of the most common neighbouring exponents (upper seven bits)."""
    stride = sum(part.numel() for part in parts) // SAMPLE + 1
    while gcd(stride, parts[0].shape[1]) > 1:  # otherwise it would not visit all columns
        stride += 1
    samples, start = [], 0
    for part in parts:  # the same numbers as in one whole tensor
        samples.append(part.view(torch.int16).flatten()[start::stride])
        start = (start - part.numel()) % stride
    sample = torch.cat(samples).to(torch.int32)
    counts = torch.bincount(sample >> 8 & 0x7F, minlength=128)
    counts[0] = 0  # zero has its own code
    windows = counts.unfold(0, native.EXPONENT_CODES, 1).sum(dim=1)
    return int(windows.argmax()) + native.EXPONENT_CODES - 1


def check_rows(name: str, rows: Tensor, shape: tuple[int, int]) -> None:
    """Check rows before passing on their address."""
    if rows.dtype != torch.bfloat16 or rows.shape != shape:
        raise ValueError(
            f"{name} is {rows.dtype} {tuple(rows.shape)}; it must be torch.bfloat16 {shape}"
        )


def native_rows(x: Tensor, norm: Norm | None) -> native.Rows:
    """Describe the rows of x [T, K], each contiguous; x must outlive the result."""
    if norm is None:
        return native.Rows(data=x.data_ptr(), stride=x.stride(0))
    return native.Rows(data=x.data_ptr(), stride=x.stride(0), norm=norm.native)


def _panels(numbers: Tensor, gated: bool) -> Tensor:
    """[N] -> [panels, COLUMNS], in a packed weight's column order, padded with zeros."""
    halves = numbers.view(2 if gated else 1, -1)
    width = native.COLUMNS // len(halves)
    halves = pad(halves, (0, -halves.shape[1] % width))
    return halves.view(len(halves), -1, width).transpose(0, 1).flatten(1)


def check_linear(weight: Weight, bias: Tensor | None, *, gated: bool = False) -> None:
    """Check that weight is [N, K] (N even if gated), and bias is [N] in its dtype.

    Raises:
        ValueError: they are not.
    """
    first, *others = parts_of(weight)
    for part in (first, *others):
        if part.dim() != 2 or part.shape[1] != first.shape[1] or part.dtype != first.dtype:
            of = f" of {first.dtype} like a part of {tuple(first.shape)}" if others else ""
            raise ValueError(
                f"weight has shape {tuple(part.shape)} and {part.dtype}; it must be [N, K]{of}"
            )
    rows = len(first) + sum(map(len, others))
    if gated and rows % 2:
        raise ValueError(f"weight has {rows} rows; a gated layer has an even number")
    if bias is not None and (bias.shape != (rows,) or bias.dtype != first.dtype):
        raise ValueError(
            f"bias is {bias.dtype} {tuple(bias.shape)}; it must be "
            f"{first.dtype} {(rows,)} like the weight"
        )


def make_linear(
    weight: Weight,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    compress: bool = True,
    with_rows: bool = False,
) -> Linear:
    """Make the fastest layer available here for this weight.

    See NativeLinear for the arguments; other layers ignore `compress`. With `with_rows`, a layer
    that can return the weight's rows comes first: it holds a tied embedding once.
    """
    check_linear(weight, bias, gated=gated)
    # With matrix units (AMX), oneDNN's products are far faster than vector instructions.
    fastest = with_rows or not torch.cpu._is_amx_tile_supported()
    if fastest and native.supports(parts_of(weight)[0].dtype):
        return NativeLinear(weight, bias, gated=gated, compress=compress)
    return PackedLinear(whole(weight), bias, gated=gated)


def pad_rows(x: Tensor) -> Tensor:
    """Pad [T, K] with rows of zeros, up to `padded` rows."""
    missing = padded(len(x)) - len(x)
    return pad(x, (0, 0, 0, missing)) if missing else x


def padded(rows: int) -> int:
    """Round up to one of eight row counts in each octave.

    oneDNN compiles code for each row count and each weight shape, and never frees it: 0.8 MB each,
    whatever the capacity of its primitive cache.
    """
    return rows + -rows % (1 << max(0, rows.bit_length() - 4))


def matmul_transposed(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [M, K] @ b [N, K].T -> [M, N] through oneDNN, for matrices that are used once.

    torch multiplies float32 matrices with its BLAS. If that is MKL and the CPU is not Intel's,
    oneDNN is up to twice as fast from about 64 rows on.
    """
    if not can_pack(a.dtype):
        return a @ b.T
    rows = len(a)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(pad_rows(a), b, None, "none", [], "")
    return out[:rows]


def can_pack(dtype: torch.dtype) -> bool:
    """Tell whether this build of torch on this CPU packs weights of `dtype`.

    Float32 needs a torch with oneDNN. bfloat16 also needs a CPU with vector instructions that
    oneDNN supports (AVX-512, or Arm with bf16).
    """
    mkldnn = torch.backends.mkldnn
    if not mkldnn.is_available() or not mkldnn.enabled:  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32
