"""Building blocks shared by all decoder families, under their usual checkpoint names.

`Decoder` knows one model's sizes. It describes norms, projections, MLPs and
experts; the functions in families/ put them together into layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from weft.models.spec.config_fields import MAX_PARTS, Fields
from weft.models.spec.spec import (
    AttentionSpec,
    Axis,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Place,
    RopeSpec,
    RouterSpec,
    WeightSpec,
)

Size = tuple[int, Axis]
"""A dimension's size and logical axis."""

Norms = tuple[str | None, str | None, str | None, str | None]
"""The norms' names in a layer: before and after attention, then before and after the feed-forward.
None is no norm."""

BEFORE: Norms = ("input_layernorm", None, "post_attention_layernorm", None)
AFTER: Norms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
PARALLEL: Norms = ("input_layernorm", None, None, None)
"""The usual names: of the blocks' inputs, of their outputs alone, and of both blocks' input."""


@dataclass(frozen=True, slots=True)
class NormRules:
    """The kind of a family's norms.

    Attributes:
        eps_field: the field with epsilon.
        is_centered: as in NormSpec.
        biased: whether those over the residual stream have a bias.
    """

    eps_field: str = "rms_norm_eps"
    is_centered: bool = False
    biased: bool = False


RMS = NormRules()
LAYER_NORM = NormRules("layer_norm_eps", is_centered=True)
BIASED_LAYER_NORM = NormRules("layer_norm_eps", is_centered=True, biased=True)
"""The kinds of norms."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of one model; the methods describe its parts.

    Attributes:
        fields: the config, for sizes that only some models have.
        layers: how many layers the model has.
        heads, kv_heads: how many query heads and key/value heads it has.
        eps: of all norms.
        norms: the kind of all norms.
        rope: the rotary embedding of all layers, unless a layer says otherwise.
        sliding_rope: that of layers with a sliding window, in families where it may differ.
    """

    fields: Fields
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    norms: NormRules
    rope: RopeSpec
    sliding_rope: RopeSpec

    def table(self, name: str, *, tied: str | None = None) -> WeightSpec:
        """Describe the embedding or the LM head, [vocab, hidden]; `tied` is its other name."""
        shape, name = (self.vocab, self.hidden), f"{name}.weight"
        places = (Place(name, shape), Place(f"{tied}.weight", shape)) if tied else ()
        return WeightSpec(name, shape, ("vocab", "hidden"), places)

    def norm(self, name: str) -> NormSpec:
        """Describe a norm over the residual stream."""
        weight, bias = (
            WeightSpec(f"{name}.{kind}", (self.hidden,), ("hidden",)) for kind in ("weight", "bias")
        )
        return NormSpec(
            weight, self.eps, self.norms.is_centered, bias if self.norms.biased else None
        )

    def layer(
        self,
        i: int,
        attention: AttentionSpec,
        feed_forward: MlpSpec | MoeSpec,
        norms: Norms = BEFORE,
        *,
        is_parallel: bool = False,
    ) -> LayerSpec:
        """Describe layer i.

        Args:
            i: the layer's index.
            attention, feed_forward: its blocks.
            norms: the names of its norms.
            is_parallel: as in LayerSpec.
        """
        before, after, before_second, after_second = (
            None if name is None else self.norm(f"model.layers.{i}.{name}") for name in norms
        )
        return LayerSpec(
            before, attention, after, before_second, feed_forward, after_second, is_parallel
        )

    def attention(
        self,
        i: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norm: Literal["none", "head", "each head", "heads", "rotated head", "bare"] = "none",
        norm_names: tuple[str, str] = ("q_norm", "k_norm"),
        window: int | None = None,
        chunk: int | None = None,
        rope: RopeSpec | None = None,
        block: str = "self_attn",
        output: str = "o_proj",
        fused: str | None = None,
    ) -> AttentionSpec:
        """Describe layer i's attention.

        Args:
            i: the layer's index.
            qkv_bias, o_bias: whether the projections have a bias.
            norm: the norm of queries and keys: none, of each head before or after its rotation, of
                each head with its own weights or without any, or over all heads together.
            norm_names: their names in the attention; with `{expert}`, each head has a tensor.
            window: the sliding window's size; None for full attention.
            chunk: as in AttentionSpec.
            rope: this layer's rotary embedding; None for the model's.
            block: the attention's name in the layer.
            output: the output projection's name in the attention.
            fused: the projection with queries, keys and values, if they are one tensor.
        """
        name, rope = f"model.layers.{i}.{block}", rope or self.rope
        order = rope.head_order(self.head_dim)
        hidden: Size = (self.hidden, "hidden")
        queries: Size = (self.heads * self.head_dim, "q_heads")
        keys: Size = (self.kv_heads * self.head_dim, "kv_heads")
        q = _linear(f"{name}.q_proj", queries, hidden, qkv_bias)
        k = _linear(f"{name}.k_proj", keys, hidden, qkv_bias)
        v = _linear(f"{name}.v_proj", keys, hidden, qkv_bias)
        if fused is not None:
            q, k, v = _in_one_tensor(f"{name}.{fused}", q, k, v)

        def head_norm(norm_name: str, count: int, heads: Axis) -> NormSpec | None:
            if norm == "none":
                return None
            full = f"{name}.{norm_name}.weight"
            shape: tuple[int, ...] = (self.head_dim,)
            axes: tuple[Axis, ...] = ("head_dim",)
            if norm == "heads":
                shape, axes = (count * self.head_dim,), (heads,)
            elif norm == "each head":
                shape, axes = (count, self.head_dim), (heads, "head_dim")
            part = Place(full, shape)
            if part.is_per_expert:
                part = replace(part, shape=shape[1:])
            weight = WeightSpec(
                full, shape, axes, (part,), head_order=order, is_ones=norm == "bare"
            )
            return NormSpec(weight, self.eps, self.norms.is_centered)

        return AttentionSpec(
            q=_ordered(q, order),
            k=_ordered(k, order),
            v=v,
            o=_linear(f"{name}.{output}", hidden, queries, o_bias),
            rope=rope,
            scale=self.head_dim**-0.5,
            q_norm=head_norm(norm_names[0], self.heads, "q_heads"),
            k_norm=head_norm(norm_names[1], self.kv_heads, "kv_heads"),
            norms_after_rope=norm == "rotated head",
            sliding_window=window,
            chunk=chunk,
        )

    def mlp(
        self,
        i: int,
        *,
        bias: bool = False,
        block: str = "mlp",
        saved: str | None = None,
        width: int | None = None,
        output: str = "down_proj",
        fused: str | None = None,
    ) -> MlpSpec:
        """Describe a dense MLP in layer i.

        Args:
            i: the layer's index.
            bias: whether the projections have a bias.
            block: the MLP's name in the layer.
            saved: the name that transformers 5 saves, if it is another.
            width: its width; None for the model's `intermediate_size`.
            output: the down projection's name in the MLP.
            fused: the projection with gate and up, if they are one tensor.
        """
        name = f"model.layers.{i}.{block}"
        width = self.fields.integer("intermediate_size") if width is None else width
        hidden: Size = (self.hidden, "hidden")
        inner: Size = (width, "intermediate")
        gate = _linear(f"{name}.gate_proj", inner, hidden, bias)
        up = _linear(f"{name}.up_proj", inner, hidden, bias)
        if fused is not None:
            gate, up = _in_one_tensor(f"{name}.{fused}", gate, up)
        down = _linear(f"{name}.{output}", hidden, inner, bias)
        if saved is None:
            return MlpSpec(gate, up, down)
        other = f"model.layers.{i}.{saved}"
        return MlpSpec(*(_also_at(each, name, other) for each in (gate, up, down)))

    def router(
        self,
        i: int,
        experts: int,
        *,
        normalize: bool,
        top_k: str = "num_experts_per_tok",
        name: str = "mlp.gate.weight",
        saved: str = "mlp.gate.weight",
        bias: Sequence[str] = (),
        bias_shape: tuple[int, ...] | None = None,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        groups: tuple[int, int] = (1, 1),
        scale: float = 1.0,
        in_float32: bool = False,
        scales_input: bool = False,
    ) -> RouterSpec:
        """Describe layer i's router.

        Args:
            i: the layer's index.
            experts: how many experts the layer has.
            normalize, scoring, scale, scales_input: as in RouterSpec.
            top_k: the field with the number of experts per token.
            name: the router's tensor in the layer.
            saved: the name that transformers 5 saves.
            bias: the tensor's names in the layer with the scores' bias, if there is one.
            bias_shape: its shape; None for one axis.
            groups: the number of groups, and of groups per token.
            in_float32: whether its outputs are computed in float32.

        Raises:
            ModelError: the fields do not fit each other.
        """
        chosen, layer = self.fields.integer(top_k), f"model.layers.{i}"
        if chosen > experts:
            raise self.fields.error(top_k, f"at most the number of experts, {experts}")
        if scales_input and chosen != 1:
            raise self.fields.error(top_k, "1, because the router scales the expert's input")
        shape = (experts, self.hidden)
        places = [Place(f"{layer}.{each}", bias_shape or (experts,)) for each in bias]
        names = dict.fromkeys((f"{layer}.{name}", f"{layer}.{saved}"))
        return RouterSpec(
            weight=WeightSpec(
                f"{layer}.{name}",
                shape,
                ("choice", "hidden"),
                tuple(Place(each, shape) for each in names),
                in_float32=in_float32,
            ),
            top_k=chosen,
            normalize=normalize,
            scoring=scoring,
            bias=WeightSpec(places[0].name, (experts,), ("choice",), tuple(places), in_float32=True)
            if places
            else None,
            groups=groups[0],
            top_groups=groups[1],
            scale=scale,
            scales_input=scales_input,
        )

    def experts(
        self,
        i: int,
        router: RouterSpec,
        *,
        width: int,
        block: str = "mlp",
        matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        saved: str = "mlp.experts",
        stacks: tuple[str, str] | None = None,
        transposed: bool = False,
        shared: MlpSpec | None = None,
        shared_gate: str | None = None,
    ) -> MoeSpec:
        """Describe layer i's experts, which are separate tensors or stacked.

        transformers 5 stacks them with `save_original_format=False`: `gate_up_proj` is [experts,
        2 * width, hidden], `down_proj` is [experts, hidden, width]. Qwen3-VL publishes both
        transposed. Granite publishes both under other names.

        Args:
            i: the layer's index.
            router: the layer's router.
            width: one expert's intermediate size.
            block: the feed-forward's name in the layer, where each expert has its own tensors.
            matrices: each expert's gate, up and down matrix, by name.
            saved: where in the layer transformers 5 saves the stacks.
            stacks: their published names in the block, if those are others.
            transposed: whether stacks are transposed in all checkpoints, and not just in some.
            shared: the shared experts, if there are some.
            shared_gate: the tensor in the layer with their gate, if there is one.
        """
        layer, count = f"model.layers.{i}", router.weight.shape[0]
        inner, outer = (count, width, self.hidden), (count, self.hidden, width)
        both = (count, 2 * width, self.hidden)
        in_axes: tuple[Axis, ...] = ("expert", "moe_intermediate", "hidden")
        out_axes: tuple[Axis, ...] = ("expert", "hidden", "moe_intermediate")

        def weight(
            matrix: str, shape: tuple[int, ...], axes: tuple[Axis, ...], stack: Place, other: str
        ) -> WeightSpec:
            name = f"{layer}.{block}.experts.{{expert}}.{matrix}.weight"
            published = (replace(stack, name=f"{layer}.{block}.{other}"),) if other else ()
            stacked = (stack.swapped(),) if transposed else (stack, stack.swapped())
            places = (*published, Place(name, shape[1:]), *stacked)
            return WeightSpec(name, shape, axes, places)

        gate, up, down = matrices
        other_up, other_down = stacks or ("", "")
        gates = Place(f"{layer}.{saved}.gate_up_proj", both)
        ups = replace(gates, start=(0, width, 0))
        downs = Place(f"{layer}.{saved}.down_proj", outer)
        return MoeSpec(
            router=router,
            gate=weight(gate, inner, in_axes, gates, other_up),
            up=weight(up, inner, in_axes, ups, other_up),
            down=weight(down, outer, out_axes, downs, other_down),
            shared=shared,
            shared_gate=WeightSpec(f"{layer}.{shared_gate}", (1, self.hidden), ("choice", "hidden"))
            if shared_gate
            else None,
        )

    def count_experts(self, *names: str) -> int:
        """Read the number of experts; the first of the fields that is there counts.

        Raises:
            ModelError: none is there, or two differ.
        """
        field = next((name for name in names if self.fields.has(name)), names[0])
        count = self.fields.integer(field, high=MAX_PARTS)
        for name in names:
            if self.fields.integer(name, count) != count:
                raise self.fields.error(name, f"the same as {field}, {count}")
        return count


