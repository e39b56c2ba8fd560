"""A mixture-of-experts MLP for the CPU: tokens sorted by expert, one packed matmul per expert.

1. The T x k (token, expert) pairs are sorted by expert, so that each expert's
   tokens are consecutive rows.
2. Each expert that has tokens runs `down(silu(gate(x)) * up(x))` on its rows;
   gate and up are one matrix. Experts without tokens are not touched: at small
   batches an MoE step costs the bytes of the experts it uses.
3. The results go back to token order and are summed with the router's weights,
   for each token in the router's order: the sum does not depend on which other
   tokens are in the batch.

Not handled: experts on other ranks (every id must be in [0, E)), biases and
activations other than SiLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import silu

from weft.kernels.cpu.linear import PackedLinear

Linear = Callable[[Tensor], Tensor]
"""[T, K] -> [T, N]."""


class PackedExperts:
    """The E expert MLPs of one layer, each SwiGLU (Shazeer 2020).

    The weights are taken one expert at a time, so that an iterable which reads them from a file
    never has more than one expert in hand.

    Args:
        gate: of each expert, bfloat16 or float32 [I, K]; or all of them, [E, I, K].
        up: of each expert, [I, K].
        down: of each expert, [K, I].
        pack: makes a layer of a weight.
    """

    def __init__(
        self,
        gate: Iterable[Tensor],
        up: Iterable[Tensor],
        down: Iterable[Tensor],
        pack: Callable[[Tensor], Linear] = PackedLinear,
    ) -> None:
        self._gate_up: list[Linear] = []
        self._down: list[Linear] = []
        for expert, (g, u, d) in enumerate(zip(gate, up, down, strict=True)):
            if u.shape != g.shape or d.shape != g.shape[::-1]:
                raise ValueError(
                    f"expert {expert} has gate {tuple(g.shape)}, up {tuple(u.shape)} and down "
                    f"{tuple(d.shape)}; they must be [I, K], [I, K] and [K, I]"
                )
            self._gate_up.append(pack(torch.cat((g, u))))
            self._down.append(pack(d))

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Run every token through its experts.

        Args:
            x: [T, K], the weights' dtype.
            expert_ids: int64 [T, k], each in [0, E).
            expert_weights: float32 [T, k], used as they are (the router normalises).

        Returns:
            [T, K], x's dtype; summed in float32.
        """
        tokens, k = expert_ids.shape
        flat_ids = expert_ids.reshape(-1)
        order = flat_ids.argsort(stable=True)
        counts = torch.bincount(flat_ids, minlength=len(self._down)).tolist()
        sorted_x = x.index_select(0, order // k)
        sorted_out = torch.empty_like(sorted_x)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                sorted_out[rows] = self._mlp(expert, sorted_x[rows])
                start += count
        place = torch.empty_like(order)
        place[order] = torch.arange(tokens * k)
        place = place.view(tokens, k)
        total = torch.zeros(tokens, x.shape[1], dtype=torch.float32)
        for choice in range(k):
            expert_out = sorted_out.index_select(0, place[:, choice])
            total.addcmul_(expert_out.float(), expert_weights[:, choice, None])
        return total.to(x.dtype)

    def _mlp(self, expert: int, x: Tensor) -> Tensor:
        """[n, K] -> [n, K] through one expert."""
        gate, up = self._gate_up[expert](x).chunk(2, dim=-1)
        return self._down[expert](silu(gate).mul_(up))
