"""Models on Triton kernels keep quantised weights, and sample what the plain checkpoint gives."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from support.quantized import EXPERT_FORMATS, FORMATS, FP8, Format, fp8, quantize, stack_experts
from support.split import BLOCK, INTERPRETED_DECODES, Case, be_rank, generate, running, steps

os.environ["TRITON_INTERPRET"] = "1"

from weft.kernels.cpu import int4, int8
from weft.kernels.interpreter.gpu import installed
from weft.kernels.packed import PackedMatrix
from weft.kernels.symmetric.memory import Home
from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld
from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import Layout
from weft.models.torch import gpu_layers
from weft.models.torch.dry import NoWeights
from weft.models.torch.gpu_layers import Experts, PackedLinear, WeightLoader
from weft.models.torch.group import ALONE
from weft.models.torch.rounding import Rounded
from weft.models.torch.runner import TorchRunner

BLOCKS = "fp8, blocks"
BLOCKS_OF_CACHE = 16
FORMS: dict[str, Format] = {
    BLOCKS: fp8({**FP8, "weight_block_size": [40, 32]}, (40, 32)),
    **{
        name: FORMATS[name]
        for name in (
            *("compressed-tensors fp8, channel", "fp8, tensor", "modelopt mixed"),
            *("int8, channel", "int8, channel, zero points", "int4, groups, zero points"),
            *("awq", "gptq, 4 bits", "gptq, 8 bits", "nvfp4", "mxfp4, packed"),
            *("gptq, version 2", "torchao fp8, row", "torchao int8, groups"),
        )
    },
}
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    """Quantised and plain checkpoints with one layer, by family and format."""
    made = {}
    for family in ("llama", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        options: dict[str, Any] = {"attention_bias": True} if family == "llama" else {}
        source = make_checkpoint(folder / "source", family, num_hidden_layers=1, **options)
        bare = make_checkpoint(folder / "bare", family, num_hidden_layers=1)
        for form in FORMS:
            (folder / form).mkdir()
            # GPTQ's checkpoints have a bias of 0 for each matrix, in place of the model's.
            own = bare if form.startswith("gptq") else source
            made[family, form] = quantize(own, folder / form, FORMS[form])
    return made


def sampled(path: Path) -> tuple[Any, Any]:
    """Return tokens and log probabilities of one rank on Triton kernels."""
    with installed():
        home = VirtualHome(VirtualWorld(1), 0)
        inputs = steps(0, INTERPRETED_DECODES)
        tokens, logprobs, _ = generate(path, "float32", Layout(), ALONE, home, inputs=inputs)
    return tokens, logprobs


@pytest.mark.parametrize("few", [2, 128], ids=["many rows", "few rows"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.sweep
def test_tokens_are_those_of_the_plain_checkpoint(
    family: str,
    form: str,
    few: int,
    pairs: dict[tuple[str, str], Pair],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_layers, "FEW_ROWS", few)
    (tokens, logprobs), (expected, expected_logprobs) = map(sampled, pairs[family, form])
    assert (tokens == expected).all()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", EXPERT_FORMATS)
def test_stacked_experts_give_the_tokens_of_the_plain_checkpoint(form: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "moe_intermediate_size": 96}
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", **sizes)
    stack_experts(source, transposed=True)
    pair = quantize(source, tmp_path, EXPERT_FORMATS[form])
    spec = read_spec(pair[0])
    (down,) = (each for each in spec.weights if each.name.endswith("{expert}.down_proj.weight"))
    assert Weights(pair[0], spec).packed_form(down) is not None
    (tokens, logprobs), (expected, expected_logprobs) = map(sampled, pair)
    assert (tokens == expected).all()
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_as_they_are_stored(form: str, pairs: dict[tuple[str, str], Pair]) -> None:
    """Also in the eyes of a dry run, which compiles the kernels."""
    for family in ("llama", "qwen3_moe"):
        quantized, plain = pairs[family, form]
        spec = read_spec(quantized)
        weights, absent = Weights(quantized, spec), NoWeights(spec, Layout())
        whole = Weights(plain, read_spec(plain))
        for weight in spec.weights:
            if len(weight.shape) == 1 or ".layers." not in weight.name or "router" in weight.name:
                continue
            if weight.name.endswith("mlp.gate.weight"):
                assert weights.packed_form(weight) is None
                continue
            packed = list(weights.read_packed(weight))
            assert packed[0].form == weights.packed_form(weight) == absent.packed_form(weight)
            for one, other, values in zip(
                packed, absent.read_packed(weight), whole.read_each(weight), strict=True
            ):
                assert torch.equal(one.dequantize(), values.float())
                assert [each.shape for each in one.parts] == [each.shape for each in other.parts]
                assert [each.dtype for each in one.parts] == [each.dtype for each in other.parts]
        assert spec.layers[0].attention.o.weight.stored is not None
        size = spec.weight_bytes("float32", packed="gpu")
        assert size < 0.8 * spec.weight_bytes("float32")


@pytest.mark.parametrize("form", FORMS)
def test_each_ranks_part_is_as_the_ledger_and_the_dry_run_expect(
    form: str, pairs: dict[tuple[str, str], Pair]
) -> None:
    """Also where a cut is inside a block: 24 of 96 columns with blocks of 16 or 32."""
    for family in ("llama", "qwen3_moe"):
        quantized, plain = pairs[family, form]
        spec = read_spec(quantized)
        for rank in range(4):
            layout = Layout(tp=4, rank=rank)
            local = {each.name: each for each in layout.local(spec).products()}
            weights, absent = Weights(quantized, spec, layout=layout), NoWeights(spec, layout)
            whole = Weights(plain, read_spec(plain), layout=layout)
            for weight in spec.products():
                packed = list(weights.read_packed(weight))
                assert packed[0].form == weights.packed_form(weight) == absent.packed_form(weight)
                size = sum(each.bytes for each in packed)
                assert size <= local[weight.name].packed_bytes(local[weight.name].shape, 4, "none")
                for one, values in zip(packed, whole.read_each(weight), strict=True):
                    assert torch.equal(one.dequantize(), values.float())


def test_mixed_formats_are_multiplied_apart_or_dequantized(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    path, _ = pairs["qwen3_moe", "modelopt mixed"]
    spec = read_spec(path)
    load = WeightLoader(Weights(path, spec), torch.float32, torch.device("cpu"))
    layer = spec.layers[0]
    attention, moe = layer.attention, layer.feed_forward
    assert isinstance(load.linear(attention.q, attention.k, attention.v), PackedLinear)
    other = load.stacks(moe.gate, moe.up)  # type: ignore[union-attr]
    assert all(isinstance(each, PackedMatrix) for each in other)
    assert isinstance(load.linear(attention.o, attention.o), PackedLinear)
    both = [attention.o.weight, moe.down]  # type: ignore[union-attr]
    assert len({load._weights.packed_form(weight) for weight in both}) == 2


def test_the_balancer_moves_codes_scales_and_zero_points(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    path, _ = pairs["qwen3_moe", "int4, groups, zero points"]
    spec = read_spec(path)
    load = WeightLoader(Weights(path, spec), torch.float32, torch.device("cpu"))
    experts = Experts(spec.layers[0].feed_forward, load, copies=1)  # type: ignore[arg-type]
    slots = spec.layers[0].feed_forward.gate.shape[0] + 1  # type: ignore[union-attr]
    assert len(experts.weights) == 3 * 3
    assert all(part.is_contiguous() and len(part) == slots for part in experts.weights)
    assert all(part[0].equal(part[-1]) for part in experts.weights)


def chosen(path: Path, quantization: str, home: Home | None) -> tuple[Any, Any]:
    """Return the greedy request's tokens and log probabilities, with rounded weights."""
    runner = TorchRunner.load(
        path,
        read_spec(path),
        dtype="float32",
        block_size=BLOCK,
        max_num_seqs=2,
        max_num_batched_tokens=64,
        max_model_len=32,
        quantization=quantization,
        home=home,
        cuda_graphs=False,
    )
    runner.allocate_kv_cache(BLOCKS_OF_CACHE)
    outputs = [runner.step(step) for step in steps(0, INTERPRETED_DECODES)][1:]
    runner.close()
    logprobs = [each.logprobs.chosen[0] for each in outputs if each.logprobs is not None]
    return [each.token_ids[0] for each in outputs], logprobs


