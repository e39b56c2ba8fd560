"""A model family, and a model for several modalities around one, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.models.spec.config_fields import Fields
from weft.models.spec.decoder import RMS, Decoder, NormRules
from weft.models.spec.rope_fields import PLAIN, RopeRules
from weft.models.spec.spec import LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model_type: its name in config.json.
        describe_layer: describes layer i.
        max_position_embeddings, norm_eps, tied: their values where config.json has none, as in
            transformers.
        kv_heads: the same for `num_key_value_heads`; None for as many as query heads.
        head_dim: the same; None for hidden_size / num_attention_heads.
        rope: its rotary embeddings.
        norms: the kind of its norms.
        embedding: its name in the checkpoint.
        other_types: other names of the family in config.json.
        finish: changes the described model; None if nothing is left to do.
        skipped: name patterns for more tensors without an effect; `{layers}` is the number of
            layers, because heads that predict several tokens are stored as layers.
    """

    model_type: str
    describe_layer: Callable[[Fields, Decoder, int], LayerSpec]
    max_position_embeddings: int
    norm_eps: float = 1e-6
    rope: RopeRules = PLAIN
    tied: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None
    norms: NormRules = RMS
    embedding: str = "model.embed_tokens"
    other_types: tuple[str, ...] = ()
    finish: Callable[[Fields, ModelSpec], ModelSpec] | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A model for several modalities. weft loads its text model.

    Attributes:
        model_type: its name in config.json.
        texts: the families that its text model may have; the first is the default.
        text_ties: `tie_word_embeddings` in the text model's fields counts also where the model's
            own is false.
    """

    model_type: str
    texts: tuple[Family, ...]
    text_ties: bool = False
