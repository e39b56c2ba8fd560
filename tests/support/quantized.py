"""Quantised copies of checkpoints in publishers' formats, written from the formats' definitions.

`quantize` writes two checkpoints: the quantised one, and one with the numbers that it stands for.
Nothing here uses weft.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
FILE = "model.safetensors"
LINEAR = {"targets": ["Linear"]}
ROUTER = r"\.mlp\.gate\.|router\.layer\.|correction_bias$"
"""Names of routers and their biases."""


@dataclass(frozen=True)
class Format:
    """One format: config.json's section, and a function that packs a matrix.

    `pack` takes a matrix [out, in] and its name, and returns the tensors in the file and the
    numbers that they stand for, float32.
    """

    config: dict[str, Any]
    pack: Callable[[str, Tensor], tuple[Tensors, Tensor]]


def quantize(source: Path, folder: Path, form: Format, *, files: int = 1) -> tuple[Path, Path]:
    """Write the checkpoint `source` quantised, and dequantised, into two folders of `folder`.

    Matrices of layers are quantised, except routers. Scales and codes alternate between the files.
    """
    quantized, plain = folder / "quantized", folder / "plain"
    tensors = load_file(source / FILE)
    packed: Tensors = {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() > 1 and ".layers." in name and not re.search(ROUTER, name):
            parts, tensors[name] = form.pack(name, tensor.float())
            packed |= {each: part.contiguous() for each, part in parts.items()}
        else:
            packed[name] = tensor
    for path, held in ((quantized, packed), (plain, tensors)):
        path.mkdir()
        for file in source.iterdir():
            if file.suffix in (".json", ".jinja"):
                shutil.copy(file, path)
        write(path, held, files)
    edit_config(quantized, quantization_config=form.config)
    return quantized, plain


def write(path: Path, tensors: Mapping[str, Tensor], files: int = 1) -> None:
    """Write tensors into files, in turn."""
    if files == 1:
        save_file(dict(tensors), path / FILE)
        return
    names = [f"model-{i:05}-of-{files:05}.safetensors" for i in range(1, files + 1)]
    place = {tensor: names[i % files] for i, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({t: tensors[t] for t in tensors if place[t] == name}, path / name)
    (path / f"{FILE}.index.json").write_text(json.dumps({"weight_map": place}))


def stack_experts(path: Path, *, transposed: bool) -> None:
    """Join the experts of a qwen3_moe checkpoint as transformers does: [experts, out, in].

    Transposed, as in GPT-OSS, they are [experts, in, out].
    """
    tensors = load_file(path / FILE)
    routers = [name for name in tensors if name.endswith("mlp.gate.weight")]
    for router in routers:
        stem, count = router.replace("gate.weight", "experts"), len(tensors[router])

        def all_of(kind: str, stem: str = stem, count: int = count) -> Tensor:
            return torch.stack([tensors.pop(f"{stem}.{e}.{kind}.weight") for e in range(count)])

        gate_up = torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1)
        joined = {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": all_of("down_proj")}
        for name, tensor in joined.items():
            tensors[name] = (tensor.mT if transposed else tensor).contiguous()
    save_file(tensors, path / FILE)


def edit_config(path: Path, **fields: Any) -> None:
    """Set fields in a checkpoint's config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def spread(grid: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """Repeat each block's value for all of its elements."""
    wide = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def largest(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude in each block; blocks at the end may be smaller."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    whole = torch.zeros(rows * block[0], columns * block[1])
    whole[: weight.shape[0], : weight.shape[1]] = weight.abs()
    return whole.view(rows, block[0], columns, block[1]).amax((1, 3))


def to_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack numbers on the last axis into int32 words, the lowest bits first."""
    each = 32 // bits
    count = -(-numbers.shape[1] // each) * each
    whole = np.zeros((numbers.shape[0], count), np.uint32)
    whole[:, : numbers.shape[1]] = numbers.numpy().astype(np.int64) & (1 << bits) - 1
    words = np.zeros((numbers.shape[0], count // each), np.uint32)
    for i in range(each):
        words |= whole[:, i::each] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32))


def fp8(
    config: dict[str, Any],
    block: tuple[int, int] | None,
    end: str = "_scale_inv",
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] | None = None,
    more: Mapping[str, float] = {},
) -> Format:
    """Make a format of float8 e4m3 numbers.

    Args:
        config: the section of config.json.
        block: rows and columns with one scale; 0 stands for all, None for the whole matrix.
        end: the end of the scales' names.
        dtype: of the scales; float8_e8m0fnu rounds them to powers of two.
        shape: the scales' shape in the file.
        more: other scalars of each module, by the end of their names.
    """

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if weight.dim() == 3:
            each = [pack(name, expert) for expert in weight]
            stacked = {part: torch.stack([parts[part] for parts, _ in each]) for part in each[0][0]}
            return stacked, torch.stack([value for _, value in each])
        sizes = tuple(b or n for b, n in zip(block or (0, 0), weight.shape, strict=True))
        scale = largest(weight, sizes) / 448
        if dtype == torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        scale = scale.to(dtype)
        wide = spread(scale.float(), sizes, weight.shape)
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = scale if shape is None else scale.reshape(shape)
        module = name.removesuffix("weight")
        scalars = {module + each: torch.tensor(value) for each, value in more.items()}
        return {name: codes, name + end: stored, **scalars}, codes.float() * wide

    return Format(config, pack)


