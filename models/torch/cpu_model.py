"""A decoder on the CPU, top to bottom: embedding, layers, norm, logits.

A step is one ragged batch; attention reads and writes the paged cache by the step's plan. A tied
embedding is read from the LM head's packed matrix if possible, so that the table is in memory once.
Otherwise it stays in the checkpoint's mapped file, because a step reads few rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.kernels.cpu import native
from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.layer import NativeAttention, NativeLayers, NativeMlp
from weft.kernels.cpu.linear import (
    Linear,
    NativeLinear,
    Norm,
    Weight,
    can_pack,
    make_linear,
)
from weft.kernels.cpu.moe import MakeLinear
from weft.kernels.cpu.quantized import make_packed_linear, make_rounded_linear, takes
from weft.kernels.packed import Kind, PackedMatrix
from weft.models.checkpoint.weights import Weights
from weft.models.interface import Size
from weft.models.memory.ledger import human_bytes
from weft.models.spec.spec import LayerSpec, ModelSpec, MoeSpec, NormSpec, WeightSpec
from weft.models.torch.angles import Angles, Turn
from weft.models.torch.cpu_layers import (
    Attention,
    Ending,
    LayerCache,
    LayerLoader,
    Mlp,
    Moe,
    Stored,
    load_norm,
)
from weft.models.torch.group import ALONE, CPU, Groups
from weft.models.torch.logits import Logits


class Layer:
    """Attention, then a dense or a routed MLP."""

    def __init__(self, model: ModelSpec, spec: LayerSpec, load: LayerLoader) -> None:
        self.rope = spec.attention.rope
        group = load.groups.tensor

        def norm(described: NormSpec | None) -> Norm | None:
            return None if described is None else load_norm(described, load)

        before, after = norm(spec.attention_norm), norm(spec.attention_output_norm)
        self._attention = Attention(model, spec.attention, before, Ending(after, group), load)
        self._is_parallel = spec.is_parallel
        before = before if spec.is_parallel else norm(spec.feed_forward_norm)
        end = Ending(norm(spec.feed_forward_output_norm), group)
        self._feed_forward = (
            Moe(spec.feed_forward, before, end, load)
            if isinstance(spec.feed_forward, MoeSpec)
            else Mlp(spec.feed_forward, before, end, load, is_parallel=spec.is_parallel)
        )

    def __call__(
        self,
        x: Tensor,
        turn: Turn,
        cache: LayerCache,
        plan: AttentionPlan,
        rows: Tensor | None = None,
        sizes: Sequence[int] = (),
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], or [S, hidden] for the tokens `rows` only.

        `sizes` holds the result's rows in each data-parallel attention group, if there are several.
        """
        stream = self._attention(x, turn, cache, plan)
        x = x if self._is_parallel else stream
        if rows is not None:
            x, stream = x[rows], stream[rows]
        return self.feed_forward(x, stream, sizes)

    def feed_forward(self, x: Tensor, stream: Tensor, sizes: Sequence[int]) -> Tensor:
        """Run the second half, which needs no cache, and add its result for x to the stream.

        All are [T, hidden].
        """
        if isinstance(self._feed_forward, Moe):
            return self._feed_forward(x, sizes)
        return self._feed_forward(x, stream)

    @property
    def native(self) -> tuple[NativeAttention, NativeMlp] | None:
        """The compiled halves, or None if one is not compiled."""
        mlp = self._feed_forward
        if isinstance(mlp, Moe) or mlp.native is None or self._attention.native is None:
            return None
        return self._attention.native, mlp.native


@dataclass
class QuantizedBytes:
    """Memory for matrices that the checkpoint has quantised.

    Attributes:
        kept: bytes of those that stay so, by kind.
        dequantized: bytes of the others, in the compute dtype.
        rounding: the value of `--quantization`, to which the others are then rounded.
    """

    kept: Counter[Kind] = field(default_factory=Counter)
    dequantized: int = 0
    rounding: str = "none"

    @property
    def lines(self) -> list[str]:
        """Say what happened, for the log."""
        lines = [
            f"{kind} weights stay packed: {human_bytes(size)}" for kind, size in self.kept.items()
        ]
        if self.dequantized:
            then = f"take {human_bytes(self.dequantized)}"
            if self.rounding != "none":
                then = f"rounded to {self.rounding}"
            lines.append(f"other quantized weights are dequantized, and {then}")
        return lines


