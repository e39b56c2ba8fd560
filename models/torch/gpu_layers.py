"""Layer parts on Triton kernels: linear layers and experts, loaded onto the device.

Weights keep the checkpoint's layout, [N, K]; products read the transpose without copying.

Quantised weights stay as they are (kernels/packed.py). A product dequantises them in registers. For
many rows, and for an op with an exchange, they are dequantised to a buffer first. Either way, the
numbers are those of dequantising at load, rounded to the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import linear

from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    GatherGroupsWorkspace,
    all_gather_grouped_matmul,
    make_plan,
)
from weft.kernels.gpu.experts.combine import combine
from weft.kernels.gpu.experts.dispatch import LowLatencyWorkspace, moe_combine, moe_dispatch
from weft.kernels.gpu.experts.dispatch_two_level import (
    TwoLevelExpertWorkspace,
    moe_combine_two_level,
    moe_dispatch_two_level,
)
from weft.kernels.gpu.experts.expert_tokens import Arrived
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.experts.grouped_matmul_reduce_scatter import (
    ReduceGroupsWorkspace,
    grouped_matmul_reduce_scatter,
)
from weft.kernels.gpu.experts.placement import Tables
from weft.kernels.gpu.experts.routing import route, sort_by_expert
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.operands import Operand
from weft.kernels.gpu.matmul.packed_tile import dequantize
from weft.kernels.gpu.rowwise.activation import silu_multiply
from weft.kernels.gpu.rowwise.norm import Normed, layer_norm, rms_norm
from weft.kernels.gpu.rowwise.rope import CacheScales
from weft.kernels.packed import PackedForm, PackedMatrix, side_by_side, stacked
from weft.models.spec.layout import Layout
from weft.models.spec.spec import (
    AttentionSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    WeightSpec,
)
from weft.models.torch.staging import Staging

FEW_ROWS = 128
"""Maximum number of rows for which a product dequantises in registers. With more rows, torch's
faster product pays for writing the dequantised matrix. Not measured yet."""

DispatchWorkspace = LowLatencyWorkspace | TwoLevelExpertWorkspace
"""With ranks beyond NVLink, the second."""


class WeightSource(Protocol):
    """Source for a rank's part in the weights: `checkpoint.weights.Weights`."""

    @property
    def layout(self) -> Layout:
        """The layout that selects the parts."""

    def read(self, weight: WeightSpec) -> Tensor:
        """Read this rank's part of a single-tensor weight."""

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """Yield this rank's tensors for a weight with one tensor per expert."""

    def packed_form(self, weight: WeightSpec) -> PackedForm | None:
        """Return the form in which kernels can read a quantised weight; else None."""

    def read_packed(self, weight: WeightSpec) -> Iterator[PackedMatrix]:
        """Yield a quantised weight's matrices as they are stored, one for each expert."""

    def cache_scale(self, weight: WeightSpec, which: Literal["k", "v"]) -> float:
        """Return the scale of an fp8 cache for what this projection makes: keys or values."""

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Return the part that is read, one slice per axis."""


class Norm(NamedTuple):
    """A norm over the residual stream; see NormSpec."""

    weight: Tensor
    eps: float
    is_centered: bool
    bias: Tensor | None

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Normed:
        """Normalize x, or x + residual, [T, hidden] each."""
        if self.is_centered:
            return layer_norm(x, self.weight, self.eps, bias=self.bias, residual=residual)
        return rms_norm(x, self.weight, self.eps, residual=residual)


class Buffer:
    """Memory for dequantised weights, which all products share in turn.

    Args:
        dtype, device: of the numbers.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._size = 0
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def reserve(self, *matrices: PackedMatrix) -> None:
        """Have room for matrices, once `allocate` is called."""
        self._size = max(self._size, sum(math.prod(each.shape) for each in matrices))

    def allocate(self) -> None:
        """Take the memory. Steps use it, and CUDA graphs must find it at one address."""
        self._memory = self._memory.new_empty(self._size)

    def dequantize(self, *matrices: PackedMatrix) -> list[Tensor]:
        """Write matrices side by side. The next call overwrites them."""
        sizes = [math.prod(each.shape) for each in matrices]
        places = torch.split(self._memory[: sum(sizes)], sizes)
        return [
            dequantize(each, place.view(each.shape))
            for each, place in zip(matrices, places, strict=True)
        ]


