"""A config.json's rotary embedding, read with transformers' priorities.

`rope_scaling` replaces `rope_parameters`. Inside it, `rope_theta` and `partial_rotary_factor` come
before those beside it; `original_max_position_embeddings` comes after the one beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from weft.errors import ModelError
from weft.models.spec.config_fields import Fields
from weft.models.spec.spec import RopeSpec

MIN_TURNS = 1e-6
"""Minimum of yarn's limits, in turns over the original context."""

Layers = Literal["full_attention", "sliding_attention"]
"""A kind of layers, as in `layer_types`."""

_ALL = {each: each for each in ("default", "linear", "llama3", "yarn", "longrope")}
DYNAMIC = _ALL | {"dynamic": "dynamic"}
MROPE = _ALL | {"mrope": "default"}
LONGROPE = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}
YARN = {"yarn": "yarn"}
"""Types of scaling, with the rule of each. Text has the same position on all of mrope's axes, and
Phi-3's old names for longrope are su and yarn."""


@dataclass(frozen=True, slots=True)
class RopeRules:
    """One family's rotary embeddings in config.json.

    Attributes:
        theta: `rope_theta`, where config.json has none, as in transformers.
        part: the same for `partial_rotary_factor`; None if the family always rotates whole heads.
        neighbours: as in RopeSpec.
        by_kind: layers with and without a window have their own rotary embeddings.
        has_dim: without `partial_rotary_factor`, `rotary_dim` counts.
        types: the types of scaling, with the rule of each.
        original_max_len: `original_max_position_embeddings`, where config.json has none beside the
            object; None to read it in the object.
        scales_queries: the object has `llama_4_scaling_beta`; see `RopeSpec.query_beta`.
    """

    theta: float = 10_000.0
    part: float | None = None
    neighbours: bool = False
    by_kind: bool = False
    has_dim: bool = False
    types: Mapping[str, str] = field(default_factory=lambda: _ALL)
    original_max_len: int | None = None
    scales_queries: bool = False


PLAIN = RopeRules()
"""Llama's."""


def read_rope(
    fields: Fields, head_dim: int, context: int, rules: RopeRules, kind: Layers
) -> RopeSpec:
    """Read the rotary embedding of one kind of layers.

    Args:
        fields: the config.
        head_dim: a head's dimensions.
        context: the model's `max_position_embeddings`.
        rules: the family's.
        kind: the kind of layers.

    Raises:
        ModelError: a value is missing, unknown, or does not fit the others.
    """
    scaling = _of_kind(fields, rules, kind) if rules.by_kind else _of_all(fields)
    theta = (scaling if scaling.has("rope_theta") else fields).number("rope_theta", rules.theta)
    type_field = "rope_type" if scaling.has("rope_type") else "type"
    rule = rules.types[scaling.choice(type_field, tuple(rules.types), default="default")]
    if rule == "dynamic":  # a fixed factor in the base, and not one for each length
        theta = _stretched(scaling, theta, head_dim)
    base = RopeSpec(
        theta,
        dim=_rotated(fields, scaling, head_dim, rules),
        neighbours=rules.neighbours,
    )
    if rule in ("default", "dynamic"):
        return base
    if rule == "linear":
        return replace(base, scaling="linear", factor=scaling.number("factor"))
    original = fields.integer(
        "original_max_position_embeddings",
        rules.original_max_len or scaling.integer("original_max_position_embeddings", context),
    )
    if rule == "llama3":
        return _llama3(scaling, replace(base, original_max_len=original))
    factor = scaling.number("factor", context / original)
    beta = scaling.number("llama_4_scaling_beta") if rules.scales_queries else 0.0
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


def _of_kind(fields: Fields, rules: RopeRules, kind: Layers) -> Fields:
    """Return the object for one kind of layers.

    `rope_scaling`, and `rope_theta` beside the object, are for layers without a window.
    """
    parameters, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    for name in parameters.values:
        if name not in get_args(Layers):
            raise parameters.error(name, "one object for each of " + ", ".join(get_args(Layers)))
    own = parameters.section(kind)
    if kind == "sliding_attention":
        return replace(own, values={"rope_theta": rules.theta} | own.values)
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


def _rotated(fields: Fields, scaling: Fields, head_dim: int, rules: RopeRules) -> int:
    """Read how many dimensions of a head are rotated."""
    if rules.part is None:
        return head_dim
    name = "partial_rotary_factor"
    given = scaling if scaling.has(name) else fields
    if rules.has_dim and not given.has(name):
        dim = fields.integer("rotary_dim", head_dim, high=head_dim)
        if dim % 2:
            raise fields.error("rotary_dim", "an even number")
        return dim
    part = given.number(name, rules.part)
    dim = int(head_dim * part)
    if part > 1 or dim % 2 or not dim:
        raise given.error(name, f"a part with an even number of a head's {head_dim} dimensions")
    return dim


def _llama3(scaling: Fields, rope: RopeSpec) -> RopeSpec:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        raise scaling.error("low_freq_factor", f"at most high_freq_factor, {high}")
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
