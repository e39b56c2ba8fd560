"""A config.json's rotary embedding, read with transformers' priorities.

`rope_scaling` replaces `rope_parameters`. Inside it, `rope_theta` and `partial_rotary_factor` come
before those beside it; `original_max_position_embeddings` comes after the one beside it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, Protocol, get_args

from weft.errors import ModelError
from weft.models.spec.config_fields import Fields
from weft.models.spec.spec import RopeSpec

MIN_TURNS = 1e-6
"""Minimum of yarn's limits, in turns over the original context."""

Layers = Literal["full_attention", "sliding_attention"]
"""A kind of layers, as in `layer_types`."""

KINDS = ("default", "linear", "llama3", "yarn", "longrope")


class RopeDefaults(Protocol):
    """A family's values for absent fields; see families.Family."""

    @property
    def model_type(self) -> str:
        """The family."""

    @property
    def max_position_embeddings(self) -> int:
        """The context."""

    @property
    def rope_theta(self) -> float:
        """The wavelengths' base."""

    @property
    def rotated(self) -> float | None:
        """The part of a head that is rotated; None if the family always rotates all of it."""

    @property
    def neighbours(self) -> bool:
        """See RopeSpec."""

    @property
    def ropes_by_kind(self) -> bool:
        """Layers with and without a window have their own rotary embeddings."""


def read_rope(fields: Fields, head_dim: int, family: RopeDefaults, kind: Layers) -> RopeSpec:
    """Read the rotary embedding of one kind of layers.

    Raises:
        ModelError: a value is missing, unknown, or does not fit the others.
    """
    scaling = _of_kind(fields, family, kind) if family.ropes_by_kind else _of_all(fields)
    if family.model_type == "ministral3" and not scaling.values:
        raise ModelError(f"{fields.source}: {fields.prefix}rope_parameters is missing")
    context = fields.integer("max_position_embeddings", family.max_position_embeddings)
    theta = (scaling if scaling.has("rope_theta") else fields).number(
        "rope_theta", family.rope_theta
    )
    kind_field = "rope_type" if scaling.has("rope_type") else "type"
    rule = scaling.choice(kind_field, _kinds(family), default="default")
    if rule == "dynamic":  # a fixed factor in the base, and not one for each length
        theta = _stretched(scaling, theta, head_dim)
    base = RopeSpec(
        theta,
        dim=_rotated(fields, scaling, head_dim, family),
        neighbours=family.neighbours,
    )
    if rule in ("default", "dynamic", "mrope"):
        return base
    if family.model_type == "phi3":
        rule = "longrope"
    if rule == "linear":
        return replace(base, scaling="linear", factor=scaling.number("factor"))
    in_section = scaling.integer("original_max_position_embeddings", context)
    original = fields.integer(
        "original_max_position_embeddings",
        family.max_position_embeddings if family.model_type == "phi3" else in_section,
    )
    if rule == "llama3":
        return _llama3(scaling, replace(base, original_max_len=original))
    factor = scaling.number("factor", context / original)
    beta = scaling.number("llama_4_scaling_beta") if family.model_type == "ministral3" else 0.0
    scaled = replace(base, factor=factor, original_max_len=original, query_beta=beta)
    if rule == "yarn":
        return _yarn(scaling, scaled)
    return _longrope(scaling, replace(scaled, max_len=context))


def _of_all(fields: Fields) -> Fields:
    """Return the object for all layers."""
    scaling = fields.section("rope_scaling")
    if not scaling.values:
        scaling = fields.section("rope_parameters")
    for name, value in scaling.values.items():
        if isinstance(value, dict):
            raise scaling.error(name, "the same rotary embedding in all layers")
    return scaling


def _of_kind(fields: Fields, family: RopeDefaults, kind: Layers) -> Fields:
    """Return the object for one kind of layers.

    `rope_scaling`, and `rope_theta` beside the object, are for layers without a window.
    """
    parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    for name in parameters.values:
        if name not in get_args(Layers):
            raise parameters.error(name, "one object for each of " + ", ".join(get_args(Layers)))
    own = parameters.section(kind)
    if kind == "sliding_attention":
        return replace(own, values={"rope_theta": family.rope_theta} | own.values)
    return replace(scaling, values=own.values | scaling.values) if scaling.values else own