class _CheckpointLoader:
    """Reads weights in the compute dtype; see `LayerLoader`."""

    def __init__(
        self,
        weights: Weights,
        groups: Groups,
        dtype: torch.dtype,
        quantization: str,
        compress: bool,
    ) -> None:
        self._weights = weights
        self.groups = groups
        self.parts = weights.parts
        self._dtype = dtype
        self._compress = compress
        self._make: MakeLinear = self.make_plain
        if quantization != "none":
            self._make = partial(make_rounded_linear, quantization)
        self._keeps_packed = native.supports(dtype)
        self.saved = 0
        self.quantized = QuantizedBytes(rounding=quantization)

    def make(
        self, weight: Stored | Sequence[Stored], bias: Tensor | None = None, *, gated: bool = False
    ) -> Linear:
        """Make a layer. Packed matrices stay packed if kernels have them, or are dequantised."""
        parts = weight if isinstance(weight, Sequence) else (weight,)
        packed = [part for part in parts if isinstance(part, PackedMatrix)]
        if len(packed) == len(parts):
            layer = make_packed_linear(packed, bias, gated=gated)
            if layer is not None:
                self.quantized.kept[packed[0].kind] += layer.nbytes
                return layer
        plain = []
        for part in parts:
            if isinstance(part, PackedMatrix):
                packed_bytes, part = part.bytes, part.dequantize(self._dtype)
                self.quantized.dequantized += part.nbytes
                self.saved -= part.nbytes - packed_bytes  # nearly what the memory plan has counted
            plain.append(part)
        return self._make(plain, bias, gated=gated)

    def make_plain(
        self,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        with_rows: bool = False,
    ) -> Linear:
        layer = make_linear(weight, bias, gated=gated, compress=self._compress, with_rows=with_rows)
        if isinstance(layer, NativeLinear):
            self.saved += layer.saved
        return layer

    def __call__(self, weight: WeightSpec) -> Tensor:
        dtype = torch.float32 if weight.in_float32 else self._dtype
        return self._weights.read(weight).to(dtype)

    def each(self, weight: WeightSpec) -> Iterator[Stored]:
        form = self._weights.packed_form(weight) if self._keeps_packed else None
        native_bytes = weight.native_bytes(weight.shape)
        if form is not None and takes(form) and native_bytes is not None:
            yield from self._weights.read_packed(weight)
            return
        for tensor in self._weights.read_each(weight):
            plain = tensor.to(self._dtype)
            if weight.stored is not None:
                self.quantized.dequantized += plain.nbytes
            yield plain

    def matrix(self, weight: WeightSpec) -> Stored:
        (matrix,) = self.each(weight)
        return matrix


