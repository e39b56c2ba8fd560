"""A decoder's attention, MLP, or several whole layers, each as one call to csrc/layer.cpp.

The library runs the same kernels as linear, rope and attention, in the same order, so results are
identical. The calls save the Python code between kernels. For one user, one call per half layer
saves a tenth of a decode, and one call for all layers saves half as much again.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_void_p, pointer

import torch
from torch import Tensor

from weft.kernels.cpu import native
from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.linear import NativeLinear, Norm, check_rows
from weft.kernels.cpu.rope import HeadNorms, Rotation


class NativeAttention:
    """x + o(attention(rope(qkv(norm(x))))), over the paged cache.

    Args:
        qkv: [T, hidden] -> [T, (H + 2 Hk) * D]: queries, keys, values.
        o: [T, H * D] -> [T, hidden].
        norm: applied first.
        head_norms: norms for queries and keys, or None.
        heads, kv_heads, head_dim: H, Hk, D; `native.takes_heads` must hold.
        scale: multiplies the scores.
        sliding_window: see attention.paged_attention.
    """

    def __init__(
        self,
        qkv: NativeLinear,
        o: NativeLinear,
        norm: Norm,
        head_norms: HeadNorms | None,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        sliding_window: int | None,
    ) -> None:
        # The C struct holds addresses of these, so they must live as long as it does.
        self._kept = qkv, o, norm, head_norms
        self.hidden = qkv.in_features
        self.layer = native.AttentionLayer(
            qkv=pointer(qkv.matrix),
            o=pointer(o.matrix),
            norm=norm.native,
            q_norm=None if head_norms is None else head_norms.q.data_ptr(),
            k_norm=None if head_norms is None else head_norms.k.data_ptr(),
            heads=heads,
            kv_heads=kv_heads,
            dim=head_dim,
            window=sliding_window or 0,
            head_eps=0.0 if head_norms is None else head_norms.eps,
            scale=scale,
        )
        self._call = native.kernels().weft_attention_layer

    def __call__(
        self, x: Tensor, rotation: Rotation, keys: Tensor, values: Tensor, plan: AttentionPlan
    ) -> Tensor:
        """bfloat16 [T, hidden] -> [T, hidden]; keys and values as in rope.rotate_into_cache."""
        x = x.contiguous()
        check_rows("x", x, (len(plan.slots), self.hidden))
        out = torch.empty_like(x)
        self._call(
            byref(self.layer),
            byref(plan.batch),
            *(x.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr()),
            *(keys.data_ptr(), values.data_ptr(), out.data_ptr()),
        )
        return out


class NativeMlp:
    """residual + down(gate_up(norm(x))), where gate_up is gated.

    With `is_parallel`, x is the attention's input; else both are the attention's result.
    """

    def __init__(
        self, gate_up: NativeLinear, down: NativeLinear, norm: Norm, *, is_parallel: bool = False
    ) -> None:
        self._kept = gate_up, down, norm
        self._hidden = gate_up.in_features
        self.layer = native.MlpLayer(
            gate_up=pointer(gate_up.matrix),
            down=pointer(down.matrix),
            norm=norm.native,
            parallel=is_parallel,
        )
        self._call = native.kernels().weft_mlp

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        """bfloat16 [T, hidden] each -> [T, hidden]."""
        x, residual = x.contiguous(), residual.contiguous()
        check_rows("x", x, (len(x), self._hidden))
        check_rows("residual", residual, (len(x), self._hidden))
        out = torch.empty_like(x)
        self._call(byref(self.layer), x.data_ptr(), residual.data_ptr(), len(x), out.data_ptr())
        return out


class NativeLayers:
    """A sequence of layers, each `attention`, then `mlp`, over the paged cache.

    Args:
        layers: at least one.
    """

    def __init__(self, layers: Sequence[tuple[NativeAttention, NativeMlp]]) -> None:
        self._kept = layers  # they own the memory that the copied structs point to
        self._hidden = layers[0][0].hidden
        self._attention = (native.AttentionLayer * len(layers))(*(a.layer for a, _ in layers))
        self._mlp = (native.MlpLayer * len(layers))(*(mlp.layer for _, mlp in layers))
        self._addresses = c_void_p * len(layers)
        self._call = native.kernels().weft_layers

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: Sequence[tuple[Tensor, Tensor]],
        plan: AttentionPlan,
    ) -> Tensor:
        """bfloat16 [T, hidden] -> [T, hidden]; `cache` holds each layer's keys and values."""
        x = x.contiguous()
        check_rows("x", x, (len(plan.slots), self._hidden))
        if len(cache) != len(self._kept):
            raise ValueError(f"cache has {len(cache)} layers; it must have {len(self._kept)}")
        out = torch.empty_like(x)
        self._call(
            *(self._attention, self._mlp, len(cache), byref(plan.batch)),
            *(x.data_ptr(), rotation.cos.data_ptr(), rotation.sin.data_ptr()),
            self._addresses(*(keys.data_ptr() for keys, _ in cache)),
            self._addresses(*(values.data_ptr() for _, values in cache)),
            out.data_ptr(),
        )
        return out
