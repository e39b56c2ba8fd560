"""A quantised copy holds the rounded matrices and everything else as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.quantized import FILE, FORMATS
from support.quantized import quantize as quantized_by_hand
from support.ragged import run_ragged
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from weft.errors import ConfigError, ModelError
from weft.models.checkpoint import shards
from weft.models.checkpoint.locate import INDEX_FILE, read_spec
from weft.models.checkpoint.quantize import round_matrix
from weft.models.checkpoint.quantized_copy import (
    check_sizes,
    check_source,
    quantized_weights,
    write_copy,
)
from weft.models.checkpoint.weights import Weights
from weft.models.spec.schemes import SCHEMES, Scheme
from weft.models.torch.cpu_model import CpuModel

FORMS = {
    name: scheme.with_groups(32) if name.startswith("W4") else scheme
    for name, scheme in SCHEMES.items()
}
W4 = FORMS["W4A16"]
FAMILIES = ("llama", "qwen3_moe", "phi3", "glm4_moe")
MOE = {"moe_intermediate_size": 64}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bfloat16 checkpoints: dense, with experts, with fused matrices, with shared experts."""
    return {
        family: make_checkpoint(
            tmp_path_factory.mktemp(family),
            family,
            dtype="bfloat16",
            **(MOE if family.endswith("_moe") else {}),
        )
        for family in FAMILIES
    }


def copied(source: Path, folder: Path, scheme: Scheme = W4, **options: Any) -> Path:
    """Write a copy into a new folder."""
    folder.mkdir(parents=True)
    spec = read_spec(source)
    write_copy(source, spec, folder, scheme, progress=lambda done, total: None, **options)
    return folder


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}