class CpuModel:
    """The model in `spec` with packed weights, or one rank's part of it.

    Only the first stage embeds tokens, and only the last one makes logits.

    Args:
        spec: the whole model.
        weights: yields the tensors one at a time.
        dtype: compute dtype.
        quantization: of the matrices: "none" or a key of quantized.FORMATS. Norms, biases, routers
            and the embedding stay as they are. So do quantised weights that compiled kernels read
            as they are stored; see quantized.make_packed_linear.
        compress: compress bfloat16 matrices without loss; see linear.NativeLinear.
        groups: the ranks with the other parts.

    Attributes:
        saved_bytes: weight bytes without memory: by compression, or because an embedding's rows are
            read from the file. The system can drop the file's pages. Less than 0 if a weight takes
            more than the memory plan has counted.
        quantized: memory for what the checkpoint has quantised.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: torch.dtype,
        *,
        quantization: str = "none",
        compress: bool = True,
        groups: Groups = ALONE,
    ) -> None:
        load = _CheckpointLoader(weights, groups, dtype, quantization, compress)
        stage, local = weights.layout.of_stage(spec), weights.layout.local(spec)
        self._dtype = dtype
        self._angles = Angles(stage.layers, spec.head_dim, CPU)
        self._layers = [Layer(local, layer, load) for layer in stage.layers]
        # The last layer may run for few tokens only. All others run in one call if possible.
        native = [layer.native for layer in self._layers[:-1]]
        compiled = [layer for layer in native if layer is not None]
        together = compiled and compiled == native and self._angles.are_equal
        self._native = NativeLayers(compiled) if together else None
        lm_head: Linear | None = None
        self._is_last = stage.is_last
        shared = spec.lm_head is None and quantization == "none"
        if stage.is_last:
            self._norm = load_norm(spec.norm, load)
            table = load(spec.lm_head or spec.embedding)
            lm_head = load.make_plain(table, with_rows=True) if shared else load.make(table)
            self._lm_head = lm_head
        if shared and isinstance(lm_head, NativeLinear):
            self._rows: Callable[[Tensor], Tensor] = lm_head.weight_rows
        elif stage.is_first:
            # The LM head keeps the table itself where oneDNN cannot pack it.
            kept = shared and stage.is_last and not can_pack(dtype)
            in_file = weights.stays_in_file(spec.embedding)
            rows = table if kept else (weights.read if in_file else load)(spec.embedding)
            if in_file and (spec.lm_head is not None or not stage.is_last):
                load.saved += local.embedding.size * dtype.itemsize  # rows stay in the file
            self._rows = lambda token_ids: embedding(token_ids, rows).to(dtype)
        self.saved_bytes, self.quantized = load.saved, load.quantized
        self._group = groups.tensor
        self._vocabulary = weights.parts(spec.embedding)[0]
        self._vocab_size = spec.vocab_size
        self._hidden_size = spec.hidden_size

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: Sequence[LayerCache],
        plan: AttentionPlan,
        rows: Tensor | None = None,
        dp_sizes: Sequence[Size] = (),
    ) -> Tensor:
        """Run the layers.

        Args:
            x: [T, hidden]; from `embed` or the stage before.
            positions: int [T]; each token's position in its request.
            cache: one entry per layer; the tokens' keys and values are written to it.
            plan: the tokens' requests, and the location of their cache.
            rows: int64 [S]; tokens that need logits; None for all. The others only leave keys and
                values behind, and skip the end of the last layer.
            dp_sizes: as in StepInput.

        Returns:
            [S, hidden]; for `logits` or the next stage.
        """
        turns = self._angles.at(positions, self._dtype)
        *layers, last = self._layers
        if self._native is not None:
            x = self._native(x, turns[last.rope].rotation, cache[:-1], plan)
        else:
            tokens = [size.tokens for size in dp_sizes]
            for layer, layer_cache in zip(layers, cache[:-1], strict=True):
                x = layer(x, turns[layer.rope], layer_cache, plan, sizes=tokens)
        return last(x, turns[last.rope], cache[-1], plan, rows, self._at_end(dp_sizes))

    def run_empty(self, dp_sizes: Sequence[Size]) -> None:
        """Run the layers without tokens, for other data-parallel attention groups. Collective."""
        empty = torch.empty(0, self._hidden_size, dtype=self._dtype)
        for layer in self._layers[:-1]:
            layer.feed_forward(empty, empty, [size.tokens for size in dp_sizes])
        self._layers[-1].feed_forward(empty, empty, self._at_end(dp_sizes))

    def _at_end(self, dp_sizes: Sequence[Size]) -> list[int]:
        """Return each data-parallel attention group's tokens after its last layer here."""
        return [size.rows if self._is_last else size.tokens for size in dp_sizes]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the final norm, as for `logits` and embeddings; [S, hidden] to the same shape."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Logits:
        """[S, hidden] for the sampled tokens -> [S, vocab_size]."""
        local = self._lm_head(hidden, norm=self._norm)
        return Logits(local, self._vocab_size, self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Int [T], each in [0, vocab_size) -> [T, hidden].

        Each rank holds a part of the vocabulary (Shoeybi et al. 2019, section 3).
        """
        if self._group.size == 1:
            return self._rows(token_ids)
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        x = self._rows(torch.where(here, token_ids - self._vocabulary.start, 0))
        return self._group.sum(x.masked_fill_(~here[:, None], 0))
