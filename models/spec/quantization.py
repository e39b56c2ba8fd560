"""Quantised checkpoints: config.json's `quantization_config` -> Quantization.

Each method is one entry in `METHODS`: the fields that weft reads, the fields with supported values,
and the fields without an effect on the weights. Sources: transformers' quantization_config.py (fp8,
awq, gptq, mxfp4), the packages compressed-tensors and torchao, and the export of NVIDIA's ModelOpt.

Activations stay in the compute dtype, so fields for their quantisation have no effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Any, Literal

from weft.errors import ModelError, shown
from weft.models.spec.config_fields import Fields

SECTION = "quantization_config"
Format = Literal[
    "fp8",
    "int8",
    "packed",
    "awq",
    "gptq",
    "gptq_v2",
    "mxfp4",
    "mxfp4_packed",
    "nvfp4",
    "nvfp4_modelopt",
    "fp8_torchao",
    "int8_torchao",
]


INTEGERS: frozenset[Format] = frozenset(
    ("int8", "packed", "awq", "gptq", "gptq_v2", "int8_torchao")
)
"""Formats of integers."""

NATIVE_GROUP = 32
"""Columns of int4 with one scale in the CPU's kernels."""


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """How a checkpoint stores a quantised matrix, [out, in].

    Attributes:
        format: "fp8": float8 e4m3 numbers. "int8": int8 numbers. "packed": compressed-tensors'
            int32 words. "awq", "gptq", "gptq_v2": words of these methods. "mxfp4": pairs of fp4
            e2m1 numbers in bytes, of stacked experts. "mxfp4_packed", "nvfp4": the same pairs as
            compressed-tensors stores them. "nvfp4_modelopt": as ModelOpt stores them.
            "fp8_torchao", "int8_torchao": fp8 and int8 under torchao's names.
        block: rows and columns that share a scale; 0 stands for all.
        bits: of one number.
        zero_points: whether each block has a zero point, too.
    """

    format: Format
    block: tuple[int, int]
    bits: int = 8
    zero_points: bool = False

    def native_bytes(self, shape: tuple[int, ...]) -> int | None:
        """Return the bytes of a rank's layers on a CPU; None if they have dequantised weights.

        See kernels/cpu/quantized.py; the rank that is cut worst counts.

        Args:
            shape: [..., N, K].
        """
        *leading, rows, columns = shape
        width = math.gcd(self.block[1], columns)
        of_row = None
        if self.format not in INTEGERS:
            return None
        if self.bits == 8 and not self.zero_points and self.block[1] in (0, columns):
            of_row = columns
        if self.bits == 4 and (width == columns or width % NATIVE_GROUP == 0):
            of_group = NATIVE_GROUP // 2 + 2 + self.zero_points  # codes, scale, zero point
            of_row = -(-columns // NATIVE_GROUP) * of_group
        return None if of_row is None else math.prod(leading) * rows * (of_row + 4)

    def packed_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a rank's PackedMatrix [..., N, K], or of one for each expert.

        The blocks are those of the rank that is cut worst.
        """
        *leading, rows, columns = shape
        height, width = (
            math.gcd(size, n) if size else n
            for size, n in zip(self.block, (rows, columns), strict=True)
        )
        width = width & -width if self.block[1] else width
        blocks = -(-rows // height) * -(-columns // width)
        of_block = 4 + self.zero_points  # a scale in float32, a zero point in int8
        return math.prod(leading) * (rows * columns * self.bits // 8 + blocks * of_block)


@dataclass(frozen=True, slots=True)
class Quantization:
    """The quantised matrices in a checkpoint.

    Attributes:
        groups: pairs of a regular expression for module names, and their QuantSpec. The first match
            counts.
        ignored: a regular expression for the names of modules that are not quantised.
        ignored_ends: ends of names of other modules that are not quantised.
        named: modules by name, with all modules inside them. The longest name counts, before
            `groups`.
    """

    groups: tuple[tuple[str, QuantSpec], ...]
    ignored: str
    ignored_ends: tuple[str, ...] = ()
    named: Mapping[str, QuantSpec] = field(default_factory=dict, hash=False)

    def of(self, module: str) -> QuantSpec | None:
        """Return a module's QuantSpec; None if the module is not quantised."""
        if module.endswith(self.ignored_ends) or re.match(self.ignored, module):
            return None
        holder = module
        while holder:
            if holder in self.named:
                return self.named[holder]
            holder = holder.rpartition(".")[0]
        return next((spec for pattern, spec in self.groups if re.match(pattern, module)), None)

    @property
    def formats(self) -> frozenset[Format]:
        """The formats in use."""
        specs = (*(spec for _, spec in self.groups), *self.named.values())
        return frozenset(spec.format for spec in specs)


UNUSED = (
    *("*.input_scale", "*.input_global_scale", "*.input_zero_point", "*activation_scale"),
    *("*.output_scale", "*.output_zero_point"),
    *("*.q_scale", "*.k_scale", "*.v_scale", "*.q_zero_point", "*.k_zero_point", "*.v_zero_point"),
)
"""Scales of quantised activations, which weft does not use, and of caches. An fp8 cache takes the
scales of keys and values (`Weights.cache_scale`)."""

NONE = r"(?!)"
ALL = ""
EXPERTS = r".*\.experts\."
"""Regular expressions that match no name, all names, and experts' names."""


def read_quantization(*holders: Fields) -> Quantization | None:
    """Read `quantization_config`; None if the model is not quantised.

    Args:
        holders: the objects that may have it; the first one counts.

    Raises:
        ModelError: the method, or a field's value, is not supported.
    """
    if (section := _section(holders)) is None:
        return None
    method = METHODS[section.choice("quant_method", tuple(METHODS), default="")]
    _check(section, method.only)
    return method.read(section)


def unread_quantization(*holders: Fields) -> list[str]:
    """Return the unknown fields in a `quantization_config` that `read_quantization` accepted."""
    if (section := _section(holders)) is None:
        return []
    method = METHODS[section.values["quant_method"]]
    known = {"quant_method", *method.fields, *method.only, *method.harmless}
    names = (name for name in section.values if section.has(name) and name not in known)
    return [f"{section.prefix}{name}" for name in names]


def _section(holders: Sequence[Fields]) -> Fields | None:
    """Return the first `quantization_config`."""
    return next((each.section(SECTION) for each in holders if each.has(SECTION)), None)


@dataclass(frozen=True, slots=True)
class Method:
    """One `quant_method`.

    Attributes:
        read: reads the section.
        fields: the fields that it reads.
        only: fields with their supported values; null is the same as absent.
        harmless: fields without an effect on the weights.
    """

    read: Callable[[Fields], Quantization]
    fields: frozenset[str]
    only: Mapping[str, tuple[Any, ...]]
    harmless: frozenset[str]


def _fp8(fields: Fields) -> Quantization:
    block = _block(fields, "weight_block_size") if fields.has("weight_block_size") else (0, 0)
    names = "modules_to_not_convert" if fields.has("modules_to_not_convert") else "ignored_layers"
    return _except(QuantSpec("fp8", block), fields, names)


def _modelopt(fields: Fields) -> Quantization:
    algorithm = fields.choice("quant_algo", (*MODELOPT, MIXED), default="")
    # ModelOpt writes `ignore` into config.json, and `exclude_modules` into hf_quant_config.json.
    names = "ignore" if fields.has("ignore") else "exclude_modules"
    patterns = [translate(each) for each in _strings(fields, names)]
    patterns += [translate(f"{each}.*") for each in _strings(fields, names)]
    ignored = _any_of(fields, names, patterns)
    if algorithm != MIXED:
        return Quantization(((ALL, MODELOPT[algorithm]),), ignored)
    layers = fields.section("quantized_layers")
    if not layers.values:
        raise fields.error("quantized_layers", "at least one layer")
    named = {}
    for name in layers.values:
        layer = layers.section(name)
        _check(layer, MODELOPT_ONLY)
        named[name] = MODELOPT[layer.choice("quant_algo", tuple(MODELOPT), default="")]
    return Quantization((), ignored, named=named)


MODELOPT = {
    "FP8": QuantSpec("fp8", (0, 0)),
    "NVFP4": QuantSpec("nvfp4_modelopt", (1, 16), bits=4),
    "W4A16_NVFP4": QuantSpec("nvfp4_modelopt", (1, 16), bits=4),
}
"""ModelOpt's algorithms; the last two differ in their activations alone."""
MODELOPT_ONLY: Mapping[str, tuple[Any, ...]] = {"group_size": (0, 16)}
"""ModelOpt writes a size of 0 where an algorithm has none."""
MIXED = "MIXED_PRECISION"


def _awq(fields: Fields) -> Quantization:
    spec = QuantSpec("awq", (1, _group_size(fields)), bits=4, zero_points=True)
    return _except(spec, fields)


def _gptq(fields: Fields) -> Quantization:
    bits = fields.integer("bits")
    if bits not in (4, 8):
        raise fields.error("bits", "4 or 8")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    version = fields.choice(name, ("gptq", "gptq_v2"), default="gptq")
    dynamic = fields.section("dynamic").values
    if changed := [each for each in dynamic if not each.startswith("-:")]:
        raise ModelError(
            f"{fields.source}: {fields.prefix}dynamic has {shown(changed[0])}; supported are names "
            "that begin with -:, for modules without quantization"
        )
    patterns = [each.removeprefix("-:") for each in dynamic]
    spec = QuantSpec(
        "gptq" if version == "gptq" else "gptq_v2",
        (1, _group_size(fields)),
        bits=bits,
        zero_points=True,
    )
    return Quantization(((ALL, spec),), _any_of(fields, "dynamic", patterns))


def _mxfp4(fields: Fields) -> Quantization:
    found = _except(QuantSpec("mxfp4", (1, 32), bits=4), fields)
    return replace(found, groups=tuple((EXPERTS, spec) for _, spec in found.groups))


def _torchao(fields: Fields) -> Quantization:
    config = fields.section("quant_type").section("default")
    stored = TORCHAO[config.choice("_type", tuple(TORCHAO), default="")]
    _check(config, {"_version": (2,)})
    options = config.section("_data")
    if options.has("group_size"):
        raise options.error("group_size", "null: granularity has the size")
    for name, value in {"weight_dtype": "float8_e4m3fn", "packing_format": "PLAIN"}.items():
        if options.section(name).values.get("_data", value) != value:
            raise options.error(name, value)
    # A list has the activations' granularity first.
    either = options.values.get("granularity")
    last = either[-1] if isinstance(either, list) and either else either
    given = Fields({"granularity": last}, options.source, options.prefix)
    kind = given.section("granularity")
    shared = kind.choice("_type", ("PerRow", "PerTensor", "PerGroup"), default="")
    size = kind.section("_data").integer("group_size") if shared == "PerGroup" else 0
    block = (0, 0) if shared == "PerTensor" else (1, size)
    spec = QuantSpec(stored, block, zero_points=stored == "int8_torchao")
    return _except(spec, fields)


TORCHAO: Mapping[str, Format] = {
    "Float8DynamicActivationFloat8WeightConfig": "fp8_torchao",
    "Float8WeightOnlyConfig": "fp8_torchao",
    "Int8DynamicActivationInt8WeightConfig": "int8_torchao",
    "Int8WeightOnlyConfig": "int8_torchao",
}
"""torchao's configs whose tensors hold plain numbers, [out, in]."""


def _compressed_tensors(fields: Fields) -> Quantization:
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        section = fields.section(name)
        if section.values and section.values.get("format") != "dense":
            raise fields.error(name, "none: weft supports quantization alone")
    groups = fields.section("config_groups")
    if not groups.values:
        raise fields.error("config_groups", "at least one group")
    by_name, by_class = [], []
    for name in groups.values:
        group = groups.section(name)
        if not group.has("weights"):
            continue  # quantises activations only
        spec = _compressed_tensors_group(group, fields)
        targets = _strings(group, "targets")
        # As in compressed-tensors, a module's name comes before its class.
        by_name.append((_compressed_tensors_names(group, "targets"), spec))
        by_class += [(ALL, spec)] if "Linear" in targets else []
    return Quantization((*by_name, *by_class), _compressed_tensors_names(fields, "ignore"))


def _compressed_tensors_group(group: Fields, section: Fields) -> QuantSpec:
    _check_known(group, GROUP)
    weights = group.section("weights")
    _check_known(weights, WEIGHTS)
    _check(weights, {"dynamic": (False,), "actorder": (False, "weight", "static")})
    holder = group if group.has("format") else section
    stored = holder.choice("format", tuple(COMPRESSED), default="")
    kind = weights.choice("type", ("int", "float"), default="int")
    if kind not in COMPRESSED[stored]:
        raise holder.error("format", f"not {stored!r} with {weights.prefix}type {kind!r}")
    numbers = COMPRESSED[stored][kind]
    bits = weights.integer("num_bits", 8)
    if bits not in numbers.bits:
        raise weights.error("num_bits", " or ".join(map(str, numbers.bits)))
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        raise weights.error("symmetric", "true, with type 'float'")
    block = _compressed_tensors_block(weights, numbers)
    return QuantSpec(numbers.format, block, bits=bits, zero_points=not symmetric)


def _compressed_tensors_block(weights: Fields, numbers: _Numbers) -> tuple[int, int]:
    size = weights.values.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = weights.choice("strategy", numbers.strategies, default=default)
    if strategy == "block":
        return _block(weights, "block_structure")
    if strategy in ("group", "tensor_group"):
        size = weights.integer("group_size")
        if size != (numbers.group_size or size):
            raise weights.error("group_size", str(numbers.group_size))
        return 1, size
    return (1, 0) if strategy == "channel" else (0, 0)


@dataclass(frozen=True, slots=True)
class _Numbers:
    """One type of numbers in one of compressed-tensors' formats.

    Attributes:
        format: QuantSpec's.
        bits, strategies: the supported ones.
        group_size: the only one; 0 stands for any.
    """

    format: Format
    bits: tuple[int, ...]
    strategies: tuple[str, ...] = ("tensor", "channel", "group", "block")
    group_size: int = 0


COMPRESSED = {
    "float-quantized": {"float": _Numbers("fp8", (8,))},
    "int-quantized": {"int": _Numbers("int8", (4, 8))},
    "naive-quantized": {"float": _Numbers("fp8", (8,)), "int": _Numbers("int8", (4, 8))},
    "pack-quantized": {"int": _Numbers("packed", (4, 8), ("channel", "group"))},
    "mxfp4-pack-quantized": {"float": _Numbers("mxfp4_packed", (4,), ("group",), 32)},
    "nvfp4-pack-quantized": {"float": _Numbers("nvfp4", (4,), ("tensor_group",), 16)},
}
"""compressed-tensors' formats, with their types of numbers."""
GROUP = frozenset({"format", "input_activations", "output_activations", "targets", "weights"})
WEIGHTS = frozenset(
    {
        "actorder",
        "block_structure",
        "dynamic",
        "group_size",
        "num_bits",
        "observer",
        "observer_kwargs",
        "scale_dtype",
        "strategy",
        "symmetric",
        "type",
        "zp_dtype",
    }
)
"""All fields of a group and of its weights; compressed-tensors refuses others, too."""


METHODS = {
    "fp8": Method(
        _fp8,
        frozenset({"ignored_layers", "modules_to_not_convert", "weight_block_size"}),
        {
            "activation_scheme": ("dynamic", "static"),
            "expert_dtype": ("fp8",),
            "fmt": ("e4m3", "float8_e4m3fn"),
            "scale_fmt": ("float", "ue8m0"),
        },
        # The tensors themselves say which other modules are quantised.
        frozenset({"dequantize", "is_checkpoint_fp8_serialized", "modules_to_convert"}),
    ),
    "compressed-tensors": Method(
        _compressed_tensors,
        frozenset(
            {
                "config_groups",
                "format",
                "ignore",
                "moe_sparsity_config",
                "sparsity_config",
                "transform_config",
            }
        ),
        {"quantization_status": ("compressed", "frozen")},
        frozenset({"global_compression_ratio", "kv_cache_scheme", "run_compressed", "version"}),
    ),
    "modelopt": Method(
        _modelopt,
        frozenset({"exclude_modules", "ignore", "quant_algo", "quantized_layers"}),
        MODELOPT_ONLY,
        # Its groups repeat what `quant_algo` says.
        frozenset({"config_groups", "kv_cache_quant_algo", "kv_cache_scheme", "producer"}),
    ),
    "awq": Method(
        _awq,
        frozenset({"group_size", "modules_to_not_convert"}),
        {
            "bits": (4,),
            "format": ("gemm",),
            "version": ("gemm", "GEMM"),
            "zero_point": (True,),
            "desc_act": (False,),
        },
        frozenset(
            {
                "backend",
                "do_fuse",
                "exllama_config",
                "fuse_max_seq_len",
                "modules_to_fuse",
            }
        ),
    ),
    "gptq": Method(
        _gptq,
        frozenset({"bits", "checkpoint_format", "dynamic", "format", "group_size"}),
        {"desc_act": (False,), "is_marlin_format": (False,), "pack_dtype": ("int32",)},
        frozenset(
            {
                "act_group_aware",
                "backend",
                "batch_size",
                "block_name_to_quantize",
                "cache_block_outputs",
                "damp_percent",
                "dataset",
                "disable_exllama",
                "exllama_config",
                "lm_head",
                "max_input_length",
                "meta",
                "model_file_base_name",
                "model_name_or_path",
                "model_seqlen",
                "module_name_preceding_first_block",
                "modules_in_block_to_quantize",
                "pad_token_id",
                "static_groups",
                "sym",
                "tokenizer",
                "true_sequential",
                "use_cuda_fp16",
                "use_exllama",
            }
        ),
    ),
    "torchao": Method(
        _torchao,
        frozenset({"modules_to_not_convert", "quant_type"}),
        {"include_input_output_embeddings": (False,), "untie_embedding_weights": (False,)},
        frozenset({"quant_type_kwargs"}),
    ),
    "mxfp4": Method(_mxfp4, frozenset({"modules_to_not_convert"}), {}, frozenset({"dequantize"})),
}


def _check(fields: Fields, only: Mapping[str, tuple[Any, ...]]) -> None:
    for name, allowed in only.items():
        value = fields.values.get(name)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise fields.error(name, " or ".join(map(shown, allowed)))


def _check_known(fields: Fields, known: frozenset[str]) -> None:
    for name in fields.values:
        if fields.has(name) and name not in known:
            raise fields.error(name, "no such field")


def _group_size(fields: Fields) -> int:
    """Read the columns that share a scale; -1 stands for all."""
    if fields.values.get("group_size") == -1:
        return 0
    return fields.integer("group_size", 128)


def _block(fields: Fields, name: str) -> tuple[int, int]:
    """Read a block's rows and columns."""
    value = fields.array(name)
    if len(value) == 2 and all(type(size) is int and size > 0 for size in value):
        return value[0], value[1]
    raise fields.error(name, "[rows, columns], for example [128, 128]")


def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.array(name)
    if not all(isinstance(value, str) for value in values):
        raise fields.error(name, "a list of names")
    return values


def _except(spec: QuantSpec, fields: Fields, name: str = "modules_to_not_convert") -> Quantization:
    """Quantise all but a list of modules, by transformers' rule (`should_convert_module`).

    An entry matches a name up to the end of one of its parts, as a regular expression, or at the
    name's end.
    """
    names = _strings(fields, name)
    patterns = [rf"(?:{each})(?:(?<=\.)|(?=\.|$))" for each in names]
    return Quantization(((ALL, spec),), _any_of(fields, name, patterns), tuple(names))


def _compressed_tensors_names(fields: Fields, name: str) -> str:
    """Return an expression for compressed-tensors' rule: whole names, and `re:` patterns."""
    names = _strings(fields, name)
    patterns = [
        each.removeprefix("re:") if each.startswith("re:") else f"{re.escape(each)}$"
        for each in names
    ]
    return _any_of(fields, name, patterns)


def _any_of(fields: Fields, name: str, patterns: Sequence[str]) -> str:
    """Join expressions; check them."""
    joined = "|".join(f"(?:{pattern})" for pattern in patterns) or NONE
    try:
        re.compile(joined)
    except re.error as error:
        raise ModelError(
            f"{fields.source}: {fields.prefix}{name} has a wrong regular expression: {error}"
        ) from error
    return joined
