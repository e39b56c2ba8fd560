"""Building blocks shared by all decoder families, under their usual checkpoint names.

`Decoder` knows one model's sizes. It describes norms, projections, MLPs and
experts; `families.py` puts them together into layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.models.spec.config_fields import MAX_PARTS, Fields
from weft.models.spec.spec import (
    AttentionSpec,
    Axis,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    MoeSpec,
    TensorBlock,
    WeightSpec,
)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes of one model; the methods describe its parts.

    Attributes:
        fields: the config, for sizes that only some models have.
        layers: how many layers the model has.
        heads, kv_heads: how many query heads and key/value heads it has.
    """

    fields: Fields
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def read(cls, fields: Fields) -> Decoder:
        """Read the sizes from the config.

        Raises:
            ModelError: a size is missing or does not fit the others.
        """
        hidden = fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        kv_heads = fields.integer("num_key_value_heads", heads)
        head_dim = fields.integer("head_dim", max(1, hidden // heads))
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
        if head_dim % 2:
            raise fields.error("head_dim", f"an even number, not {head_dim}")
        return cls(
            fields=fields,
            vocab=fields.integer("vocab_size"),
            hidden=hidden,
            layers=fields.integer("num_hidden_layers", high=MAX_PARTS),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
        )

    def table(self, name: str, *, tied: str | None = None) -> WeightSpec:
        """Describe the embedding or the LM head, [vocab, hidden]; `tied` is its other name."""
        shape = (self.vocab, self.hidden)
        other = TensorBlock(f"{tied}.weight", shape, (0, 0)) if tied else None
        return WeightSpec(f"{name}.weight", shape, ("vocab", "hidden"), other)

    def norm(self, name: str) -> WeightSpec:
        """Describe an RMSNorm over the residual stream."""
        return WeightSpec(f"{name}.weight", (self.hidden,), ("hidden",))

    def layer(self, i: int, attention: AttentionSpec, feed_forward: MlpSpec | MoeSpec) -> LayerSpec:
        """Describe layer i, made of the given attention and feed-forward."""
        return LayerSpec(
            attention_norm=self.norm(f"model.layers.{i}.input_layernorm"),
            attention=attention,
            feed_forward_norm=self.norm(f"model.layers.{i}.post_attention_layernorm"),
            feed_forward=feed_forward,
        )

    def attention(
        self,
        i: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        head_norm: bool = False,
        window: int | None = None,
    ) -> AttentionSpec:
        """Describe layer i's attention.

        Args:
            i: the layer's index.
            qkv_bias, o_bias: whether the projections have a bias.
            head_norm: apply RMSNorm to each head of the queries and keys.
            window: the sliding window's size; None for full attention.
        """
        name = f"model.layers.{i}.self_attn"
        hidden: tuple[int, Axis] = (self.hidden, "hidden")
        queries: tuple[int, Axis] = (self.heads * self.head_dim, "q_heads")
        keys: tuple[int, Axis] = (self.kv_heads * self.head_dim, "kv_heads")
        norm_of = {
            part: WeightSpec(f"{name}.{part}_norm.weight", (self.head_dim,), ("head_dim",))
            for part in ("q", "k")
            if head_norm
        }
        return AttentionSpec(
            q=_linear(f"{name}.q_proj", queries, hidden, qkv_bias),
            k=_linear(f"{name}.k_proj", keys, hidden, qkv_bias),
            v=_linear(f"{name}.v_proj", keys, hidden, qkv_bias),
            o=_linear(f"{name}.o_proj", hidden, queries, o_bias),
            q_norm=norm_of.get("q"),
            k_norm=norm_of.get("k"),
            sliding_window=window,
        )

    def mlp(self, i: int, *, bias: bool = False) -> MlpSpec:
        """Describe layer i's dense MLP."""
        name = f"model.layers.{i}.mlp"
        hidden: tuple[int, Axis] = (self.hidden, "hidden")
        inner: tuple[int, Axis] = (self.fields.integer("intermediate_size"), "intermediate")
        return MlpSpec(
            gate=_linear(f"{name}.gate_proj", inner, hidden, bias),
            up=_linear(f"{name}.up_proj", inner, hidden, bias),
            down=_linear(f"{name}.down_proj", hidden, inner, bias),
        )

    def experts(
        self, i: int, block: str, matrices: tuple[str, str, str], *, width: int, normalize: bool
    ) -> MoeSpec:
        """Describe layer i's routed experts.

        `save_pretrained` in transformers 5 with `save_original_format=False` fuses all experts:
        `gate_up_proj` is [experts, 2 * width, hidden], `down_proj` is [experts, hidden, width].

        Args:
            i: the layer's index.
            block: the feed-forward's name in the layer, where each expert has its own tensors.
            matrices: each expert's gate, up and down matrix, by name.
            width: one expert's intermediate size.
            normalize: whether routing weights are divided by their sum.
        """
        count_field = "num_experts" if self.fields.has("num_experts") else "num_local_experts"
        count = self.fields.integer(count_field, high=MAX_PARTS)
        if self.fields.integer("num_local_experts", count) != count:
            raise self.fields.error("num_local_experts", f"the same as num_experts, {count}")
        top_k = self.fields.integer("num_experts_per_tok")
        if top_k > count:
            raise self.fields.error("num_experts_per_tok", f"at most {count_field}, {count}")
        name, fused = f"model.layers.{i}.{block}", f"model.layers.{i}.mlp"
        gate, up, down = (f"{name}.experts.{{expert}}.{matrix}.weight" for matrix in matrices)
        choices = (count, self.hidden)
        inner, outer = (count, width, self.hidden), (count, self.hidden, width)
        inner_axes: tuple[Axis, ...] = ("expert", "moe_intermediate", "hidden")
        gate_up, both = f"{fused}.experts.gate_up_proj", (count, 2 * width, self.hidden)
        return MoeSpec(
            router=WeightSpec(
                f"{name}.gate.weight",
                choices,
                ("choice", "hidden"),
                TensorBlock(f"{fused}.gate.weight", choices, (0, 0)),
            ),
            gate=WeightSpec(gate, inner, inner_axes, TensorBlock(gate_up, both, (0, 0, 0))),
            up=WeightSpec(up, inner, inner_axes, TensorBlock(gate_up, both, (0, width, 0))),
            down=WeightSpec(
                down,
                outer,
                ("expert", "hidden", "moe_intermediate"),
                TensorBlock(f"{fused}.experts.down_proj", outer, (0, 0, 0)),
            ),
            top_k=top_k,
            normalize=normalize,
        )


def _linear(name: str, out: tuple[int, Axis], into: tuple[int, Axis], bias: bool) -> LinearSpec:
    """Describe a projection; `out` and `into` are (size, axis) of its output and input."""
    (rows, row_axis), (columns, column_axis) = out, into
    return LinearSpec(
        WeightSpec(f"{name}.weight", (rows, columns), (row_axis, column_axis)),
        WeightSpec(f"{name}.bias", (rows,), (row_axis,)) if bias else None,
    )