@pytest.mark.features("gpu", "int8")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_are_rounded_as_on_cpus(family: str, quantization: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, family, num_hidden_layers=1)
    spec = read_spec(path)
    with installed():
        tokens, logprobs = chosen(path, quantization, VirtualHome(VirtualWorld(1), 0))
    weights = Weights(path, spec)
    source = Rounded(weights, quantization, torch.float32)
    absent = NoWeights(spec, Layout(), quantization)
    products = [weight for weight in spec.weights if ".layers." in weight.name]
    products = [
        weight for weight in products if len(weight.shape) > 1 and "mlp.gate." not in weight.name
    ]
    assert products
    folder = tmp_path / "rounded"
    folder.mkdir()
    for file in path.iterdir():
        if file.suffix == ".json":
            shutil.copy(file, folder)
    tensors = load_file(path / "model.safetensors")
    quantize = {"int8": cpu_int8, "int4": cpu_int4}[quantization]
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            tensors[name] = quantize(tensor.float())
    save_file(tensors, folder / "model.safetensors")
    rounded = Weights(folder, read_spec(folder))
    for weight in products:
        assert source.packed_form(weight) == absent.packed_form(weight) is not None
        for one, values in zip(source.read_packed(weight), rounded.read_each(weight), strict=True):
            assert one.form == source.packed_form(weight)
            assert torch.equal(one.dequantize(), values.float())
    with installed():
        expected, expected_logprobs = chosen(folder, "none", VirtualHome(VirtualWorld(1), 0))
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-3, atol=1e-4)


