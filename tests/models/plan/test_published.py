"""Throughput that others measured, beside the planner's: the table in docs/plan.md is true.

Llama 3 70B in FP16 with TensorRT-LLM 0.10: 2,000 requests at once, with the limits below
(docs/source/performance/perf-overview.md in its repository). Nothing is tuned to these figures.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.models.checkpoint.locate import read_spec
from weft.models.plan.choices import Limits, choices
from weft.models.plan.hardware import read_slice
from weft.models.plan.load import Load, Objective
from weft.models.plan.plan import plan
from weft.models.spec.spec import ModelSpec

PAGE = Path(__file__).parents[3] / "docs/plan.md"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
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


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return read_spec(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_page_has_each_published_figure(name: str, spec: ModelSpec) -> None:
    place = read_slice(name)
    whole = [each for each in choices(spec, place, LIMITS) if each.layout.tp == place.devices]
    for (prompt, answer), published in zip(LENGTHS, PUBLISHED[name], strict=True):
        load = Load.parse(f"in={prompt},out={answer},rate=0.01")
        (found,) = plan(whole, load, Objective(), LIMITS)
        predicted = found.tokens_per_second
        row = (
            f"| {name} | {prompt} / {answer} | {predicted:,.0f} | {published:,.0f} "
            f"| {predicted / published:.2f} |"
        )
        assert row in PAGE.read_text(), f"docs/plan.md must have {row}"
