"""Schemes of quantised checkpoints that weft writes, and their section in config.json.

Names and fields are those of the package compressed-tensors 0.20 (quant_scheme.py), which vLLM's
users know. Its W8A16 has groups of 128; here it has a scale for each row unless the user names a
group's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from weft.models.spec.quantization import QuantSpec

GROUP_SIZES = (32, 64, 128)
"""Columns that may share a scale; vLLM's int4 kernels have these."""
FILE_FORMATS = {"packed": "pack-quantized", "int8": "int-quantized", "fp8": "float-quantized"}
"""compressed-tensors' names for QuantSpec's formats."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How to quantise all matrices of a model.

    Attributes:
        name: compressed-tensors' name of the scheme.
        spec: the stored form of a matrix.
        activations: how a server rounds activations; {} for not at all. The checkpoint says so,
            but no tensor depends on it.
    """

    name: str
    spec: QuantSpec
    activations: Mapping[str, Any] = field(default_factory=dict)

    @property
    def takes_groups(self) -> bool:
        """True if the size of a group, the columns of a row that share a scale, may be chosen."""
        return self.spec.format == "packed"

    @property
    def unit(self) -> int:
        """The number that must divide a matrix's columns: a group's size, or a word's."""
        if self.spec.format != "packed":
            return 1
        return self.spec.block[1] or 32 // self.spec.bits

    def with_groups(self, size: int) -> Scheme:
        """Return the scheme with groups of another size."""
        return replace(self, spec=replace(self.spec, block=(1, size)))


def _dynamic(strategy: str, kind: str, group_size: int | None = None) -> dict[str, Any]:
    return _arguments(kind, 8, strategy, group_size=group_size) | {"dynamic": True}


def _arguments(
    kind: str, bits: int, strategy: str, *, group_size: int | None = None, symmetric: bool = True
) -> dict[str, Any]:
    """Return compressed-tensors' QuantizationArgs."""
    return {
        "num_bits": bits,
        "type": kind,
        "symmetric": symmetric,
        "group_size": group_size,
        "strategy": strategy,
        "dynamic": False,
    }


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("W4A16", QuantSpec("packed", (1, 128), 4)),
        Scheme("W4A16_ASYM", QuantSpec("packed", (1, 128), 4, zero_points=True)),
        Scheme("W8A16", QuantSpec("packed", (1, 0), 8)),
        Scheme("W8A8", QuantSpec("int8", (1, 0), 8), _dynamic("token", "int")),
        Scheme("FP8_DYNAMIC", QuantSpec("fp8", (1, 0)), _dynamic("token", "float")),
        Scheme("FP8_BLOCK", QuantSpec("fp8", (128, 128)), _dynamic("group", "float", 128)),
    )
}


def quantization_config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Return `quantization_config` for config.json, as compressed-tensors 0.20 writes it.

    Args:
        scheme: of all matrices but the ignored ones.
        ignored: names of linear modules that are not quantised.
    """
    spec, stored = scheme.spec, FILE_FORMATS[scheme.spec.format]
    height, width = spec.block
    strategy = "block" if height > 1 else "group" if width else "channel"
    weights = _arguments(
        "float" if spec.format == "fp8" else "int",
        spec.bits,
        strategy,
        group_size=width if strategy == "group" else None,
        symmetric=not spec.zero_points,
    )
    if strategy == "block":
        weights["block_structure"] = list(spec.block)
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": dict(scheme.activations) or None,
        "output_activations": None,
        "format": stored,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
