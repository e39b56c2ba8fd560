"""Figures that others measured, beside the planner's: the tables in docs/plan.md are true.

- TensorRT-LLM 0.10, Llama 3 70B in FP16: 2,000 requests at once, with the limits below
  (docs/source/performance/perf-overview.md in its repository). Version 0.14 has Llama 3.1 8B.
- jetstream-pytorch, models in bfloat16: 2,000 requests from ShareGPT (benchmarks/summary.md in
  AI-Hypercomputer/jetstream-pytorch, March and April 2024).
- vLLM 0.6.0, models in bfloat16: 320 requests from ShareGPT at once, ten steps for each call of the
  scheduler (results/prompt_320 in LambdaLabsML/vllm-benchmark, 7 and 8 September 2024).

Nothing is tuned to these figures.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tpu_steps

from weft.models.checkpoint.locate import read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.choices import Limits, choices
from weft.models.plan.hardware import read_slice
from weft.models.plan.load import Load, Objective
from weft.models.plan.plan import plan
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

PAGE = Path(__file__).parents[3] / "docs/plan.md"
LLAMA_8B = tpu_steps.LLAMA_8B | {"num_hidden_layers": 32}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
LIMITS = Limits(
    max_model_len=6144,
    max_num_seqs=2048,
    max_num_batched_tokens=2048,
    block_size=16,
    memory_fraction=0.9,
)
LENGTHS = ((128, 128), (2048, 128), (128, 2048), (2048, 2048))
PUBLISHED = {
    "A100:4": (2405.44, 295.87, 1974.04, 992.74),
    "A100:8": (3621.25, 455.18, 4091.45, 2118.89),
    "H100:4": (5210.19, 691.99, 3246.34, 1612.11),
    "H100:8": (7126.51, 1010.5, 7205.34, 3523.17),
}
"""Tokens of answers per second for each of `LENGTHS`; all GPUs of the slice hold one replica."""
MIXTRAL_8X7B = LLAMA_8B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
PUBLISHED_8B = {
    "A100:1": {(128, 128): 6701.8, (2048, 128): 795.4, (1000, 1000): 3634.4, (2048, 2048): 2265.0},
    "H100:1": {
        (128, 128): 15571.7,
        (2048, 128): 1904.3,
        (1000, 1000): 7054.5,
        (2048, 2048): 4159.7,
    },
}
LLAMA_2_7B = LLAMA_8B | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}
LLAMA_2_13B = LLAMA_2_7B | {
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 40,
}
JETSTREAM = [
    ("Llama 2 7B", LLAMA_2_7B, 96, 3663),
    ("Llama 2 13B", LLAMA_2_13B, 48, 2056),
    ("Llama 3 8B", LLAMA_8B, 128, 8249),
]
"""Model, requests in a step, and tokens of answers per second on v5e:2x4."""
SHAREGPT = "in=220,out=200,rate=0.01"
CONTEXT = 300
"""Mean tokens that a decode attends to: a prompt has 205, an answer 190."""
VLLM = [
    ("Llama 3 8B", LLAMA_8B, "H100:1", 6026.61, 126.357),
    ("Llama 3 8B", LLAMA_8B, "H100:8", 10242.68, 71.980),
    ("Llama 3 70B", LLAMA_70B, "H100:8", 3301.05, 195.167),
    ("Mixtral 8x7B", MIXTRAL_8X7B, "H100:8", 3279.87, 104.094),
]
"""Model, slice, tokens of answers per second, and the median milliseconds for ten steps."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return read_spec(folder)


def capacity(config: dict[str, object], name: str, load: str, limits: Limits, path: Path) -> float:
    """Tokens of answers per second that the planner predicts, with --tp over the slice."""
    (path / "config.json").write_text(json.dumps(config))
    place = read_slice(name)
    found = choices(read_spec(path), place, limits)
    whole = [each for each in found if each.layout == Layout(place.devices)]
    (row,) = plan(whole, Load.parse(load), Objective())
    return row.tokens_per_second


@pytest.mark.parametrize("name", PUBLISHED_8B)
def test_the_page_has_each_published_figure_of_one_gpu(name: str, tmp_path: Path) -> None:
    """Without exchanges between GPUs, the planner is within 25% of others' measurements."""
    for (prompt, answer), published in PUBLISHED_8B[name].items():
        load = f"in={prompt},out={answer},rate=0.01"
        predicted = capacity(LLAMA_8B, name, load, LIMITS, tmp_path)
        assert 1 - 0.01 <= predicted / published < 1.25
        row = (
            f"| {name} | {prompt} / {answer} | {predicted:,.0f} | {published:,.0f} "
            f"| {predicted / published:.2f} |"
        )
        assert row in PAGE.read_text(), f"docs/plan.md must have {row}"


@pytest.mark.parametrize(("model", "config", "slots", "published"), JETSTREAM)
def test_the_page_has_each_published_figure_of_tpus(
    model: str, config: dict[str, object], slots: int, published: int, tmp_path: Path
) -> None:
    limits = replace(LIMITS, max_model_len=2048, max_num_seqs=slots)
    predicted = capacity(config, "v5e:2x4", SHAREGPT, limits, tmp_path)
    row = (
        f"| {model} | v5e:2x4 | {slots} | {predicted:,.0f} | {published:,.0f} "
        f"| {predicted / published:.2f} |"
    )
    assert row in PAGE.read_text(), f"docs/plan.md must have {row}"


@pytest.mark.parametrize(("model", "config", "name", "throughput", "ten_steps"), VLLM)
def test_the_page_has_each_published_step(
    model: str,
    config: dict[str, object],
    name: str,
    throughput: float,
    ten_steps: float,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    place, published = read_slice(name), ten_steps / 10
    (choice,) = (
        each
        for each in choices(read_spec(tmp_path), place, LIMITS)
        if each.layout == Layout(place.devices)
    )
    decodes = round(throughput * published / 1000)  # Little's law
    predicted = 1000 * choice.engine.seconds(Batch(decodes, CONTEXT))
    row = (
        f"| {model} | {name} | {decodes} | {predicted:.1f} | {published:.1f} "
        f"| {predicted / published:.2f} |"
    )
    assert row in PAGE.read_text(), f"docs/plan.md must have {row}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_each_published_figure(name: str, spec: ModelSpec) -> None:
    place = read_slice(name)
    whole = [each for each in choices(spec, place, LIMITS) if each.layout.tp == place.devices]
    for (prompt, answer), published in zip(LENGTHS, PUBLISHED[name], strict=True):
        load = Load.parse(f"in={prompt},out={answer},rate=0.01")
        (found,) = plan(whole, load, Objective())
        predicted = found.tokens_per_second
        row = (
            f"| {name} | {prompt} / {answer} | {predicted:,.0f} | {published:,.0f} "
            f"| {predicted / published:.2f} |"
        )
        assert row in PAGE.read_text(), f"docs/plan.md must have {row}"