def _stretched(scaling: Fields, theta: float, head_dim: int) -> float:
    """Return the base for a context that is `alpha` times as long (NTK-aware scaling)."""
    if head_dim <= 2:
        raise scaling.error("alpha", f"no such field for heads with {head_dim} dimensions")
    try:
        stretched: float = theta * scaling.number("alpha") ** (head_dim / (head_dim - 2))
    except OverflowError:
        stretched = math.inf
    if stretched == math.inf:
        raise scaling.error("alpha", "a smaller number")
    return stretched


def _kinds(family: RopeDefaults) -> tuple[str, ...]:
    """Return the types of scaling that a family may have.

    Text has the same position on all of mrope's axes, so that it is the default there. Phi-3's old
    names for longrope are su and yarn. Ministral 3 scales queries as well, by yarn's context.
    """
    if family.model_type == "ministral3":
        return ("yarn",)
    if family.model_type.startswith("hunyuan"):
        return (*KINDS, "dynamic")
    if family.model_type == "phi3":
        return ("default", "longrope", "su", "yarn")
    return (*KINDS, "mrope") if "_vl" in family.model_type else KINDS


def _rotated(fields: Fields, scaling: Fields, head_dim: int, family: RopeDefaults) -> int:
    """Read how many dimensions of a head are rotated."""
    if family.rotated is None:
        return head_dim
    name = "partial_rotary_factor"
    given = scaling if scaling.has(name) else fields
    if family.model_type in ("bailing_moe", "minimax_m2") and not given.has(name):
        dim = fields.integer("rotary_dim", head_dim, high=head_dim)
        if dim % 2:
            raise fields.error("rotary_dim", "an even number")
        return dim
    part = given.number(name, family.rotated)
    dim = int(head_dim * part)
    if part > 1 or dim % 2 or not dim:
        raise given.error(name, f"a part with an even number of a head's {head_dim} dimensions")
    return dim


def _llama3(scaling: Fields, rope: RopeSpec) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error("low_freq_factor", f"less than high_freq_factor, {high}")
    return replace(
        rope,
        scaling="llama3",
        factor=scaling.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(scaling: Fields, rope: RopeSpec) -> RopeSpec:
    """Read yarn's parameters (Peng et al. 2023, section 3)."""
    slow, fast = scaling.number("beta_slow", 1.0), scaling.number("beta_fast", 32.0)
    if slow > fast:
        raise scaling.error("beta_slow", f"at most beta_fast, {fast}")
    if slow < MIN_TURNS:
        raise scaling.error("beta_slow", f"at least {MIN_TURNS}")
    if rope.theta <= 1:
        message = f"rope_theta is {rope.theta}; supported is more than 1 with yarn"
        raise ModelError(f"{scaling.source}: {message}")

    def amplitude(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    inferred = amplitude(1.0)
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        inferred = amplitude(scaling.number("mscale")) / amplitude(scaling.number("mscale_all_dim"))
    return replace(
        rope,
        scaling="yarn",
        beta_fast=fast,
        beta_slow=slow,
        truncate=scaling.flag("truncate", True),
        amplitude=scaling.number("attention_factor", inferred),
    )


def _longrope(scaling: Fields, rope: RopeSpec) -> RopeSpec:
    """Read longrope's parameters (Ding et al. 2024)."""
    inferred = 1.0
    if rope.original_max_len < 2:
        message = "original_max_position_embeddings is 1; supported is at least 2 with longrope"
        raise ModelError(f"{scaling.source}: {message}")
    if rope.factor > 1:
        inferred = math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_len))
    return replace(
        rope,
        scaling="longrope",
        short_factors=_factors(scaling, "short_factor", rope),
        long_factors=_factors(scaling, "long_factor", rope),
        amplitude=scaling.number("attention_factor", inferred),
    )


def _factors(scaling: Fields, name: str, rope: RopeSpec) -> tuple[float, ...]:
    factors = scaling.array(name)
    numbers = [type(each) in (int, float) and 0 < each < math.inf for each in factors]
    if len(factors) != rope.dim // 2 or not all(numbers):
        raise scaling.error(name, f"a list with {rope.dim // 2} numbers above 0")
    return tuple(map(float, factors))