def cpu_int8(weight: torch.Tensor) -> torch.Tensor:
    integers, scale = int8.quantize(weight)
    return integers.float() * scale[:, None]


def cpu_int4(weight: torch.Tensor) -> torch.Tensor:
    return int4.dequantize(*int4.quantize(weight))


CASES: dict[int, list[Case]] = {
    2: [("llama", BLOCKS, Layout(tp=2)), ("qwen3_moe", "awq", Layout(tp=2))],
    1000: [("qwen3_moe", "int4, groups, zero points", Layout(tp=2, ep=2))],
}
"""By the number of tokens up to which all ranks have all tokens."""


@pytest.mark.features("quantised", "gpu", "overlapped", "tp")
@pytest.mark.parametrize("few_tokens", CASES)
def test_ranks_sample_what_they_sample_with_the_plain_checkpoint(
    few_tokens: int, pairs: dict[tuple[str, str], Pair]
) -> None:
    cases = [
        (f"{family}, {form}, {layout}", path, (family, "float32", layout))
        for family, form, layout in CASES[few_tokens]
        for path in pairs[family, form]
    ]
    with running(2, be_rank, 2, cases, after=(few_tokens,)) as pipes:
        for pipe in pipes:
            for _ in CASES[few_tokens]:
                name, tokens, logprobs, *_ = pipe.recv()
                other, expected, expected_logprobs, *_ = pipe.recv()
                assert name == other
                assert (tokens == expected).all(), name
                np.testing.assert_allclose(logprobs, expected_logprobs, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.features("int8", "gpu", "overlapped", "graphs", "ep")
@pytest.mark.features("int8", "fp8_cache")
def test_ranks_with_rounded_weights_sample_what_one_does(tmp_path: Path) -> None:
    """With experts on ranks of their own, no matrix is cut, so all are rounded alike."""
    path = make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1)

    def told(size: int, layout: Layout) -> list[Any]:
        cases = [(each, path, ("", each, layout)) for each in ("int8", "int8, fp8 cache")]
        with running(size, be_rank, size, cases, after=(4, 4, True)) as pipes:
            received = [[pipe.recv() for pipe in pipes] for _ in cases]
        return [first for first, *_ in received]

    for one, several in zip(told(1, Layout()), told(2, Layout(ep=2)), strict=True):
        name, tokens, logprobs, *_ = several
        assert name == one[0]
        assert (tokens == one[1]).all(), name
        np.testing.assert_allclose(logprobs, one[2], atol=1e-3 if name == "int8" else 2e-2)
