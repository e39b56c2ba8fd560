"""Tables of the fields in config.json: read, refused unless they have a certain value, or harmless.

weft ignores all other fields. A test compares the tables with the fields of transformers' classes.
"""

from __future__ import annotations

from typing import Any

from weft.models.spec.config_fields import Fields

READ = frozenset(
    {
        "architectures",
        "attention_bias",
        "decoder_sparse_step",
        "dtype",
        "head_dim",
        "hidden_act",
        "hidden_size",
        "intermediate_size",
        "layer_types",
        "max_position_embeddings",
        "max_window_layers",
        "mlp_bias",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_attention_heads",
        "num_experts",
        "num_experts_per_tok",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "original_max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "sliding_window",
        "tie_word_embeddings",
        "torch_dtype",
        "use_sliding_window",
        "vocab_size",
        # The tokenizer reads these.
        "bos_token_id",
        "eos_token_id",
    }
)
"""Fields with an effect on the model's numbers, or on the end of an answer."""

ONLY: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "hidden_act": ("silu", "swish"),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "mtp_layer_types": (),
    "partial_rotary_factor": (1, 1.0),
    "per_layer_config": (),
    "quantization_config": (),
}
"""Fields with their supported values; null is the same as absent."""

HARMLESS = frozenset(
    {
        # For training.
        "attention_dropout",
        "initializer_range",
        "output_router_logits",
        "pretraining_tp",
        "router_aux_loss_coef",
        "router_jitter_noise",
        # For what transformers' classes return, and how they compute it.
        "_attn_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_cache",
        # For other heads than the LM head, and for padded batches.
        "id2label",
        "label2id",
        "pad_token_id",
        "problem_type",
        # Where the file comes from.
        "_name_or_path",
        "auto_map",
        "transformers_version",
    }
)
"""Fields without an effect on answers."""


def refuse_others(fields: Fields) -> None:
    """Check the fields in `ONLY`.

    Raises:
        ModelError: a field has another value.
    """
    for name, allowed in ONLY.items():
        value = fields.values.get(name)
        known = any(type(value) is type(each) and value == each for each in allowed)
        if value is not None and not known:
            raise fields.error(name, " or ".join(map(repr, allowed)) or "no such field")
