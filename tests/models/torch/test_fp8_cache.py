"""A KV cache in fp8, with Triton's interpreter."""

from __future__ import annotations

import os
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.quantized import FORMATS, quantize
from support.split import INTERPRETED_DECODES, be_rank, generate, running, steps
from support.steps import Driver

os.environ["TRITON_INTERPRET"] = "1"

from weft.errors import ModelError
from weft.kernels.gpu.rowwise.rope import rotate_into_cache
from weft.kernels.interpreter.gpu import installed
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout
from weft.models.spec.spec import FP8_CACHE
from weft.models.torch import gpu_model
from weft.models.torch.group import ALONE
from weft.models.torch.runner import TorchRunner

FP8 = torch.float8_e4m3fn
BLOCKS, BLOCK = 24, 4


def logprobs_of(path: Path, kv_dtype: str | None) -> tuple[np.ndarray, TorchRunner]:
    """Log probabilities of prompts in chunks, of mixed steps, and of decodes."""
    with installed():
        runner = TorchRunner.load(
            path,
            read_spec(path),
            dtype="float32",
            kv_dtype=kv_dtype,
            block_size=BLOCK,
            max_num_seqs=2,
            max_num_batched_tokens=16,
            max_model_len=32,
            home=VirtualHome(VirtualWorld(1), 0),
        )
        runner.allocate_kv_cache(BLOCKS)
        runner.warm_up()
        driver = Driver(runner, BLOCK, BLOCKS)
        first = driver.add([7, 3, 90, 41, 12, 250, 33, 8, 61], 32, logprobs=0)
        second = driver.add([11, 54, 199, 4, 77], 32, logprobs=0)
        outs = [
            driver.step((first, 6), prompt_logprobs=0),
            driver.step((first, 3), (second, 4), prompt_logprobs=0),
            driver.step((first, 1), (second, 1)),
            driver.step((first, 1), (second, 1)),
        ]
    parts = [out.prompt_logprobs for out in outs] + [out.logprobs for out in outs]
    return np.concatenate([part.chosen for part in parts if part is not None]), runner


def rounding(qkv: Any, rotation: Any, keys: Any, values: Any, *place: Any, **options: Any) -> Any:
    """`rotate_into_cache`, which then rounds what it has written as an fp8 cache does."""
    done = rotate_into_cache(qkv, rotation, keys, values, *place, **options)
    for cache in (keys, values):
        cache.copy_(cache.clamp(-448, 448).to(FP8).to(cache.dtype))
    return done


@pytest.mark.features("gpu", "fp8_cache")
@pytest.mark.parametrize(
    "family", ["llama", pytest.param("minimax_m2", marks=pytest.mark.slow), "olmo3"]
)
def test_keys_and_values_are_rounded_and_nothing_else(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, family, num_hidden_layers=2)
    ours, runner = logprobs_of(path, FP8_CACHE)
    exact, wide = logprobs_of(path, None)
    assert runner.bytes_per_block * 4 == wide.bytes_per_block
    assert {part.dtype for layer in runner._cache for part in layer} == {FP8}
    monkeypatch.setattr(gpu_model, "rotate_into_cache", rounding)
    rounded, _ = logprobs_of(path, None)
    np.testing.assert_allclose(ours, rounded, atol=2e-5)
    assert 1e-3 < abs(ours - exact).max() < 0.5


SCALES = {"self_attn.k_scale": 0.5, "self_attn.v_scale": 0.25}
MODELOPT = {"self_attn.k_proj.k_scale": 0.5, "self_attn.v_proj.v_scale": 0.25}


def scaled(source: Path, folder: Path, scales: dict[str, Any]) -> Path:
    """Copy a checkpoint in fp8 with scales of the KV cache in its first layer."""
    path, _ = quantize(source, folder, FORMATS["fp8, tensor"])
    tensors = load_file(path / "model.safetensors")
    for name, scale in scales.items():
        tensors[f"model.layers.0.{name}"] = torch.tensor(scale)
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.features("fp8_cache", "quantised")
@pytest.mark.parametrize("scales", [SCALES, MODELOPT], ids=["attention", "projections"])
def test_keys_and_values_have_the_checkpoints_scales(
    scales: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's scales are the checkpoint's, the second layer's are 1."""
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=2)
    path = scaled(source, tmp_path, scales)
    ours, _ = logprobs_of(path, FP8_CACHE)
    exact, _ = logprobs_of(path, None)
    layers = cycle([(0.5, 0.25), (1.0, 1.0)])

    def rounding_by_layer(*place: Any, **options: Any) -> Any:
        done = rotate_into_cache(*place, **options)
        for cache, scale in zip(place[2:4], next(layers), strict=True):
            cache.copy_((cache / scale).clamp(-448, 448).to(FP8).to(cache.dtype) * scale)
        return done

    monkeypatch.setattr(gpu_model, "rotate_into_cache", rounding_by_layer)
    rounded, _ = logprobs_of(path, None)
    np.testing.assert_allclose(ours, rounded, atol=2e-5)
    assert 1e-3 < abs(ours - exact).max() < 0.5


@pytest.mark.parametrize(
    ("scale", "problem"),
    [
        (0.0, "holds 0.0; a scale of an fp8 cache is a positive number"),
        (float("nan"), "holds nan; a scale"),
        ([0.5, 0.5], "has shape .2,.; with --kv-cache-dtype fp8 it must be one number"),
    ],
)
def test_wrong_scales_are_refused(scale: Any, problem: str, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", num_hidden_layers=1)
    path = scaled(source, tmp_path, {"self_attn.k_scale": scale})
    with pytest.raises(ModelError, match=f"model.layers.0.self_attn.k_scale {problem}"):
        logprobs_of(path, FP8_CACHE)
    logprobs_of(path, None)


@pytest.mark.slow
@pytest.mark.features("fp8_cache", "overlapped", "graphs", "tp", "ep")
@pytest.mark.features("fp8_cache", "overlapped", "cp")
@pytest.mark.features("fp8_cache", "overlapped", "pp")
def test_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    """Sums of parts are rounded otherwise, and some numbers then are in fp8."""
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=2)
    exact = generate(path, "float32", Layout(), ALONE, inputs=steps(0, INTERPRETED_DECODES))

    def run(size: int, *layouts: Layout) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        cases = [(str(layout), path, ("", "fp8 cache", layout)) for layout in layouts]
        found = {}
        with running(size, be_rank, size, cases, after=(4, 4, True)) as pipes:
            for _ in cases:
                told = [pipe.recv() for pipe in pipes]
                *_, (name, tokens, logprobs, *_) = told if told[0][1].size == 0 else told[:1]
                found[name] = tokens, logprobs
        return found

    ((tokens, logprobs),) = run(1, Layout()).values()
    assert abs(logprobs - exact[1]).max() > 1e-3
    ranks = run(2, Layout(tp=2), Layout(ep=2), Layout(tp=2, ep=2), Layout(cp=2), Layout(pp=2))
    for name, (theirs, close) in ranks.items():
        assert (theirs == tokens).all(), name
        np.testing.assert_allclose(close, logprobs, atol=2e-2, err_msg=name)