def _linear(name: str, out: Size, into: Size, bias: bool) -> LinearSpec:
    """Describe a projection; `out` and `into` are (size, axis) of its output and input."""
    (rows, row_axis), (columns, column_axis) = out, into
    return LinearSpec(
        WeightSpec(f"{name}.weight", (rows, columns), (row_axis, column_axis)),
        WeightSpec(f"{name}.bias", (rows,), (row_axis,)) if bias else None,
    )


def _in_one_tensor(name: str, *linears: LinearSpec) -> list[LinearSpec]:
    """Place projections with one input, and their biases, into one tensor, one below another."""
    total, start, placed = sum(each.weight.shape[0] for each in linears), 0, []

    def place(weight: WeightSpec, kind: str) -> WeightSpec:
        rest = weight.shape[1:]
        first = (start, *(0 for _ in rest))
        return replace(weight, places=(Place(f"{name}.{kind}", (total, *rest), first),))

    for each in linears:
        bias = None if each.bias is None else place(each.bias, "bias")
        placed.append(LinearSpec(place(each.weight, "weight"), bias))
        start += each.weight.shape[0]
    return placed


def _also_at(linear: LinearSpec, name: str, other: str) -> LinearSpec:
    """Let a projection also be in tensors whose names begin otherwise."""

    def placed(weight: WeightSpec) -> WeightSpec:
        also = Place(weight.name.replace(name, other), weight.shape)
        return replace(weight, places=(*weight.known_places, also))

    return LinearSpec(placed(linear.weight), linear.bias and placed(linear.bias))


def _ordered(linear: LinearSpec, order: tuple[int, ...]) -> LinearSpec:
    """Sort the rows of each head; see `WeightSpec.head_order`."""
    bias = None if linear.bias is None else replace(linear.bias, head_order=order)
    return LinearSpec(replace(linear.weight, head_order=order), bias)