def integers(
    config: dict[str, Any],
    bits: int,
    block: tuple[int, int],
    *,
    zeros: bool = False,
    packed: bool = False,
) -> Format:
    """Make a format of compressed-tensors' integers, packed into words or not."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        sizes = tuple(b or n for b, n in zip(block, weight.shape, strict=True))
        half = 1 << bits - 1
        scale = (largest(weight, sizes) / (half - 1)).to(torch.bfloat16)
        generator = torch.Generator().manual_seed(len(name))
        points = torch.randint(-half, half, scale.shape, generator=generator)
        points = points if zeros else torch.zeros_like(points)
        wide, wide_points = (spread(each, sizes, weight.shape) for each in (scale, points))
        codes = (weight / wide.float()).round().add(wide_points).clamp(-half, half - 1)
        tensors: Tensors = {f"{name}_scale": scale}
        if packed:
            tensors[f"{name}_packed"] = to_words(codes + half, bits)
            tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        else:
            tensors[name] = codes.to(torch.int8)
        if zeros:
            stored = to_words(points.t() + half, bits).t() if packed else points.to(torch.int8)
            tensors[f"{name}_zero_point"] = stored
        return tensors, (codes - wide_points) * wide.float()

    return Format(config, pack)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column in each place of a word, from the lowest bits on (AutoAWQ's WQLinear_GEMM)."""


def awq(config: dict[str, Any], group: int) -> Format:
    """Make AutoAWQ's format "gemm": words of eight columns of [in, out]."""

    def words(numbers: Tensor) -> Tensor:
        return to_words(numbers.view(len(numbers), -1, 8)[:, :, AWQ_ORDER].flatten(1), 4)

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, points, value = _groups(weight, 4, group, name)
        stem = name.removesuffix("weight")
        tensors = {
            f"{stem}qweight": words(codes.t()),
            f"{stem}qzeros": words(points.t()),
            f"{stem}scales": scale.t(),
        }
        return tensors, value

    return Format(config, pack)


def gptq(config: dict[str, Any], bits: int, group: int, *, less: int = 1) -> Format:
    """Make GPTQ's format: words of rows of [in, out]; zero points are stored less one in v1."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        codes, scale, points, value = _groups(weight, bits, group, name)
        stem = name.removesuffix("weight")
        columns = torch.arange(weight.shape[1])
        tensors = {
            f"{stem}qweight": to_words(codes, bits).t(),
            f"{stem}qzeros": to_words(points.t() - less, bits),
            f"{stem}scales": scale.t(),
            f"{stem}g_idx": (columns // (group or len(columns))).int(),
            f"{stem}bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return tensors, value

    return Format(config, pack)


def _groups(
    weight: Tensor, bits: int, group: int, name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return unsigned codes, float16 scales, random zero points of at least 1, and the values."""
    sizes = (1, group or weight.shape[1])
    scale = (2 * largest(weight, sizes) / ((1 << bits) - 1)).half()
    generator = torch.Generator().manual_seed(len(name))
    points = torch.randint(1, 1 << bits, scale.shape, generator=generator)
    wide, wide_points = (spread(each, sizes, weight.shape) for each in (scale, points))
    codes = (weight / wide.float()).round().add(wide_points).clamp(0, (1 << bits) - 1)
    return codes.int(), scale, points, (codes - wide_points) * wide.float()


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4(config: dict[str, Any]) -> Format:
    """Make the format of GPT-OSS: experts [experts, in, out] as blocks of 32 fp4 e2m1 numbers.

    Other matrices are not quantised.
    """

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        if weight.dim() < 3:
            return {name: weight}, weight
        blocks = weight.mT.unflatten(2, (-1, 32))  # [experts, out, groups, 32]
        exponent = blocks.abs().amax(-1).log2().floor() - 2
        pairs, numbers = e2m1_pairs(blocks / exponent.exp2().unsqueeze(-1))
        values = numbers * exponent.exp2().unsqueeze(-1)
        tensors = {f"{name}_blocks": pairs, f"{name}_scales": (exponent + 127).to(torch.uint8)}
        return tensors, values.flatten(2).mT.contiguous()

    return Format(config, pack)


