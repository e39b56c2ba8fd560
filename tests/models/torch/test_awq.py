"""AWQ's scales change no output of the model, and lower the error of its rounded matrices."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.quantized import FILE, edit_config
from support.ragged import run_ragged
from torch import Tensor

from weft.models.bundled.tasks import TASKS, held_out
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.checkpoint.quantize import round_matrix
from weft.models.checkpoint.quantized_copy import Edit, write_copy
from weft.models.checkpoint.weights import Weights
from weft.models.spec.schemes import SCHEMES
from weft.models.torch.awq import best_scale, find_edits
from weft.models.torch.compare import compare
from weft.models.torch.cpu_model import CpuModel
from weft.serving.engine.tokenizer import Tokenizer

W4 = SCHEMES["W4A16"].with_groups(32)
MOE = {"moe_intermediate_size": 64}
FAMILIES = (
    "llama",
    "qwen2",
    "phi3",
    "glm4",
    "granite",
    "olmo2",
    "cohere",
    "stablelm",
    "qwen3_moe",
    "glm4_moe",
    "flex_olmo",
)


def windows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in (60, 40)]


def checkpoint(path: Path, family: str, **sizes: int) -> Path:
    """Make a model with a few large inputs for each matrix, as trained models have them."""
    made = make_checkpoint(path, family, **(MOE if family.endswith("_moe") else {}), **sizes)
    tensors = load_file(made / FILE)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[::16] *= 4
        if name.endswith(("v_proj.weight", "up_proj.weight")):
            tensor[::16] *= 4
    save_file(tensors, made / FILE, metadata={"format": "pt"})
    return made


def edits_of(path: Path) -> dict[str, list[Edit]]:
    return find_edits(path, read_spec(path), W4, windows(), lambda tokens: None)


def logits(path: Path) -> Tensor:
    spec = read_spec(path)
    model = CpuModel(spec, Weights(path, spec), torch.float32)
    (result,) = run_ragged(model, spec, windows()[:1], [[(0, 60)]])
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_the_same_before_rounding(family: str, tmp_path: Path) -> None:
    """With fused matrices, biases, shared KV heads, norms elsewhere, and experts."""
    path = checkpoint(tmp_path / "source", family)
    changed = shutil.copytree(path, tmp_path / "changed")
    tensors = load_file(path / FILE)
    edits = edits_of(path)
    assert edits.keys() <= tensors.keys()
    for name, changes in edits.items():
        before = tensors[name]
        for edit in changes:
            tensors[name] = edit(name, tensors[name])
        assert not torch.allclose(before, tensors[name], rtol=0.01)
    save_file({name: each.contiguous() for name, each in tensors.items()}, changed / FILE)
    plain = logits(path)
    torch.testing.assert_close(logits(changed), plain, atol=1e-4 * plain.abs().max().item(), rtol=0)


def test_edited_are_the_matrices_with_a_foldable_input(tmp_path: Path) -> None:
    attention = {"input_layernorm", *(f"self_attn.{kind}_proj" for kind in "qkvo")}
    mlp = {"post_attention_layernorm", *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down"))}
    experts = {f"mlp.experts.{i}.{kind}_proj" for i in range(8) for kind in ("up", "down")}
    for family, expected in {"llama": attention | mlp, "qwen3_moe": attention | experts}.items():
        edits = edits_of(checkpoint(tmp_path / family, family))
        first = {name.removesuffix(".weight") for name in edits if ".layers.0." in name}
        assert {name.removeprefix("model.layers.0.") for name in first} == expected


def test_rounding_hurts_a_trained_model_less(tmp_path: Path) -> None:
    """In float32, because few CPUs multiply bfloat16 quickly."""
    path = shutil.copytree(locate("weft-demo"), tmp_path / "source")
    edit_config(path, torch_dtype="float32")
    spec, scheme = read_spec(path), W4
    tokenizer = Tokenizer.load(path)
    questions = [question for task in TASKS[:5] for question in held_out(task, 6)]
    tokens = [tokenizer.apply_chat_template(each.messages) for each in questions]
    edits = find_edits(path, spec, scheme, tokens[::2], lambda tokens: None)
    divergences = []
    for changes in ({}, edits):
        folder = tmp_path / f"copy {len(divergences)}"
        folder.mkdir()
        write_copy(path, spec, folder, scheme, edits=changes, progress=lambda done, total: None)
        divergences.append(compare(path, folder, tokens[1::2], lambda tokens: None).divergence)
    assert divergences[1] < divergences[0]


def error(x: Tensor, weight: Tensor, scale: Tensor | float) -> float:
    rounded = round_matrix(W4.spec, weight * scale, torch.float32).values() / scale
    return (x @ (rounded - weight).t()).square().sum().item()


def test_the_best_scale_has_the_least_error() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (100, 48))
    x[:, ::9] *= 30
    mean = x.abs().mean(0)
    scale = best_scale(W4.spec, x, mean, [weight])
    assert scale is not None
    least = error(x, weight, scale)
    assert least < 0.7 * error(x, weight, 1.0)
    for step in range(20):
        other = mean ** (step / 20)
        other = other / (other.max() * other.min()).sqrt()
        assert least <= error(x, weight, other) * (1 + 1e-6)


def test_inputs_of_one_size_need_no_scale() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    assert best_scale(W4.spec, torch.eye(64), torch.ones(64), [weight]) is None


def test_experts_without_tokens_are_not_scaled(tmp_path: Path) -> None:
    """The router's bias keeps all tokens away from half of the experts."""
    path = checkpoint(tmp_path, "glm4_moe")
    tensors = load_file(path / FILE)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[name][:4] = -100
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    edits = edits_of(path)
    edited = {e for e in range(8) if f"model.layers.1.mlp.experts.{e}.down_proj.weight" in edits}
    assert edited
    assert edited <= {4, 5, 6, 7}
