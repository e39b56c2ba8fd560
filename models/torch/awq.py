"""Activation-aware scales: columns of a matrix with large inputs are rounded with finer steps.

AWQ (Lin et al. 2023, section 3.2) multiplies a matrix's columns by s, and divides its inputs by s.
The model stays the same, but rounding hurts the scaled columns less. s is the mean magnitude of
each input to the power alpha; alpha is searched in [0, 1) for the least error of the outputs on a
calibration text. Not done here: AWQ's search for smaller ranges (clipping).

The division is folded into what makes the inputs, where that is exact:

- a norm before queries, keys and values, or before a dense MLP's gate and up matrix: its weight and
  bias. In a parallel block, all five matrices share s
- the values, before the output projection: their rows. Heads that share a KV head share s
- the up matrix, before the down matrix: its rows; silu(gate) * up is linear in up. Experts, too

The norm before experts also feeds the router, which is not quantised, so it keeps its weight.

One layer is in memory at a time. Inputs are those of the original
model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.kernels.cpu.linear import Linear, PackedLinear, Weight, make_linear, parts_of, whole
from weft.kernels.cpu.moe import MakeLinear
from weft.models.checkpoint.quantize import round_matrix
from weft.models.checkpoint.quantized_copy import Edit, copy_names
from weft.models.checkpoint.weights import Weights
from weft.models.spec.quantization import QuantSpec
from weft.models.spec.schemes import Scheme
from weft.models.spec.spec import LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec
from weft.models.torch.angles import Angles
from weft.models.torch.compare import Advance, lone_request
from weft.models.torch.cpu_model import Layer
from weft.models.torch.group import ALONE, CPU

STEPS = 20
"""Values of alpha: 0, 1/20 to 19/20."""
SAMPLE_ROWS = 512
"""Inputs of a matrix on which the outputs' error is measured."""
SMALLEST = 1e-4
"""Smallest mean magnitude of an input; smaller ones count as this."""