class WeightLoader:
    """Reads this rank's part of weights in the compute dtype, or as they are stored.

    Args:
        weights: the source.
        dtype, device: of loaded weights.
        sharded: products of experts may need plain weights: see `Experts.run_sharded`.

    Attributes:
        buffer: memory for dequantised weights; to be allocated once all are loaded.
    """

    def __init__(
        self,
        weights: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sharded: bool = False,
    ) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device
        self._staging = Staging(device) if device.type == "cuda" else None
        self._sharded = sharded
        self.parts = weights.parts
        self.buffer = Buffer(dtype, device)

    def __call__(self, weight: WeightSpec) -> Tensor:
        dtype = torch.float32 if weight.in_float32 else self._dtype
        return self._copied(self._weights.read(weight).to(dtype))

    def linear(self, *specs: LinearSpec) -> Linear:
        """Load projections with a common input, and their biases, as one layer."""
        biases = [self(spec.bias) for spec in specs if spec.bias is not None]
        weights = [spec.weight for spec in specs]
        forms = [self._weights.packed_form(weight) for weight in weights]
        if None not in forms and len({(f[0], f[1][1], f[2]) for f in forms if f}) == 1:
            matrices = [self._packed(weight)[0] for weight in weights]
            return PackedLinear(matrices, biases, self.buffer)
        return PlainLinear([self(weight) for weight in weights], biases)

    def norm(self, spec: NormSpec) -> Norm:
        """Load a norm over the residual stream."""
        bias = None if spec.bias is None else self(spec.bias)
        return Norm(self(spec.weight), spec.eps, spec.is_centered, bias)

    def stacks(self, *weights: WeightSpec, copies: int = 0) -> list[Tensor] | list[PackedMatrix]:
        """Load this rank's part of per-expert weights that one op multiplies with.

        Args:
            weights: the weights.
            copies: matrices in addition, which equal the first experts', in turn.

        Returns:
            [experts + copies, N, K] for each weight. All are quantised, in one form, or none.
        """
        forms = {self._weights.packed_form(weight) for weight in weights}
        if None not in forms and len(forms) == 1:
            found = [stacked(_repeated(self._packed(weight), copies)) for weight in weights]
            if self._sharded:
                self.buffer.reserve(*found)
            return found
        stacks = []
        for weight in weights:
            each = self._weights.read_each(weight)
            tensors = [self._copied(tensor.to(self._dtype)) for tensor in each]
            stacks.append(torch.stack(_repeated(tensors, copies)))
        return stacks

    def cache_scales(self, attention: AttentionSpec, kv_heads: int) -> CacheScales:
        """Load the scales of a layer's fp8 cache."""
        k = self._weights.cache_scale(attention.k.weight, "k")
        v = self._weights.cache_scale(attention.v.weight, "v")
        return CacheScales(*(torch.full((kv_heads,), x, device=self._device) for x in (k, v)))

    def _packed(self, weight: WeightSpec) -> list[PackedMatrix]:
        return [matrix.map(self._copied) for matrix in self._weights.read_packed(weight)]

    def _copied(self, tensor: Tensor) -> Tensor:
        if self._staging is None:
            return tensor.to(self._device, copy=True)
        return self._staging.copy(tensor)


T = TypeVar("T")


def _repeated(matrices: list[T], copies: int) -> list[T]:
    """Append copies of the first matrices, in turn."""
    return [matrices[i % len(matrices)] for i in range(len(matrices) + copies)]


class Linear(Protocol):
    """One or several matrices with a common input, side by side.

    Attributes:
        bias: [N], or None.
    """

    bias: Tensor | None
    is_packed: bool
    """True if `dense` must dequantise first, which only pays with many rows."""

    def dense(self) -> list[Tensor]:
        """Return the matrices, each [K, N_i]: transposed views of one tensor, for one op."""

    def __call__(self, x: Tensor, *, biased: bool = True) -> Tensor:
        """[T, K] -> [T, N]; without the bias if not `biased`."""


class PlainLinear:
    """A Linear in the compute dtype.

    torch multiplies (cuBLAS on NVIDIA's GPUs): no exchange runs beside this product, and for it
    torch's kernels are the fastest known. Ops with an exchange take the matrices one by one.

    Args:
        weights: the matrices, each [N_i, K].
        biases: none, or one [N_i] for each.
    """

    is_packed = False

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        one = len(weights) == 1
        self._weight = weights[0].contiguous() if one else torch.cat(list(weights))
        self._widths = [len(part) for part in weights]
        self.bias = torch.cat(list(biases)) if biases else None

    def dense(self) -> list[Tensor]:
        """See Linear."""
        return [part.mT for part in torch.split(self._weight, self._widths)]

    def __call__(self, x: Tensor, *, biased: bool = True) -> Tensor:
        """See Linear."""
        return linear(x, self._weight, self.bias if biased else None)