def decompressed(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, decompressed by the package compressed-tensors."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    section = QuantizationConfig.model_validate(config)
    compressor = BaseCompressor.get_value_from_registry(section.format)
    tensors = tensors_of(path)
    modules: dict[str, dict[str, Tensor]] = {}
    for name in [name for name in tensors if "weight_" in name]:
        modules.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = tensors.pop(name)
    for module, parts in modules.items():
        if (codes := tensors.pop(f"{module}.weight", None)) is not None:
            parts["weight"] = codes
        whole = compressor.decompress(parts, section.config_groups["group_0"])
        tensors[f"{module}.weight"] = whole["weight"].contiguous()
    return tensors


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weft_loads_the_rounded_weights(
    family: str, form: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    """They are those of the package, and each matrix is rounded by itself."""
    source, scheme = sources[family], FORMS[form]
    path = copied(source, tmp_path / "copy", scheme)
    spec, plain_spec = read_spec(path), read_spec(source)
    expected = decompressed(path)
    originals = tensors_of(source)
    rounded = set()
    assert spec.quantization is not None
    weights, plain = Weights(path, spec), Weights(source, plain_spec)
    for weight in quantized_weights(spec):
        for name in {entry.name for entry in weights.sources(weight)[1]}:
            values = round_matrix(scheme.spec, originals[name], torch.bfloat16).values()
            assert torch.equal(expected[name], values.bfloat16()), name
            rounded.add(name)
    for name, tensor in originals.items():
        if name not in rounded:
            assert torch.equal(expected[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # What weft reads, with its own order of rows, is what it reads from the decompressed tensors.
    whole = shutil.copytree(source, tmp_path / "whole")
    save_file(expected, whole / FILE)
    plain = Weights(whole, plain_spec)
    for weight in plain_spec.weights:
        for one, other in zip(weights.read_each(weight), plain.read_each(weight), strict=True):
            assert torch.equal(one.bfloat16(), other.bfloat16()), weight.name


CANNOT = {("qwen3_moe", "W4A16_ASYM"), ("qwen3_moe", "W8A8")}
"""transformers 5.23 joins no experts with zero points or int8 numbers."""


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_logits_are_those_of_transformers(family: str, form: str, tmp_path: Path) -> None:
    if (family, form) in CANNOT:
        pytest.skip("transformers cannot load it")
    source = make_checkpoint(tmp_path / "source", family, **(MOE if "moe" in family else {}))
    path = copied(source, tmp_path / "copy", FORMS[form])
    spec = read_spec(path)
    tokens = torch.randint(VOCAB_SIZE, (21,), generator=torch.Generator().manual_seed(0))
    model = CpuModel(spec, Weights(path, spec), torch.float32)
    (actual,) = run_ragged(model, spec, [tokens.tolist()], [[(0, len(tokens))]])
    oracle = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
    ).eval()
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)
        plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        assert (plain(tokens[None]).logits[0] - expected).abs().max() > 1e-3, "nothing was rounded"


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_become_one_each(transposed: bool, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", moe_intermediate_size=96)
    stacked = shutil.copytree(source, tmp_path / "stacked")
    tensors = load_file(stacked / FILE)
    for i in range(2):
        name = f"model.layers.{i}.mlp.experts"

        def all_of(kind: str, name: str = name) -> Tensor:
            return torch.stack([tensors.pop(f"{name}.{e}.{kind}.weight") for e in range(8)])

        joined = {
            "gate_up_proj": torch.cat([all_of("gate_proj"), all_of("up_proj")], dim=1),
            "down_proj": all_of("down_proj"),
        }
        for kind, each in joined.items():
            tensors[f"{name}.{kind}"] = (each.mT if transposed else each).contiguous()
    save_file(tensors, stacked / FILE)
    one, other = (
        tensors_of(copied(path, tmp_path / f"{path.name} copy")) for path in (source, stacked)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_stacks_with_names_of_their_own_become_one_each(tmp_path: Path) -> None:
    """Granite: the copy has the experts' names; the factors are not in the copy's numbers."""
    sizes = {"intermediate_size": 64, "shared_intermediate_size": 64}
    source = make_checkpoint(tmp_path / "source", "granitemoeshared", dtype="bfloat16", **sizes)
    path = copied(source, tmp_path / "copy")
    stems = {name.rpartition(".")[0] for name in tensors_of(path)}
    assert "model.layers.1.block_sparse_moe.experts.7.up_proj" in stems
    assert "model.layers.1.shared_mlp.input_linear" in stems
    assert not any("block_sparse_moe.input_linear" in stem for stem in stems)
    spec, plain_spec = read_spec(path), read_spec(source)
    weights, plain = Weights(path, spec), Weights(source, plain_spec)
    experts = [weight for weight in quantized_weights(plain_spec) if weight.has_experts]
    assert len(experts) == 6
    for weight in experts:
        for one, other in zip(weights.read_each(weight), plain.read_each(weight), strict=True):
            rounded = round_matrix(W4.spec, other, torch.bfloat16).values()
            assert torch.equal(one.bfloat16(), rounded.bfloat16()), weight.name


def test_other_modules_are_ignored_by_their_names_in_the_file(tmp_path: Path) -> None:
    """Routers, and the vision model of a model whose tensors have another prefix."""
    source = make_checkpoint(tmp_path / "source", "qwen3_vl_moe", **MOE)
    path = copied(source, tmp_path / "copy")
    section = json.loads((path / "config.json").read_text())["quantization_config"]
    tensors = tensors_of(path)
    ignored = set(section["ignore"])
    assert {"model.language_model.layers.0.mlp.gate", "lm_head"} <= ignored
    assert "model.visual.blocks.0.attn.qkv" in ignored
    assert "model.language_model.embed_tokens" not in ignored
    assert "model.language_model.layers.1.mlp.experts.7.up_proj.weight_packed" in tensors
    assert "model.language_model.layers.0.self_attn.q_proj.weight_packed" in tensors
    assert all(f"{name}.weight" in tensors for name in ignored)
    spec = read_spec(path)
    Weights(path, spec)


def test_small_files_are_copied(sources: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources["llama"], tmp_path / "source")
    for name in ("LICENSE", "chat_template.jinja", "tokenizer.model", "params.json", "model.py"):
        (source / name).write_text("{}")
    path = copied(source, tmp_path / "copy")
    names = {file.name for file in path.iterdir()}
    kept = {file.name for file in source.iterdir()} - {"params.json", "model.py"}
    assert names == kept
    for name in kept - {"config.json", FILE}:
        assert (path / name).read_bytes() == (source / name).read_bytes()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    assert config == json.loads((source / "config.json").read_text())
    assert (path / FILE).stat().st_mode == (path / "config.json").stat().st_mode


def test_large_copies_have_several_files(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = tensors_of(copied(sources["qwen3_moe"], tmp_path / "one"))
    monkeypatch.setattr(shards, "SHARD_BYTES", 30_000)
    path = copied(sources["qwen3_moe"], tmp_path / "several")
    files = sorted(path.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 60_000 for file in files)
    several = tensors_of(path)
    assert all(torch.equal(one[name], several[name]) for name in one)
    index = json.loads((path / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == several.keys()
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in several.values())
    spec = read_spec(path)
    Weights(path, spec)


def test_progress_reaches_the_end(sources: dict[str, Path], tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    folder = tmp_path / "copy"
    folder.mkdir()
    source = sources["llama"]
    sizes = write_copy(
        source, read_spec(source), folder, W4, progress=lambda *each: told.append(each)
    )
    assert told[-1] == (sizes.before, sizes.before)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert sizes.before == sum(each.nbytes for each in tensors_of(source).values())
    assert sizes.after == sum(each.nbytes for each in tensors_of(folder).values())


def test_sizes_without_whole_groups_are_refused(sources: dict[str, Path]) -> None:
    spec = read_spec(sources["llama"])
    weights = Weights(sources["llama"], spec)
    check_sizes(W4, spec, weights)
    named = r"--group-size is 64; .*model.layers.0.mlp.down_proj.weight has 96; .* work: 32$"
    with pytest.raises(ConfigError, match=named):
        check_sizes(SCHEMES["W4A16"].with_groups(64), spec, weights)


def test_other_formats_are_named_if_no_group_fits(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path, "llama", intermediate_size=90)
    spec = read_spec(source)
    for scheme in (W4, SCHEMES["W8A16"]):
        with pytest.raises(ConfigError, match=r"has 90; use --format W8A8 or FP8_DYNAMIC or"):
            check_sizes(scheme, spec, Weights(source, spec))


def test_quantized_models_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    path, _ = quantized_by_hand(sources["llama"], tmp_path, FORMATS["fp8, blocks"])
    with pytest.raises(ModelError, match=r"quantized already.* give the original model"):
        check_source(path, read_spec(path))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"m.gguf is a GGUF file.* give the original model"):
        check_source(tmp_path / "m.gguf", read_spec(sources["llama"]))


def test_damaged_tensors_are_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources["llama"], tmp_path / "source")
    tensors = load_file(source / FILE)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][5, 6] = torch.nan
    save_file(tensors, source / FILE)
    with pytest.raises(ModelError, match=f"{name} holds NaN"):
        copied(source, tmp_path / "copy")
