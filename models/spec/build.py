"""Hugging Face config.json -> ModelSpec.

Both generations of configs are read: `rope_theta` + `rope_scaling` + `torch_dtype`, and
`rope_parameters` + `dtype` of transformers 5. Sizes must be in the file. Other fields have the same
defaults as in `transformers`. If weft does not implement a value, `build_spec` raises a ModelError
with the field, the value and the supported values: a model runs right or not at all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.models.spec.config_fields import MAX_PARTS, Fields
from weft.models.spec.config_table import WRAPPER, refuse_others, unread
from weft.models.spec.decoder import Decoder
from weft.models.spec.families.attention import check_layer_types
from weft.models.spec.families.family import Family
from weft.models.spec.families.registry import ARCHITECTURES, FAMILIES, WRAPPERS
from weft.models.spec.quantization import UNUSED, read_quantization, unread_quantization
from weft.models.spec.rope_fields import read_rope
from weft.models.spec.spec import DTYPE_BYTES, LayerSpec, ModelSpec, with_stored

SKIPPED = (
    *("*.rotary_emb.inv_freq", "mtp.*", "v_head.*"),
    *("visual.*", "vision_tower.*", "vision_model.*", "multi_modal_projector.*"),
    *("model.visual.*", "model.vision_tower.*", "model.multi_modal_projector.*"),
)
"""Tensors without an effect on a text's next token: tables that older versions of transformers
saved, heads that predict several tokens, values for training, and image encoders."""


def build_spec(config: dict[str, Any], source: Path) -> ModelSpec:
    """Describe the model in a config.json.

    Args:
        config: the parsed file.
        source: its path, for messages.

    Raises:
        ModelError: a field is missing, or the architecture or a value is not supported.
    """
    whole = Fields(config, source)
    architecture = _architecture(whole)
    fields, family = _text_model(whole, architecture)
    refuse_others(fields, family.model_type)
    quantization = read_quantization(whole, fields)
    context = fields.integer("max_position_embeddings", family.max_position_embeddings)
    decoder = _decoder(fields, family, context)
    tied = _is_tied(whole, fields, architecture, family)
    layers = tuple(family.describe_layer(fields, decoder, i) for i in range(decoder.layers))
    check_layer_types(fields, decoder, layers)
    if quantization is not None:
        layers = tuple(with_stored(layer, quantization) for layer in layers)
    spec = ModelSpec(
        architecture=architecture,
        # Quantized checkpoints without the field are of models that are published in bfloat16.
        dtype=_dtype(whole, fields, "float32" if quantization is None else "bfloat16"),
        vocab_size=decoder.vocab,
        hidden_size=decoder.hidden,
        num_heads=decoder.heads,
        num_kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        max_model_len=min([context, *_chunks(layers)]),
        embedding=decoder.table(family.embedding, tied="lm_head" if tied else None),
        layers=layers,
        norm=decoder.norm("model.norm"),
        lm_head=None if tied else decoder.table("lm_head"),
        skipped=(
            *SKIPPED,
            *(pattern.format(layers=decoder.layers) for pattern in family.skipped),
            *(UNUSED if quantization else ()),
        ),
        quantization=quantization,
    )
    return spec if family.finish is None else family.finish(fields, spec)


def _chunks(layers: tuple[LayerSpec, ...]) -> list[int]:
    """Return the sizes of the chunks of layers that have some."""
    return [layer.attention.chunk for layer in layers if layer.attention.chunk is not None]


def unread_fields(config: dict[str, Any]) -> list[str]:
    """Return the unknown fields in a config.json, already accepted by `build_spec`.

    They have no effect in transformers either. A misspelt field has a suggestion.
    """
    whole = Fields(config, Path("config.json"))
    fields, family = _text_model(whole, _architecture(whole))
    names = [f"{fields.prefix}{name}" for name in unread(fields.values, family.model_type)]
    return names + unread_quantization(whole, fields)


def _architecture(fields: Fields) -> str:
    architecture = next(iter(fields.array("architectures")), None)
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise fields.error("architectures", f"one of {', '.join(ARCHITECTURES)}")
    return architecture


def _text_model(whole: Fields, architecture: str) -> tuple[Fields, Family]:
    """Return the language model's fields and family.

    transformers goes by the type: another family's may have tensors with the same names.
    """
    if (family := FAMILIES.get(architecture)) is not None:
        names = (family.model_type, *family.other_types)
        whole.choice("model_type", names, default=family.model_type)
        return whole, family
    wrapper = WRAPPERS[architecture]
    whole.choice("model_type", (wrapper.model_type,), default=wrapper.model_type)
    families = {family.model_type: family for family in wrapper.texts}
    if whole.has("text_config"):
        fields = whole.section("text_config")
        kind = fields.choice("model_type", tuple(families), default=wrapper.texts[0].model_type)
        return fields, families[kind]
    # Older files have all fields side by side.
    own = {name: value for name, value in whole.values.items() if name not in WRAPPER}
    return Fields(own, whole.source), wrapper.texts[0]


def _is_tied(whole: Fields, fields: Fields, architecture: str, family: Family) -> bool:
    """Tell whether the LM head is the embedding; `fields` are the language model's."""
    name = "tie_word_embeddings"
    tied = (whole if whole.has(name) else fields).flag(name, family.tied)
    if (wrapper := WRAPPERS.get(architecture)) is not None and wrapper.text_ties:
        return tied or fields.flag(name, False)
    return tied


def _decoder(fields: Fields, family: Family, context: int) -> Decoder:
    """Read the sizes that all layers share.

    Raises:
        ModelError: a size is missing or does not fit the others.
    """
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = _size(fields, "num_key_value_heads", family.kv_heads, heads)
    head_dim = _size(fields, "head_dim", family.head_dim, max(1, hidden // heads))
    if heads % kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    if head_dim % 2:
        raise fields.error("head_dim", f"an even number, not {head_dim}")
    return Decoder(
        fields=fields,
        vocab=fields.integer("vocab_size"),
        hidden=hidden,
        layers=fields.integer("num_hidden_layers", high=MAX_PARTS),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=fields.number(family.norms.eps_field, family.norm_eps),
        norms=family.norms,
        rope=read_rope(fields, head_dim, context, family.rope, "full_attention"),
        sliding_rope=read_rope(fields, head_dim, context, family.rope, "sliding_attention"),
    )


def _size(fields: Fields, name: str, absent: int | None, derived: int) -> int:
    """Read a size; null means the derived one, and so does an absent field without a default."""
    return fields.integer(name, derived if name in fields.values else absent or derived)


def _dtype(whole: Fields, fields: Fields, default: str) -> str:
    """Read the weights' dtype; the language model's own `fields` come first."""
    for holder in (fields, whole):
        for name in ("dtype", "torch_dtype"):
            if holder.has(name):
                return holder.choice(name, tuple(DTYPE_BYTES), default)
    return default
