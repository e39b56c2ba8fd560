"""What a layer on Triton kernels keeps on its device: matrices and experts, read and laid out.

Weights stay in the checkpoint's layout, [N, K]: kernels take the transpose as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from weft.kernels.gpu.experts.dispatch import LowLatencyWorkspace, moe_combine, moe_dispatch
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.experts.routing import route, sort_by_expert
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.models.spec.layout import Layout
from weft.models.spec.spec import LinearSpec, MoeSpec, WeightSpec


class Source(Protocol):
    """Where a rank's part of weights comes from: `weights.Weights`."""

    @property
    def layout(self) -> Layout:
        """Whose parts these are."""

    def read(self, weight: WeightSpec) -> Tensor:
        """This rank's part of a weight that is one tensor."""

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """Those of the tensors of a weight (one per expert) that are this rank's."""

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Which part of a weight that is, by axis."""


class Load:
    """Reads this rank's part of weights, in the type to compute in."""

    def __init__(self, weights: Source, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self.parts = weights.parts

    def __call__(self, weight: WeightSpec) -> Tensor:
        return self._weights.read(weight).to(self._device, self._dtype, copy=True)

    def linear(self, *specs: LinearSpec) -> Linear:
        """Of several projections of one input, with their biases, if they have any."""
        biases = [self(spec.bias) for spec in specs if spec.bias is not None]
        return Linear([self(spec.weight) for spec in specs], biases)

    def stack(self, weight: WeightSpec) -> Tensor:
        """Of a weight that has a tensor per expert, those of this rank."""
        tensors = (x.to(self._device, self._dtype) for x in self._weights.read_each(weight))
        return torch.stack(list(tensors))


class Linear:
    """Some columns or rows of one or several matrices: w [K, N] each, as products take them."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        self.weights = [weight.contiguous().mT for weight in weights]
        self.bias = torch.cat(list(biases)) if biases else None


class Experts:
    """This rank's experts, or its part of all."""

    def __init__(self, spec: MoeSpec, load: Load) -> None:
        self._router = load(spec.router).mT
        self._first = load.parts(spec.gate)[0].start
        self._gate_up = [load.stack(spec.gate).mT, load.stack(spec.up).mT]
        self._down = load.stack(spec.down).mT
        self._top_k = spec.top_k
        self._normalize = spec.normalize

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], to be summed over the ranks."""
        ids, weights = self._route(x)
        places = sort_by_expert(ids - self._first, len(self._down))
        out = self._run(x[places.order // self._top_k], places.offsets)
        own = out[places.inverse.clamp(min=0)].float()  # [T, k, hidden]
        own.masked_fill_((places.inverse < 0)[..., None], 0)  # of other ranks
        return (own * weights[..., None]).sum(1).to(x.dtype)

    def exchange(
        self, x: Tensor, most: int, workspace: LowLatencyWorkspace, count: Callable[[], None]
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], of the experts of all ranks. Collective.

        Args:
            x: of this rank; T may be 0.
            most: tokens of a rank.
            workspace: of the experts' even placement.
            count: called before each exchange.
        """
        ids, weights = self._route(x)
        mixed = []
        for start in range(0, most, workspace.max_tokens):
            some = slice(start, start + workspace.max_tokens)
            count()
            sent = moe_dispatch(x[some], ids[some], workspace)
            # There is room for all that could come; about as many come as go.
            out = self._run(sent.rows, sent.offsets, ids[some].numel())
            count()
            mixed.append(moe_combine(out, weights[some], sent, workspace))
        return torch.cat(mixed) if mixed else x

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, int32 [T, k], and their weights, float32 [T, k]."""
        return route(matmul(x, self._router), self._top_k, normalize=self._normalize)

    def _run(self, rows: Tensor, offsets: Tensor, expected: int = 0) -> Tensor:
        """[R, hidden], in the order of the experts here, to the same; `expected` rows, or all."""
        silu = Epilogue(silu_multiply=True)
        inner = grouped_matmul(rows, self._gate_up, offsets, epilogue=silu, expected=expected)
        return grouped_matmul(inner, self._down, offsets, expected=expected)
