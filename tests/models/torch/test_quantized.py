"""A quantised checkpoint gives the tokens and logits of the numbers that it stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.quantized import FORMATS, quantize
from support.ragged import run_ragged
from support.split import Case, be_rank, generate, running, steps
from transformers import AutoModelForCausalLM

from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import Layout
from weft.models.torch.cpu_model import CpuModel
from weft.models.torch.group import ALONE

LENGTHS = (19, 6)
BLOCKS = "fp8, blocks"
FORMS = (BLOCKS, "modelopt mixed", "int4, groups, zero points", "awq", "nvfp4")
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Pair]:
    """Quantised and plain checkpoints, by family and format."""
    made = {}
    for family in ("llama", "qwen3", "qwen3_moe"):
        folder = tmp_path_factory.mktemp(family)
        source = make_checkpoint(folder / "source", family)
        for form in (*FORMS, "gptq, 8 bits"):
            (folder / form).mkdir()
            made[family, form] = quantize(source, folder / form, FORMATS[form])
    return made


def requests() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]


def logits(path: Path, dtype: torch.dtype, **options: Any) -> torch.Tensor:
    """Compute all logits of `requests` in one step."""
    spec = read_spec(path)
    model = CpuModel(spec, Weights(path, spec), dtype, **options)
    steps = [[(i, length) for i, length in enumerate(LENGTHS)]]
    return torch.cat(run_ragged(model, spec, requests(), steps, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_logits_are_those_of_the_plain_checkpoint(
    family: str, form: str, dtype: torch.dtype, pairs: dict[tuple[str, str], Pair]
) -> None:
    quantized, plain = pairs[family, form]
    assert torch.equal(logits(quantized, dtype), logits(plain, dtype))


@pytest.mark.features("int8", "quantised")
def test_int8_at_load_takes_the_dequantized_weights(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    quantized, plain = (
        logits(path, torch.bfloat16, quantization="int8") for path in pairs["llama", BLOCKS]
    )
    assert torch.equal(quantized, plain)


def test_logits_are_those_of_transformers(pairs: dict[tuple[str, str], Pair]) -> None:
    quantized, plain = pairs["qwen3", BLOCKS]
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([each])).logits[0] for each in requests()])
    torch.testing.assert_close(logits(quantized, torch.float32), expected, atol=1e-4, rtol=0)


CASES: list[Case] = [
    ("llama", BLOCKS, Layout(tp=2)),
    ("llama", "gptq, 8 bits", Layout(pp=2)),
    ("llama", "awq", Layout(cp=2)),
    ("qwen3_moe", "int4, groups, zero points", Layout(ep=2)),
    ("qwen3_moe", "awq", Layout(tp=2, ep=2)),
    ("qwen3_moe", "modelopt mixed", Layout(tp=2)),
    ("llama", "nvfp4", Layout(pp=2)),
]


@pytest.mark.features("quantised", "tp", "ep")
@pytest.mark.features("quantised", "cp")
@pytest.mark.features("quantised", "pp")
def test_ranks_give_what_they_give_with_the_plain_checkpoint(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    """A rank's cuts are inside blocks: 48 of 96 columns with blocks of 40 x 24."""
    cases = [
        (f"{family}, {form}, {layout}", path, (family, "float32", layout))
        for family, form, layout in CASES
        for path in pairs[family, form]
    ]
    with running(2, be_rank, 2, cases) as pipes:
        for pipe in pipes:
            for _ in CASES:
                name, *quantized = pipe.recv()
                other, *plain = pipe.recv()
                assert name == other
                assert len(quantized) == 4
                for one, two in zip(quantized, plain, strict=True):
                    assert one == two if isinstance(one, int) else (one == two).all(), name


@pytest.mark.features("int8", "tp")
@pytest.mark.features("int8", "cp")
def test_ranks_with_int8_weights_give_nearly_what_one_gives(
    pairs: dict[tuple[str, str], Pair],
) -> None:
    """A rank's part of a row has its own scale, so that numbers differ a little."""
    _, path = pairs["llama", BLOCKS]
    exact, rounded = (
        generate(path, dtype, Layout(), ALONE, inputs=steps()) for dtype in ("float32", "int8")
    )
    layouts = Layout(tp=2), Layout(cp=2)
    cases = [(str(layout), path, ("llama", "int8", layout)) for layout in layouts]
    with running(2, be_rank, 2, cases) as pipes:
        for pipe in pipes:
            for _ in cases:
                name, tokens, logprobs, *_ = pipe.recv()
                assert (tokens[:, 0] == rounded[0][:, 0]).all(), name
                assert 1e-4 < abs(logprobs - exact[1]).max() < 0.1, name
                assert abs(logprobs - rounded[1]).max() < 0.1, name