def e2m1_pairs(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Round to fp4 e2m1: two numbers in each byte, the lower bits first, and the numbers."""
    codes = (numbers.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
    values = E2M1[codes] * numbers.sign()
    codes += 8 * (numbers < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), values


def mxfp4_packed(config: dict[str, Any]) -> Format:
    """Make compressed-tensors' format of fp4 e2m1 numbers with powers of two."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        exponent = largest(weight, (1, 32)).log2().floor() - 2
        wide = spread(exponent.exp2(), (1, 32), weight.shape)
        pairs, numbers = e2m1_pairs(weight / wide)
        scale = (exponent + 127).to(torch.uint8)
        return {f"{name}_packed": pairs, f"{name}_scale": scale}, numbers * wide

    return Format(config, pack)


def nvfp4(config: dict[str, Any], *, modelopt: bool) -> Format:
    """Make fp4 e2m1 numbers with float8 scales and a global scale.

    ModelOpt's global scale multiplies, a scalar; that of compressed-tensors divides.
    """

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        whole = weight.abs().max() / (6 * 448)
        whole = whole if modelopt else (1 / whole).reshape(1)
        fine = largest(weight, (1, 16)) / 6
        scale = (fine / whole if modelopt else fine * whole).clamp(2**-9).to(torch.float8_e4m3fn)
        grid = scale.float() * whole if modelopt else scale.float() / whole
        wide = spread(grid, (1, 16), weight.shape)
        pairs, numbers = e2m1_pairs(weight / wide)
        ends = ("", "_scale_2") if modelopt else ("_packed", "_global_scale")
        module = name.removesuffix("weight")
        unused = "input_scale" if modelopt else "input_global_scale"
        tensors = {
            name + ends[0]: pairs,
            f"{name}_scale": scale,
            name + ends[1]: whole,
            module + unused: torch.tensor([37.5]),
        }
        return tensors, numbers * wide

    return Format(config, pack)


def torchao(form: Format, config: dict[str, Any]) -> Format:
    """Give fp8 or int8 numbers the names of torchao's `flatten_tensor_state_dict`."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        tensors, values = form.pack(name, weight)
        stem = name.removesuffix("weight") + "_weight_"
        parts = {each.removeprefix(name): tensor for each, tensor in tensors.items()}
        names = {end: end.removeprefix("_") or "qdata" for end in parts}
        return {stem + names[end]: tensor for end, tensor in parts.items()}, values

    section = {"quant_method": "torchao", "quant_type": {"default": config}, **NOT_CONVERTED}
    return Format(section, pack)


def torchao_config(name: str, granularity: Any, **options: Any) -> dict[str, Any]:
    """Make the `quant_type` that torchao 0.18 writes."""
    data = {"group_size": None, "granularity": granularity, "set_inductor_config": True}
    return {"_type": name, "_version": 2, "_data": data | options}


def by_module(config: dict[str, Any], one: Format, other: Format) -> Format:
    """Make a checkpoint with attention in one format and the rest in another."""

    def pack(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        return (other if ".mlp." in name else one).pack(name, weight)

    return Format(config, pack)


def compressed(stored: str, **weights: Any) -> dict[str, Any]:
    """Make compressed-tensors' section for one group with all matrices."""
    group = {**LINEAR, "weights": {"dynamic": False, "symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$"],
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "version": "0.12.0",
    }


NOT_CONVERTED = {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **NOT_CONVERTED}
MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "FP8",
    "ignore": ["lm_head", "*mlp.gate"],
    "producer": {"name": "modelopt", "version": "0.29.0"},
}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "desc_act": False, "sym": False, "damp_percent": 0.01}
FLOAT, INT = {"type": "float", "num_bits": 8}, {"type": "int", "num_bits": 8}
INT4 = {"type": "int", "num_bits": 4}
PER_ROW = {"_type": "PerRow", "_version": 1, "_data": {"dim": -1}}
PER_TENSOR = {"_type": "PerTensor", "_version": 1, "_data": {}}
PER_GROUP = {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 16}}
E4M3 = {"weight_dtype": {"_type": "torch.dtype", "_data": "float8_e4m3fn"}}
PLAIN = {"packing_format": {"_type": "Float8PackingFormat", "_data": "PLAIN"}}
FLOAT4 = {"type": "float", "num_bits": 4}
NVFP4 = {**FLOAT4, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {**FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MODELOPT_FP8 = fp8(MODELOPT, None, "_scale", shape=(), more={"input_scale": 0.02})
MODELOPT_NVFP4 = nvfp4(MODELOPT | {"quant_algo": "NVFP4"}, modelopt=True)
MODELOPT_MIXED = MODELOPT | {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{i}.{name}": layer
        for i in range(2)
        for name, layer in {
            "self_attn": {"quant_algo": "FP8"},
            "attention": {"quant_algo": "FP8"},
            "mlp": {"quant_algo": "NVFP4", "group_size": 16},
        }.items()
    },
}

FORMATS: dict[str, Format] = {
    "fp8, blocks": fp8({**FP8, "weight_block_size": [40, 24]}, (40, 24)),
    "fp8, blocks, powers of two": fp8(
        {**FP8, "weight_block_size": [32, 32], "scale_fmt": "ue8m0"},
        (32, 32),
        dtype=torch.float8_e8m0fnu,
    ),
    "fp8, tensor": fp8(
        {**FP8, "activation_scheme": "static"},
        None,
        shape=(),
        more={"activation_scale": 0.02},
    ),
    "compressed-tensors fp8, tensor": fp8(
        compressed("float-quantized", strategy="tensor", **FLOAT),
        None,
        "_scale",
        torch.bfloat16,
        shape=(1,),
        more={"input_scale": 0.02, "k_scale": 0.5},
    ),
    "compressed-tensors fp8, channel": fp8(
        compressed("float-quantized", strategy="channel", **FLOAT), (1, 0), "_scale", torch.bfloat16
    ),
    "compressed-tensors fp8, block": fp8(
        compressed("float-quantized", strategy="block", block_structure=[40, 24], **FLOAT),
        (40, 24),
        "_scale",
    ),
    "modelopt fp8": MODELOPT_FP8,
    "modelopt nvfp4": MODELOPT_NVFP4,
    "modelopt mixed": by_module(MODELOPT_MIXED, MODELOPT_FP8, MODELOPT_NVFP4),
    "nvfp4": nvfp4(compressed("nvfp4-pack-quantized", **NVFP4), modelopt=False),
    "mxfp4, packed": mxfp4_packed(compressed("mxfp4-pack-quantized", **MXFP4)),
    "torchao fp8, row": torchao(
        fp8({}, (1, 0), "_scale"), torchao_config("Float8WeightOnlyConfig", PER_ROW, **E4M3)
    ),
    "torchao fp8, tensor": torchao(
        fp8({}, None, "_scale"),
        torchao_config(
            "Float8DynamicActivationFloat8WeightConfig", [PER_ROW, PER_TENSOR], **E4M3, **PLAIN
        ),
    ),
    "torchao int8, groups": torchao(
        integers({}, 8, (1, 16), zeros=True), torchao_config("Int8WeightOnlyConfig", PER_GROUP)
    ),
    "torchao int8, row": torchao(
        integers({}, 8, (1, 0)), torchao_config("Int8DynamicActivationInt8WeightConfig", PER_ROW)
    ),
    "int8, channel": integers(compressed("int-quantized", strategy="channel", **INT), 8, (1, 0)),
    "int8, channel, zero points": integers(
        compressed("int-quantized", strategy="channel", **INT | {"symmetric": False}),
        8,
        (1, 0),
        zeros=True,
    ),
    "int4, groups": integers(
        compressed("pack-quantized", strategy="group", group_size=16, **INT4),
        4,
        (1, 16),
        packed=True,
    ),
    "int4, groups, zero points": integers(
        compressed(
            "pack-quantized", strategy="group", group_size=16, **INT4 | {"symmetric": False}
        ),
        4,
        (1, 16),
        zeros=True,
        packed=True,
    ),
    "int4, channel": integers(
        compressed("pack-quantized", strategy="channel", **INT4), 4, (1, 0), packed=True
    ),
    "int8, groups, packed": integers(
        compressed("pack-quantized", strategy="group", group_size=16, **INT),
        8,
        (1, 16),
        packed=True,
    ),
    "awq": awq({**AWQ, "group_size": 16}, 16),
    "awq, one group": awq({**AWQ, "group_size": -1}, 0),
    "gptq, 4 bits": gptq({**GPTQ, "bits": 4, "group_size": 16}, 4, 16),
    "gptq, 8 bits": gptq({**GPTQ, "bits": 8, "group_size": 16}, 8, 16),
    "gptq, version 2": gptq(
        {**GPTQ, "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}, 4, 0, less=0
    ),
}
EXPERT_FORMATS: dict[str, Format] = {
    "mxfp4": mxfp4({"quant_method": "mxfp4", **NOT_CONVERTED}),
}
"""Formats of stacked experts."""
