"""A mixture-of-experts MLP for the CPU: tokens sorted by expert, one packed matmul per expert.

1. The router's logits give each token its k best experts (`route`).
2. The T x k (token, expert) pairs are sorted by expert, so that each expert's tokens are
   consecutive rows.
3. Each expert with tokens runs `down(silu(gate(x)) * up(x))` on its rows; gate and up are one
   matrix. Experts without tokens are not touched: at small batches, an MoE step costs only the
   bytes of its active experts.
4. The results return to token order and are summed with the router's weights, for each token in the
   router's order. The sum therefore does not depend on other tokens in the batch.

With compiled kernels, steps 2 to 4 are one call to csrc/linear.cpp, whose threads share the
panels of all experts. Elsewhere, experts are torch layers that run in turn.

Experts on other ranks contribute nothing here.

Not handled: biases, and activations other than SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import Array, byref
from typing import Literal, Protocol

import torch
from torch import Tensor

from weft.kernels.cpu import native
from weft.kernels.cpu.linear import (
    Linear,
    NativeLinear,
    Norm,
    Weight,
    make_linear,
    native_rows,
)
from weft.kernels.packed import PackedMatrix


class MakeLinear(Protocol):
    """linear.make_linear, or another function that makes a layer."""

    def __call__(
        self, weight: Weight, bias: Tensor | None = None, *, gated: bool = False
    ) -> Linear:
        """Make a layer from a weight [N, K]."""


def route(
    logits: Tensor,
    top_k: int,
    *,
    normalize: bool,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts and their weights (Shazeer et al. 2017).

    With groups, experts are chosen only from the `top_groups` best groups. A group's score is its
    best expert's or, with a bias, the sum of its two best (DeepSeek-V3, arXiv:2412.19437, section
    2.1.2).

    Args:
        logits: [T, E], bfloat16 or float32.
        top_k: experts per token, from 1 to E.
        normalize: scale a token's weights so that they sum to 1.
        scoring: how logits become scores: softmax over all experts, or a sigmoid each.
        bias: float32 [E], added to the scores for the choice, but not for the weights.
        groups: number of groups, each with E / groups consecutive experts.
        top_groups: how many groups experts are chosen from.
        scale: multiplies the weights after they are normalised.

    Returns:
        ids int32 [T, top_k], best first, and their weights, float32 [T, top_k].
    """
    tokens, experts = logits.shape
    plain = scoring == "softmax" and bias is None and groups == 1 and scale == 1.0
    if plain and native.supports(logits.dtype):
        logits = logits.contiguous()
        ids = torch.empty(tokens, top_k, dtype=torch.int32)
        weights = torch.empty(tokens, top_k)
        native.kernels().weft_route(
            *(logits.data_ptr(), tokens, experts, top_k, normalize),
            *(ids.data_ptr(), weights.data_ptr()),
        )
        return ids, weights
    wide = logits.float()
    scores = wide.softmax(dim=-1) if scoring == "softmax" else wide.sigmoid()
    choice = scores if bias is None else scores + bias
    if top_groups < groups:
        by_group = choice.view(tokens, groups, experts // groups)
        best = by_group.topk(min(2, by_group.shape[-1]) if bias is not None else 1, dim=-1).values
        kept = best.sum(dim=-1).topk(top_groups, dim=-1).indices
        left_out = torch.ones(tokens, groups, dtype=torch.bool).scatter_(1, kept, value=False)
        choice = by_group.masked_fill(left_out[..., None], -torch.inf).view(tokens, experts)
    chosen = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, chosen)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return chosen.to(torch.int32), weights * scale


class PackedExperts:
    """E expert MLPs in one layer, each SwiGLU (Shazeer 2020).

    Weights are read one expert at a time, so an iterator over a file never holds more than one
    expert.

    Args:
        gate: each expert's [I, K]; or all of them, [E, I, K]. Whatever `make` takes: bfloat16,
            float32, or quantised.
        up: each expert's [I, K].
        down: each expert's [K, I].
        make: makes a layer from a weight.
        first: index of the first expert among all experts in the layer.
    """

    def __init__(
        self,
        gate: Iterable[Tensor | PackedMatrix],
        up: Iterable[Tensor | PackedMatrix],
        down: Iterable[Tensor | PackedMatrix],
        make: Callable[..., Linear] = make_linear,
        *,
        first: int = 0,
    ) -> None:
        self._first = first
        self._gate_up: list[Linear] = []
        self._down: list[Linear] = []
        for expert, (g, u, d) in enumerate(zip(gate, up, down, strict=True)):
            if u.shape != g.shape or d.shape != g.shape[::-1]:
                raise ValueError(
                    f"expert {expert} has gate {tuple(g.shape)}, up {tuple(u.shape)} and down "
                    f"{tuple(d.shape)}; they must be [I, K], [I, K] and [K, I]"
                )
            self._gate_up.append(make((g, u), gated=True))
            self._down.append(make(d))
        self._native = _matrices(self._gate_up), _matrices(self._down)

    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Run every token through its experts.

        Args:
            x: [T, K], the weights' dtype.
            expert_ids: int [T, k]; ids outside [first, first + E) are skipped.
            expert_weights: float32 [T, k], used as they are (the router normalises).
            norm: applied first.
            residual: [T, K], added to the result.

        Returns:
            [T, K], x's dtype; summed in float32.
        """
        gate_up, down = self._native
        if gate_up is not None and down is not None:
            x = x.contiguous()
            out = torch.empty_like(x)
            ids = (expert_ids - self._first).to(torch.int32).contiguous()
            weights = expert_weights.contiguous()
            if residual is not None:
                residual = residual.contiguous()
            rows = native_rows(x, norm)
            native.kernels().weft_experts(
                *(gate_up, down, len(gate_up), byref(rows), *ids.shape),
                *(ids.data_ptr(), weights.data_ptr(), native.address(residual), out.data_ptr()),
            )
            return out
        ids = expert_ids - self._first
        out = self._one_by_one(x if norm is None else norm(x), ids, expert_weights)
        return out if residual is None else residual + out

    def _one_by_one(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        tokens, k = expert_ids.shape
        elsewhere = (expert_ids < 0) | (expert_ids >= len(self._down))
        flat_ids = expert_ids.masked_fill(elsewhere, len(self._down)).reshape(-1)
        order = flat_ids.argsort(stable=True)
        counts = torch.bincount(flat_ids, minlength=len(self._down) + 1).tolist()[:-1]
        sorted_x = x.index_select(0, order // k)
        sorted_out = torch.zeros_like(sorted_x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                sorted_out[rows] = self._down[expert](self._gate_up[expert](sorted_x[rows]))
                start += count
        row_of_pair = torch.empty_like(order)
        row_of_pair[order] = torch.arange(tokens * k)
        row_of_pair = row_of_pair.view(tokens, k)
        total = torch.zeros(tokens, x.shape[1], dtype=torch.float32)
        for choice in range(k):
            expert_out = sorted_out.index_select(0, row_of_pair[:, choice])
            total.addcmul_(expert_out.float(), expert_weights[:, choice, None])
        return total.to(x.dtype)


def _matrices(layers: list[Linear]) -> Array[native.Matrix] | None:
    """Return the layers' matrices as one C array, if the kernel runs all of them."""
    compiled = [layer.matrix for layer in layers if isinstance(layer, NativeLinear)]
    if not compiled or len(compiled) != len(layers):
        return None
    return (native.Matrix * len(compiled))(*compiled)