@dataclass
class Inputs:
    """Inputs of one matrix: the sum of their magnitudes, and some of them.

    Attributes:
        total: float32 [in].
        count: number of inputs.
        sample: float32 [n, in] each.
    """

    total: Tensor | float = 0.0
    count: int = 0
    sample: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, most: int) -> None:
        """Count inputs [T, in], and keep about `most` of them, evenly spread."""
        wide = x.float()
        self.total = self.total + wide.abs().sum(0)
        self.count += len(x)
        self.sample.append(wide[:: -(-len(x) // most)])


class _Loader:
    """Loads one layer, keeps its matrices, and records their inputs. A LayerLoader.

    Args:
        weights: the checkpoint.
        dtype: compute dtype.
        most: inputs of a matrix to keep, of each window.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype, most: int) -> None:
        self._weights, self.dtype, self._most = weights, dtype, most
        self.groups = ALONE
        self.parts = weights.parts
        self.make: MakeLinear = self._make
        self.make_plain: MakeLinear = make_linear
        self.matrices: dict[tuple[str, int], Tensor] = {}
        self._key: dict[int, tuple[str, int]] = {}
        self.inputs: dict[tuple[str, int], Inputs] = defaultdict(Inputs)

    def __call__(self, weight: WeightSpec) -> Tensor:
        dtype = torch.float32 if weight.in_float32 else self.dtype
        return self._keep(weight, 0, self._weights.read(weight).to(dtype))

    def each(self, weight: WeightSpec) -> Iterator[Tensor]:
        for expert, tensor in enumerate(self._weights.read_each(weight)):
            yield self._keep(weight, expert, tensor.to(self.dtype))

    matrix = __call__

    def _keep(self, weight: WeightSpec, expert: int, tensor: Tensor) -> Tensor:
        self.matrices[weight.name, expert] = tensor
        self._key[id(tensor)] = weight.name, expert
        return tensor

    def _make(self, weight: Weight, bias: Tensor | None = None, *, gated: bool = False) -> Linear:
        # All parts have the same inputs; they are recorded for the first.
        inputs = self.inputs[self._key[id(parts_of(weight)[0])]]
        return _Recording(whole(weight), bias, gated=gated, record=inputs, most=self._most)


class _Recording(PackedLinear):
    """A layer that records its inputs."""

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, gated: bool, record: Inputs, most: int
    ) -> None:
        super().__init__(weight, bias, gated=gated)
        self._record, self._most = record, most

    def product(self, x: Tensor) -> Tensor:
        self._record.add(x, self._most)
        return super().product(x)


@torch.inference_mode()
def find_edits(
    path: Path,
    spec: ModelSpec,
    scheme: Scheme,
    windows: Sequence[Sequence[int]],
    advance: Advance,
) -> dict[str, list[Edit]]:
    """Find the scales of all layers.

    Args:
        path: the checkpoint.
        spec: its model.
        scheme: how the copy will be quantised.
        windows: the calibration text, token ids.
        advance: called for each layer, with the text's tokens.

    Returns:
        The changes before rounding, by a tensor's name in the copy; see `write_copy`.

    Raises:
        ModelError: the checkpoint cannot be loaded.
    """
    weights = Weights(path, spec)
    dtype: torch.dtype = getattr(torch, spec.compute_dtype("auto"))
    angles = Angles(spec.layers, spec.head_dim, CPU)
    table = weights.read(spec.embedding)
    states = [embedding(torch.tensor(window), table).to(dtype) for window in windows]
    tokens = sum(map(len, windows))
    edits: dict[str, list[Edit]] = defaultdict(list)
    for layer in spec.layers:
        load = _Loader(weights, dtype, -(-SAMPLE_ROWS // len(windows)))
        run = Layer(spec, layer, load)
        for i, x in enumerate(states):
            plan, cache = lone_request(spec, len(x), dtype)
            turn = angles.at(torch.arange(len(x)), dtype)[layer.attention.rope]
            states[i] = run(x, turn, cache, plan)
        _Folding(spec, weights, scheme.spec, load, edits).of_layer(layer)
        advance(tokens)
    return dict(edits)


@dataclass(frozen=True)
class _Folding:
    """Finds one layer's scales, and turns them into edits."""

    model: ModelSpec
    weights: Weights
    spec: QuantSpec
    load: _Loader
    edits: dict[str, list[Edit]]

    def of_layer(self, layer: LayerSpec) -> None:
        attention, block = layer.attention, layer.feed_forward
        also = (block.gate, block.up) if layer.is_parallel and isinstance(block, MlpSpec) else ()
        self._norm(layer.attention_norm, (attention.q, attention.k, attention.v, *also))
        kv_heads, head_dim = self.model.num_kv_heads, self.model.head_dim
        shared = self.model.num_heads // kv_heads

        def of_values(of_heads: Tensor) -> Tensor:
            return of_heads.view(kv_heads, shared, head_dim).mean(1).flatten()

        def of_heads(of_values: Tensor) -> Tensor:
            one = of_values.view(kv_heads, 1, head_dim)
            return one.expand(-1, shared, -1).reshape(-1)

        self._rows(attention.v, attention.o, of_values, of_heads)
        mlp = block if isinstance(block, MlpSpec) else block.shared
        if mlp is not None:
            self._rows(mlp.up, mlp.down)
        if isinstance(block, MlpSpec):
            self._norm(layer.feed_forward_norm, (block.gate, block.up))
            return
        for expert in range(block.experts):
            self._rows(LinearSpec(block.up), LinearSpec(block.down), expert=expert)

    def _norm(self, norm: NormSpec | None, linears: Sequence[LinearSpec]) -> None:
        """Fold the scale of matrices with the same inputs into the norm before them."""
        if norm is None:
            return
        names = [(linear.weight.name, 0) for linear in linears]
        scale = self._search(names[0], names)
        if scale is None:
            return
        weight = self.weights.read(norm.weight).float()
        (stored,) = self.weights.sources(norm.weight)[1]
        dtype = self.weights.read(norm.weight).dtype
        # The norm's weight is rounded to its dtype; the columns get exactly the inverse.
        divided = (weight / scale).to(dtype)
        scale = torch.where(divided == 0, 1.0, weight / divided.float())
        divided = torch.where(divided == 0, weight.to(dtype), divided)
        self.edits[stored.name].append(lambda _, tensor: divided)
        if norm.bias is not None:
            (stored,) = self.weights.sources(norm.bias)[1]
            self.edits[stored.name].append(lambda _, tensor: (tensor.float() / scale).to(dtype))
        for linear in linears:
            self._columns(linear.weight, 0, scale)

    def _rows(
        self,
        before: LinearSpec,
        after: LinearSpec,
        inward: Callable[[Tensor], Tensor] = lambda each: each,
        outward: Callable[[Tensor], Tensor] = lambda each: each,
        *,
        expert: int = 0,
    ) -> None:
        """Fold the scale of `after` into the rows of `before`.

        `inward` maps numbers for the columns of `after` to the rows of `before`, and `outward`
        maps them back.
        """
        name = after.weight.name, expert
        scale = self._search(name, [name], inward, outward)
        if scale is None:
            return
        self._columns(after.weight, expert, outward(scale))
        for weight in (before.weight, before.bias):
            if weight is not None:
                self._edit(weight, expert, _times_rows(1 / scale))

    def _columns(self, weight: WeightSpec, expert: int, scale: Tensor) -> None:
        self._edit(weight, expert, lambda rows: rows.float() * scale)

    def _edit(self, weight: WeightSpec, expert: int, change: Callable[[Tensor], Tensor]) -> None:
        """Change a weight's rows, in a tensor that may hold others, too."""
        place, _ = self.weights.sources(weight)
        names = copy_names(self.weights, weight)
        name = names[expert]
        is_stacked = weight.has_experts and not place.is_per_expert
        first = place.start[0] if place.start and not is_stacked else 0
        count = weight.shape[1 if weight.has_experts else 0]

        def edit(_: str, tensor: Tensor) -> Tensor:
            rows = tensor[first : first + count]
            changed = change(rows)
            if len(rows) == len(tensor):
                return changed
            whole = tensor.float()  # a copy, or an earlier edit's result
            whole = whole.clone() if whole is tensor else whole
            whole[first : first + count] = changed
            return whole

        self.edits[name].append(edit)

    def _search(
        self,
        recorded: tuple[str, int],
        names: Sequence[tuple[str, int]],
        inward: Callable[[Tensor], Tensor] = lambda each: each,
        outward: Callable[[Tensor], Tensor] = lambda each: each,
    ) -> Tensor | None:
        """Return the best scale; None for 1, or if no input was seen."""
        inputs = self.load.inputs.get(recorded)
        if inputs is None or not inputs.count:
            return None
        assert isinstance(inputs.total, Tensor)
        mean = inward(inputs.total / inputs.count)
        x = torch.cat(inputs.sample)
        matrices = [self.load.matrices[name].float() for name in names]
        return best_scale(self.spec, x, mean, matrices, outward, self.load.dtype)


def _times_rows(factor: Tensor) -> Callable[[Tensor], Tensor]:
    def change(rows: Tensor) -> Tensor:
        return rows.float() * (factor if rows.dim() == 1 else factor[:, None])

    return change


def best_scale(
    spec: QuantSpec,
    x: Tensor,
    mean: Tensor,
    matrices: Sequence[Tensor],
    outward: Callable[[Tensor], Tensor] = lambda each: each,
    scale_dtype: torch.dtype = torch.float32,
) -> Tensor | None:
    """Search the scale with the least error of the matrices' outputs.

    Args:
        spec: how the matrices are rounded.
        x: inputs, float32 [n, in].
        mean: mean magnitude of the inputs, float32 [scales].
        matrices: with these inputs, float32 [out, in].
        outward: maps scales to one number for each input, [in].
        scale_dtype: dtype of the rounded matrices' scales.

    Returns:
        float32 [scales]; None if no scale is better than 1.
    """
    mean = mean.clamp(min=SMALLEST)
    best, least = None, torch.inf
    for step in range(STEPS):
        scale = mean ** (step / STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        columns = outward(scale)
        error = 0.0
        for matrix in matrices:
            rounded = round_matrix(spec, matrix * columns, scale_dtype).values() / columns
            error += (x @ (rounded - matrix).t()).square().sum().item()
        if error < least:
            best, least = (scale if step else None), error
    return best
