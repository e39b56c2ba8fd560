"""A decoder on the CPU, top to bottom: embedding, layers, norm, logits.

The step is one ragged batch; attention reads and writes the paged cache by the
step's plan. A tied embedding is looked up in the packed matrix that gives the
logits where that is possible, so that the table is in memory once; otherwise it
stays in the checkpoint's file, mapped into memory: a step looks at few rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.int8 import make_int8_linear
from weft.kernels.cpu.layer import NativeAttention, NativeLayers, NativeMlp
from weft.kernels.cpu.linear import NativeLinear, RMSNorm, make_linear
from weft.kernels.cpu.moe import MakeLinear
from weft.kernels.cpu.rope import Rotation
from weft.models.checkpoint.weights import Weights
from weft.models.interface import Size
from weft.models.spec.spec import LayerSpec, ModelSpec, MoeSpec, WeightSpec
from weft.models.torch.cpu_layers import Attention, LayerCache, Load, Mlp, Moe
from weft.models.torch.group import ALONE, Groups
from weft.models.torch.logits import Logits


class Layer:
    """Attention, then a dense or a routed MLP."""

    def __init__(self, model: ModelSpec, spec: LayerSpec, load: Load) -> None:
        attention_norm = RMSNorm(load(spec.attention_norm), model.norm_eps)
        self._attention = Attention(model, spec.attention, attention_norm, load)
        feed_forward_norm = RMSNorm(load(spec.feed_forward_norm), model.norm_eps)
        self._feed_forward = (
            Moe(spec.feed_forward, feed_forward_norm, load)
            if isinstance(spec.feed_forward, MoeSpec)
            else Mlp(spec.feed_forward, feed_forward_norm, load)
        )

    def __call__(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: LayerCache,
        plan: AttentionPlan,
        rows: Tensor | None = None,
        sizes: Sequence[int] = (),
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], or of the tokens `rows` alone, [S, hidden].

        `sizes` are of the result, for each copy of attention if there are several.
        """
        x = self._attention(x, rotation, cache, plan)
        return self.feed_forward(x if rows is None else x[rows], sizes)

    def feed_forward(self, x: Tensor, sizes: Sequence[int]) -> Tensor:
        """Its second half, which needs no cache; [T, hidden] -> [T, hidden]."""
        if isinstance(self._feed_forward, Moe):
            return self._feed_forward(x, sizes)
        return self._feed_forward(x)

    @property
    def native(self) -> tuple[NativeAttention, NativeMlp] | None:
        """Its halves, if both are compiled."""
        mlp = self._feed_forward
        if isinstance(mlp, Moe) or mlp.native is None or self._attention.native is None:
            return None
        return self._attention.native, mlp.native


class _Load:
    """Reads weights in the type to compute in; see layers.Load."""

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
        self.make_plain: MakeLinear = partial(make_linear, compress=compress)
        self.make: MakeLinear = make_int8_linear if quantization == "int8" else self.make_plain

    def __call__(self, weight: WeightSpec) -> Tensor:
        return self._weights.read(weight).to(self._dtype)

    def each(self, weight: WeightSpec) -> Iterator[Tensor]:
        return (tensor.to(self._dtype) for tensor in self._weights.read_each(weight))


class CpuModel:
    """The model of `spec`, with its weights read and packed; or one rank's part of it.

    Tokens are looked up on the first stage only, and logits made on the last.

    Args:
        spec: what it is.
        weights: where the tensors come from, one at a time.
        dtype: to compute in.
        quantization: of the matrices: "none" or "int8". Norms, biases, routers and the embedding
            stay as they are.
        compress: matrices of bfloat16, without loss; see linear.NativeLinear.
        groups: the ranks that have the parts that `weights` does not give.
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
        load = _Load(weights, groups, dtype, quantization, compress)
        stage, local = weights.layout.of_stage(spec), weights.layout.local(spec)
        self._dtype = dtype
        self._inv_freq = torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim))
        self._layers = [Layer(local, layer, load) for layer in stage.layers]
        # All but the last, which may be asked for few tokens, in one call where that is possible.
        native = [layer.native for layer in self._layers[:-1]]
        compiled = [layer for layer in native if layer is not None]
        self._native = NativeLayers(compiled) if compiled and compiled == native else None
        lm_head = None
        self._is_last = stage.is_last
        if stage.is_last:
            self._norm = RMSNorm(load(spec.norm), spec.norm_eps)
            self._lm_head = lm_head = load.make(load(spec.lm_head or spec.embedding))
        packed = spec.lm_head is None and quantization == "none"
        if packed and isinstance(lm_head, NativeLinear):
            self._rows: Callable[[Tensor], Tensor] = lm_head.weight_rows
        elif stage.is_first:
            table = weights.read(spec.embedding)
            self._rows = lambda token_ids: embedding(token_ids, table).to(dtype)
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
        copies: Sequence[Size] = (),
    ) -> Tensor:
        """Run the layers.

        Args:
            x: [T, hidden]; what `embed` has given, or the stage before this one.
            positions: int [T]; of each token in its request.
            cache: of each layer; the tokens' keys and values are written to it.
            plan: which requests the tokens belong to, and where their cache is.
            rows: int64 [S]; the tokens that logits are wanted of, all if None. The others leave
                nothing behind but keys and values, and skip the end of the last layer.
            copies: as of StepInput.

        Returns:
            [S, hidden]; what `logits` takes, or the next stage.
        """
        rotation = Rotation.of(positions, self._inv_freq, self._dtype)
        if self._native is not None:
            x = self._native(x, rotation, cache[:-1], plan)
        else:
            tokens = [copy.tokens for copy in copies]
            for layer, layer_cache in zip(self._layers[:-1], cache[:-1], strict=True):
                x = layer(x, rotation, layer_cache, plan, sizes=tokens)
        return self._layers[-1](x, rotation, cache[-1], plan, rows, self._at_end(copies))

    def take_part(self, copies: Sequence[Size]) -> None:
        """Run the layers without a token, for those of other copies of attention. Collective."""
        none = torch.empty(0, self._hidden_size, dtype=self._dtype)
        for layer in self._layers[:-1]:
            layer.feed_forward(none, [copy.tokens for copy in copies])
        self._layers[-1].feed_forward(none, self._at_end(copies))

    def _at_end(self, copies: Sequence[Size]) -> list[int]:
        """Tokens that each copy of attention has at the end of its last layer here."""
        return [copy.rows if self._is_last else copy.tokens for copy in copies]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """[S, hidden] to the same: what `logits` is made of, and embeddings."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Logits:
        """[S, hidden] of the tokens that matter -> [S, vocab_size]."""
        local = self._lm_head(hidden, norm=self._norm)
        return Logits(local, self._vocab_size, self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Int [T], each in [0, vocab_size) -> [T, hidden].

        Each rank knows some tokens (Shoeybi et al. 2019, section 3).
        """
        if self._group.size == 1:
            return self._rows(token_ids)
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        x = self._rows(torch.where(here, token_ids - self._vocabulary.start, 0))
        return self._group.sum(x.masked_fill_(~here[:, None], 0))