class PackedLinear:
    """A Linear with quantised matrices.

    Args:
        matrices: each [N_i, K], of one kind, with equal blocks of columns.
        biases: none, or one [N_i] for each.
        buffer: memory for the dequantised matrices.
    """

    is_packed = True

    def __init__(
        self, matrices: Sequence[PackedMatrix], biases: Sequence[Tensor], buffer: Buffer
    ) -> None:
        matrix = side_by_side(matrices)
        assert matrix is not None, "of one kind"
        self._matrix, self._buffer = matrix, buffer
        self._widths = [each.shape[0] for each in matrices]
        self.bias = torch.cat(list(biases)) if biases else None
        buffer.reserve(matrix)

    def dense(self) -> list[Tensor]:
        """See Linear."""
        (whole,) = self._buffer.dequantize(self._matrix)
        return [part.mT for part in torch.split(whole, self._widths)]

    def __call__(self, x: Tensor, *, biased: bool = True) -> Tensor:
        """See Linear."""
        bias = self.bias if biased else None
        if len(x) <= FEW_ROWS:
            return matmul(x, self._matrix, epilogue=Epilogue(bias=bias))
        (whole,) = self._buffer.dequantize(self._matrix)
        return linear(x, whole, bias)


class SharedMlp:
    """This rank's part of an MLP that all tokens use beside their experts.

    Args:
        spec: the MLP.
        gate: [1, hidden]; the sigmoid of its output multiplies the result. None for no gate.
        load: reads the weights.

    Attributes:
        gate_up, down: the products.
        is_gated: whether there is a gate.
    """

    def __init__(self, spec: MlpSpec, gate: WeightSpec | None, load: WeightLoader) -> None:
        self.gate_up, self.down = load.linear(spec.gate, spec.up), load.linear(spec.down)
        self.is_gated = gate is not None
        self._gate = None if gate is None else PlainLinear([load(gate)])

    def __call__(self, x: Tensor, *, biased: bool) -> Tensor:
        """[T, hidden] -> [T, hidden], to be gated and summed over the ranks.

        Only one rank of a sum is `biased`.
        """
        return self.down(silu_multiply(self.gate_up(x)), biased=biased)

    def add(self, total: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """Add the result `out` for the tokens x, times the gate, to `total`; all [T, hidden]."""
        if self._gate is None:
            return total + out
        return torch.addcmul(total, self._gate(x).sigmoid(), out)


class Experts:
    """This rank's experts, or its part in every expert.

    Args:
        spec: the experts.
        load: reads the weights.
        copies: number of slots beyond one for each of this rank's experts.

    Attributes:
        shared: the MLP that all tokens use, if there is one.
        tables: the placement of this layer's experts, if it differs between layers.
    """

    tables: Tables | None = None

    def __init__(self, spec: MoeSpec, load: WeightLoader, copies: int = 0) -> None:
        self._routing = spec.router
        self._router = PlainLinear([load(spec.router.weight)])
        self._bias = None if spec.router.bias is None else load(spec.router.bias)
        own = load.parts(spec.gate)[0]
        self._own, self._num_experts = range(own.start, own.stop), spec.router.weight.shape[0]
        self._buffer = load.buffer
        self._gate_up = load.stacks(spec.gate, spec.up, copies=copies)
        self._down = load.stacks(spec.down, copies=copies)
        shared = spec.shared
        self.shared = None if shared is None else SharedMlp(shared, spec.shared_gate, load)

    @property
    def weights(self) -> list[Tensor]:
        """The tensors with the weights of this rank's slots, each contiguous: [slots, ...]."""
        return [
            part
            for weight in (*self._gate_up, *self._down)
            for part in (weight.parts if isinstance(weight, PackedMatrix) else [weight])
        ]

    def _dense(self, weights: list[Tensor] | list[PackedMatrix]) -> list[Tensor]:
        """Return weights for an op that does not read quantised ones: [slots, K, N] each."""
        packed = [each for each in weights if isinstance(each, PackedMatrix)]
        if packed:
            return [each.mT for each in self._buffer.dequantize(*packed)]
        return [each.mT for each in weights if isinstance(each, Tensor)]

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], to be summed over the ranks; without the shared MLP."""
        x, ids, weights = self._route(x)
        pairs = sort_by_expert(ids, len(self._own), self._own.start)
        return combine(self._run(x, pairs.offsets, order=pairs.order), pairs.inverse, weights)

    def with_shared(self, routed: Tensor, x: Tensor, *, biased: bool) -> Tensor:
        """Add this rank's part of the shared MLP, if there is one, to the experts' result.

        Args:
            routed: the result for the tokens, [T, hidden].
            x: the tokens, [T, hidden].
            biased: whether this rank adds the bias for all.
        """
        if self.shared is None:
            return routed
        return self.shared.add(routed, x, self.shared(x, biased=biased))

    def run_sharded(
        self,
        x: Tensor,
        residual: Tensor,
        gather: GatherGroupsWorkspace,
        reduce: ReduceGroupsWorkspace,
        count: Callable[[], None],
    ) -> Tensor:
        """Run the experts for all ranks' tokens, beside the exchanges. Collective.

        The shared MLP's result is part of the residual.

        Args:
            x: this rank's tokens, [T, hidden]; the same T on all ranks.
            residual: [T, hidden], added to the sum over the ranks.
            gather, reduce: workspaces of the first product and of the last.
            count: called before each exchange.

        Returns:
            [T, hidden].
        """
        x, ids, weights = self._route(x)
        plan = make_plan(ids, weights, self._num_experts)
        plans = plan.new_empty(gather.world_size, len(plan))
        count()
        inner = all_gather_grouped_matmul(
            *(x, self._dense(self._gate_up), plan, gather),
            epilogue=Epilogue(silu_multiply=True),
            plans=plans,
            own=self._own,
        )
        count()
        epilogue = Epilogue(residual=residual)
        (down,) = self._dense(self._down)
        return grouped_matmul_reduce_scatter(
            *(inner, down, plans, reduce), epilogue=epilogue, own=self._own
        )

    def run_dispatched(
        self, x: Tensor, max_tokens: int, workspace: DispatchWorkspace, count: Callable[[], None]
    ) -> Tensor:
        """Run the experts on all ranks; [T, hidden] -> [T, hidden]. Collective.

        The result is without the shared MLP.

        Args:
            x: this rank's tokens; T may be 0.
            max_tokens: maximum T over the ranks.
            workspace: a workspace for these experts, on their ranks.
            count: called before each exchange.
        """
        x, ids, weights = self._route(x)
        mixed = []
        for start in range(0, max_tokens, workspace.max_tokens):
            chunk = slice(start, start + workspace.max_tokens)
            tokens, chosen, shares = x[chunk], ids[chunk], weights[chunk]
            count()
            if isinstance(workspace, LowLatencyWorkspace):
                sent = moe_dispatch(tokens, chosen, workspace, tables=self.tables)
                out = self._run_arrived(sent, chosen)
                count()
                mixed.append(moe_combine(out, shares, sent, workspace))
                continue
            crossed = moe_dispatch_two_level(tokens, chosen, shares, workspace, tables=self.tables)
            out = self._run_arrived(crossed, chosen)
            count()
            mixed.append(moe_combine_two_level(out, crossed, workspace))
        if len(mixed) == 1:
            return mixed[0]
        return torch.cat(mixed) if mixed else x

    def _run_arrived(self, arrived: Arrived, ids: Tensor) -> Tensor:
        """Run this rank's experts over received rows; `ids` are the experts of those it sent.

        The buffer has capacity for the maximum. On average, a rank receives as many rows as it
        sends.
        """
        return self._run(arrived.rows, arrived.offsets, expected=ids.numel())

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose each token's experts.

        Returns:
            The experts' inputs, like x; their ids, int32 [T, k]; and weights, float32 [T, k].
        """
        router = self._routing
        ids, weights = route(
            self._router(x.float() if router.weight.in_float32 else x),
            router.top_k,
            normalize=router.normalize,
            scoring=router.scoring,
            bias=self._bias,
            groups=router.groups,
            top_groups=router.top_groups,
            scale=router.scale,
        )
        if router.scales_input:
            return x * weights.to(x.dtype), ids, torch.ones_like(weights)
        return x, ids, weights

    def _run(
        self, rows: Tensor, offsets: Tensor, *, order: Tensor | None = None, expected: int = 0
    ) -> Tensor:
        """Run this rank's experts over rows [R, hidden] in expert order.

        Args:
            rows: the rows; with an order, the tokens.
            offsets: see grouped_matmul.
            order: pairs in expert order.
            expected: number of rows on average; all if 0.
        """
        silu = Epilogue(silu_multiply=True)
        inner = grouped_matmul(
            *(rows, _operands(self._gate_up), offsets),
            order=order,
            top_k=self._routing.top_k,
            epilogue=silu,
            expected=expected,
        )
        return grouped_matmul(inner, _operands(self._down), offsets, expected=expected)


def _operands(weights: list[Tensor] | list[PackedMatrix]) -> list[Operand]:
    """Return experts' weights as grouped_matmul takes them."""
    return [each if isinstance(each, PackedMatrix) else each.mT for each in weights]
