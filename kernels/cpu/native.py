"""The kernels in csrc/, written in C++ for x86-64 CPUs.

Three costs bound a step on a CPU. Reading the weights: oneDNN's layers at 16 rows take a third
longer than memory does. Passing over small tensors once per operator. And calling dozens of
operators per layer. The kernels answer each: products that compute while the next weights arrive;
norms, gates and residuals inside them; and attention that reads pages in place.

setup builds csrc/ into two plain shared libraries, which are optional. One is for CPUs with AVX-512
and its bfloat16 products. The other is for CPUs with AVX2, where csrc/portable.h computes these
instructions. Without a compiler, or on another CPU, `library` returns None and callers use torch,
which computes the same results. The library is
bound with ctypes and contains no torch or Python. Its OpenMP calls resolve to the runtime that
torch has loaded, so there is one thread pool.
"""

from __future__ import annotations

import ctypes
import sysconfig
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

BUILD = "_native" if torch.cpu._is_avx512_bf16_supported() else "_native_avx2"
"""The library's name for this CPU."""

FILE = Path(__file__).with_name(f"{BUILD}{sysconfig.get_config_var('EXT_SUFFIX')}")
"""The library, if it was built."""

VERSION = 6
"""The version both sides must have; csrc/weft.h."""

COLUMNS = 32
"""Columns per panel in packed weights; csrc/vector.h."""

GROUP, GROUP_SCALES, GROUP_ZEROS = 32, 2 * COLUMNS, COLUMNS
"""k's in a group of an int4 weight, and bytes in a panel of its scales and its zero points;
csrc/vector.h.
"""

MAX_HEAD_DIM, MAX_GROUP = 256, 72
"""Limits of the attention kernel: head size, and query heads per KV head."""


class Format(IntEnum):
    """Number formats of packed weights; csrc/weft.h."""

    PLAIN = 0
    INT8 = 1
    COMPRESSED = 2
    INT4 = 3
    INT4_ZEROS = 4

    def panel_bytes(self, k: int) -> int:
        """Bytes of a panel of k numbers for each column; csrc/vector.h."""
        if self in (Format.INT4, Format.INT4_ZEROS):
            zeros = GROUP_ZEROS if self is Format.INT4_ZEROS else 0
            return -(-k // GROUP) * (GROUP * COLUMNS // 2 + GROUP_SCALES + zeros)
        return -(-k // 2) * COLUMNS * (4, 2, 3)[self]


ESCAPE_BYTES = 8
"""Bytes for each number listed beside a compressed weight; csrc/weft.h."""

EXPONENT_CODES = 7
"""Exponents (upper seven bits) with a code in a compressed weight; csrc/vector.h."""


class Matrix(Structure):
    """A packed weight; csrc/weft.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("escapes", c_void_p),
        ("escape_start", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("format", c_int32),
        ("top", c_int32),
        ("gated", c_int32),
    )


class Norm(Structure):
    """A norm of a product's input; csrc/weft.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("eps", c_float),
        ("centered", c_int32),
    )


class Rows(Structure):
    """A product's input rows; csrc/weft.h."""

    _fields_ = (
        ("data", c_void_p),
        ("stride", c_int64),
        ("index", c_void_p),
        ("norm", Norm),
    )


class RopeStep(Structure):
    """Arguments of weft_rope; csrc/weft.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("page", c_void_p),
        ("slot", c_void_p),
        ("tokens", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("block_size", c_int64),
        ("eps", c_float),
    )


class AttentionStep(Structure):
    """Arguments of weft_attention; csrc/weft.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_table", c_void_p),
        ("requests", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("out", c_void_p),
    )


class Batch(Structure):
    """A step's tokens; csrc/weft.h."""

    _fields_ = (
        ("page", c_void_p),
        ("slot", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("block_table", c_void_p),
        ("tokens", c_int64),
        ("requests", c_int64),
        ("table_width", c_int64),
        ("block_size", c_int64),
    )


class AttentionLayer(Structure):
    """The attention half of a layer; csrc/weft.h."""

    _fields_ = (
        ("qkv", POINTER(Matrix)),
        ("o", POINTER(Matrix)),
        ("norm", Norm),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("dim", c_int64),
        ("window", c_int64),
        ("head_eps", c_float),
        ("scale", c_float),
    )


class MlpLayer(Structure):
    """The MLP half of a layer; csrc/weft.h."""

    _fields_ = (
        ("gate_up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("norm", Norm),
        ("parallel", c_int32),
    )


_SIGNATURES = {
    "weft_pack": (c_void_p, POINTER(Matrix), c_void_p, c_void_p, c_int64, c_void_p),
    "weft_weight_rows": (POINTER(Matrix), c_void_p, c_int64, c_void_p),
    "weft_linear": (POINTER(Matrix), POINTER(Rows), c_int64, c_void_p, c_void_p),
    "weft_route": (c_void_p, c_int64, c_int64, c_int64, c_int, c_void_p, c_void_p),
    "weft_experts": (
        *(POINTER(Matrix), POINTER(Matrix), c_int64, POINTER(Rows), c_int64, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "weft_rope": (POINTER(RopeStep),),
    "weft_attention": (POINTER(AttentionStep),),
    "weft_attention_layer": (
        *(POINTER(AttentionLayer), POINTER(Batch), c_void_p, c_void_p, c_void_p),
        *(c_void_p, c_void_p, c_void_p),
    ),
    "weft_mlp": (POINTER(MlpLayer), c_void_p, c_void_p, c_int64, c_void_p),
    "weft_layers": (
        *(POINTER(AttentionLayer), POINTER(MlpLayer), c_int64, POINTER(Batch)),
        *(c_void_p, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_void_p), c_void_p),
    ),
    "weft_argmax": (c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p),
    "weft_draw": (
        *(c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64),
        *(c_void_p, c_void_p, c_void_p, c_void_p),
    ),
    "weft_weigh": (c_void_p, c_int64, c_void_p),
}


@cache
def library() -> ctypes.CDLL | None:
    """Load the compiled kernels; None if they were not built or this CPU cannot run them.

    Raises:
        RuntimeError: they were built from other sources.
    """
    if not torch.cpu._is_avx2_supported():
        return None
    try:
        loaded = ctypes.CDLL(str(FILE))
    except OSError:
        return None  # the library is missing, or this process has no GCC OpenMP
    built = loaded.weft_version() if hasattr(loaded, "weft_version") else 0
    missing = [name for name in _SIGNATURES if not hasattr(loaded, name)]
    if built != VERSION or missing:
        lacks = f", without {', '.join(missing)}" if missing else ""
        raise RuntimeError(
            f"{FILE} was built from other sources: it has version {built}{lacks}, and must have "
            f"{VERSION}. Install weft again, with `pip install -e .` in a checkout"
        )
    for name, arguments in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def supports(dtype: torch.dtype) -> bool:
    """True if compiled kernels for this dtype are available here."""
    return dtype == torch.bfloat16 and library() is not None


def takes_heads(heads: int, kv_heads: int, head_dim: int) -> bool:
    """True if the attention kernels support layers with this shape."""
    return head_dim % 2 == 0 and head_dim <= MAX_HEAD_DIM and heads // kv_heads <= MAX_GROUP


def kernels() -> ctypes.CDLL:
    """Return the library; call it only if `supports` is true."""
    loaded = library()
    if loaded is None:
        raise RuntimeError("the compiled CPU kernels are not available; ask native.supports first")
    return loaded


def address(tensor: Tensor | None) -> int | None:
    """Return a tensor's address; null for None."""
    return None if tensor is None else tensor.data_ptr()
