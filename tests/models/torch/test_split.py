"""A model shared by ranks gives the same tokens as the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from support.split import (
    DECODES,
    INTERPRETED_DECODES,
    Case,
    be_rank,
    generate,
    running,
    steps,
)

from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import Layout
from weft.models.torch.group import ALONE

PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "odd vocabulary": ("llama", {"vocab_size": VOCAB_SIZE + 1}),
    "experts": ("qwen3_moe", {"norm_topk_prob": True}),
    "mixtral": ("mixtral", {}),
    "window": ("mistral", {"sliding_window": 6}),
    "deep": ("llama", {"num_hidden_layers": 5}),
    "shared gate": ("qwen2_moe", {}),
    "groups": ("glm4_moe", {"n_group": 4, "topk_group": 2}),
    "ling": ("bailing_moe", {}),
    "wide norms": ("minimax_m2", {}),
    "output norms": ("olmo3", {}),
    "four norms": ("glm4", {}),
    "multipliers": ("granite", {"tie_word_embeddings": True}),
    "multiplied experts": ("granitemoeshared", {"tie_word_embeddings": True}),
    "normed experts": ("flex_olmo", {}),
    "dots": ("dots1", {}),
    "parallel": ("cohere", {"attention_bias": True}),
    "layer norms": ("stablelm", {"qk_layernorm": True}),
    "scaled inputs": ("llama4_text", {}),
}
"""Models that together have all parts of layers."""
MODELS = {family: (family, {}) for family in FAMILIES} | PARTS
NEWER = ("shared gate", "groups", "wide norms")
"""Models with a shared MLP, groups of experts, or norms over all heads."""
EXPERTS = ("multiplied experts", "normed experts", "scaled inputs")
"""Models with experts that differ in something else."""

ALIKE = (
    *("qwen2", "qwen3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3"),
    *("llama4", "ernie4_5", "seed_oss", "hunyuan_v1_dense", "olmo2", "granitemoe", "olmoe"),
)
"""More families, with one layer each."""

INTERPRETED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}),
    "odd vocabulary": ("llama", {"vocab_size": VOCAB_SIZE + 1, "num_hidden_layers": 1}),
    "tied": MODELS["tied"],
    "experts": ("qwen3_moe", {"norm_topk_prob": True, "num_hidden_layers": 1}),
    "mixtral": ("mixtral", {"num_hidden_layers": 1}),
    "window": ("mistral", {"sliding_window": 6, "num_hidden_layers": 1}),
    "shared gate": (
        "qwen2_moe",
        {"shared_expert_intermediate_size": 96, "num_hidden_layers": 1},
    ),
    "groups": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 0, "num_hidden_layers": 1},
    ),
    "wide norms": ("minimax_m2", {"num_hidden_layers": 1}),
    "output norms": (
        "olmo3",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "four norms": ("glm4", {"num_hidden_layers": 1}),
    "shared bias": ("hy_v3", {"mlp_bias": True, "first_k_dense_replace": 0}),
    "neighbours": ("ernie4_5_moe", {}),
    "one tensor": ("phi3", {"num_hidden_layers": 1}),
    "ling": ("bailing_moe", {"first_k_dense_replace": 0, "num_hidden_layers": 1}),
    "half turned": ("glm", {"num_hidden_layers": 1}),
    "not turned": ("smollm3", {"num_hidden_layers": 4}),
    "multipliers": ("granite", {"num_hidden_layers": 1}),
    "multiplied experts": (
        "granitemoeshared",
        {"num_hidden_layers": 1, "shared_intermediate_size": 96},
    ),
    "normed experts": ("flex_olmo", {"num_hidden_layers": 1}),
    "scaled queries": ("ministral3", {"num_hidden_layers": 1}),
    "normed after turning": ("hunyuan_v1_moe", {"num_hidden_layers": 1}),
    "parallel": ("cohere", {"num_hidden_layers": 1}),
    "layer norms": ("stablelm", {"num_hidden_layers": 1, "qk_layernorm": True}),
    "scaled inputs": ("llama4_text", {"intermediate_size": 96}),
    "parallel windows": (
        "cohere2",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    **{family: (family, {"num_hidden_layers": 1}) for family in ALIKE},
    "llama4": ("llama4", {"moe_layers": [0], "num_hidden_layers": 1}),
    "dots": ("dots1", {"first_k_dense_replace": 0, "num_hidden_layers": 1}),
    "exaone4": (
        "exaone4",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
"""Small models for Triton's slow interpreter: one layer, or two with pipeline stages."""

OTHERS = (
    *("shared bias", "neighbours", "one tensor", "ling", "half turned", "not turned"),
    *("scaled queries", "normed after turning", "output norms", "multipliers"),
    *("multiplied experts", "normed experts"),
    *("parallel", "layer norms", "parallel windows", "scaled inputs"),
    *(*ALIKE, "dots", "exaone4"),
)

CASES: list[Case] = [
    *((model, "float32", Layout(tp=2)) for model in PARTS),
    *((model, "float32", Layout(tp=4)) for model in ("llama", "odd vocabulary", "experts", *NEWER)),
    ("groups", "float32", Layout(tp=2, ep=2)),
    *((model, "float32", Layout(ep=2)) for model in EXPERTS),
    *((model, "float32", Layout(tp=2, ep=4)) for model in EXPERTS),
    ("ling", "float32", Layout(tp=4)),
    ("ling", "float32", Layout(ep=2)),
    ("ling", "bfloat16", Layout(tp=2, ep=2)),
    ("wide norms", "float32", Layout(cp=2)),
    *((model, "float32", Layout(ep=2)) for model in ("groups", "shared gate")),
    *((model, "float32", Layout(ep=4)) for model in ("groups", "wide norms")),
    *((model, "float32", Layout(tp=2, ep=4)) for model in NEWER),
    ("llama", "bfloat16", Layout(tp=2)),
    *((model, "float32", Layout(tp=4)) for model in ("output norms", "parallel", "layer norms")),
    ("four norms", "float32", Layout(cp=2)),
    ("four norms", "float32", Layout(pp=2)),
    ("experts", "float32", Layout(ep=2)),
    ("experts", "float32", Layout(tp=2, ep=2)),
    ("mixtral", "bfloat16", Layout(ep=2)),
    ("experts", "float32", Layout(ep=4)),
    ("mixtral", "float32", Layout(tp=2, ep=4)),
    ("experts", "bfloat16", Layout(tp=4, ep=2)),
    *((model, "float32", Layout(cp=2)) for model in ("llama", "window")),
    ("window", "float32", Layout(cp=4)),
    ("tied", "float32", Layout(tp=2, cp=2)),
    ("experts", "float32", Layout(tp=2, cp=2, ep=2)),
    ("mixtral", "float32", Layout(cp=2, ep=4)),
    *((model, "float32", Layout(pp=2)) for model in ("tied", "odd vocabulary", "experts")),
    ("llama", "bfloat16", Layout(pp=2)),
    ("tied", "float32", Layout(tp=2, pp=2)),
    ("window", "float32", Layout(cp=2, pp=2)),
    ("experts", "float32", Layout(ep=2, pp=2)),
    ("deep", "float32", Layout(pp=4)),
]
MORE: list[Case] = [
    *((model, "float32", Layout(tp=4)) for model in ("tied", "mixtral", "window", "deep")),
    ("tied", "float32", Layout(cp=2)),
    ("llama", "bfloat16", Layout(cp=2)),
    ("llama", "float32", Layout(cp=4)),
    ("experts", "float32", Layout(cp=2, ep=2)),
    *((model, "float32", Layout(pp=2)) for model in ("llama", "mixtral", "window", "deep")),
    ("odd vocabulary", "float32", Layout(tp=2, pp=2)),
    ("experts", "float32", Layout(tp=2, ep=2, pp=2)),
]
WITH_EXPERTS = (
    *("qwen3_moe", "mixtral", "qwen2_moe", "qwen3_vl_moe", "glm4_moe", "bailing_moe"),
    *("llama4_text", "llama4"),
    *("minimax_m2", "hy_v3", "ernie4_5_moe", "hunyuan_v1_moe", "granitemoe", "dots1", "olmoe"),
)
EACH: list[Case] = [
    *((family, "float32", Layout(tp=2)) for family in FAMILIES),
    *((family, "float32", Layout(cp=2)) for family in FAMILIES),
    *((family, "float32", Layout(pp=2)) for family in FAMILIES),
    *((family, "float32", Layout(ep=2)) for family in WITH_EXPERTS),
]
"""Each family in each layout; docs/model-table.md has them."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Made(MODELS, tmp_path_factory)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Made(INTERPRETED, tmp_path_factory)


class Made(dict[str, Path]):
    """Checkpoints of models, each made when a test first asks for it."""

    def __init__(
        self, models: dict[str, tuple[str, dict[str, Any]]], folders: pytest.TempPathFactory
    ) -> None:
        self.models, self.folders = models, folders

    def __missing__(self, name: str) -> Path:
        family, options = self.models[name]
        self[name] = make_checkpoint(self.folders.mktemp("model"), family, **options)
        return self[name]


@cache
def alone(path: Path, dtype: str, copy: int, decodes: int) -> tuple[Any, Any, Any]:
    """Compute one rank's results for the requests of a data-parallel attention group."""
    return generate(path, dtype, Layout(), ALONE, inputs=steps(copy, decodes))


def each_copy(
    path: Path, dtype: str, layout: Layout, decodes: int = DECODES
) -> list[tuple[Any, Any, Any]]:
    """Compute them for each data-parallel attention group."""
    return [alone(path, dtype, copy, decodes) for copy in range(layout.dp_size)]


@pytest.mark.parametrize(
    ("size", "which"),
    [
        pytest.param(2, CASES, marks=pytest.mark.features("tp", "ep")),
        pytest.param(
            *(4, CASES),
            marks=[
                pytest.mark.features("tp", "cp", "ep"),
                pytest.mark.features("tp", "pp"),
                pytest.mark.features("cp", "pp"),
                pytest.mark.features("ep", "pp"),
                pytest.mark.slow,
            ],
        ),
        *(pytest.param(size, MORE, marks=pytest.mark.slow) for size in (2, 4)),
        pytest.param(2, EACH, marks=pytest.mark.slow),
    ],
    ids=["2", "4", "2 more", "4 more", "each family"],
)
def test_tokens_are_those_of_one_rank(
    size: int, which: list[Case], checkpoints: dict[str, Path]
) -> None:
    cases = [
        (str(case), checkpoints[case[0]], case) for case in which if case[2].world_size == size
    ]
    with running(size, be_rank, size, cases) as pipes:
        for name, path, (_, dtype, first) in cases:
            expected = each_copy(path, dtype, first)
            counts: dict[int, set[int]] = {}
            for rank, pipe in enumerate(pipes):
                layout = replace(first, rank=rank)
                tokens, logprobs, sums = expected[layout.dp_group]
                assert len({tuple(row) for row in tokens.T}) == 2
                told, their_tokens, their_logprobs, their_sums, exchanges = pipe.recv()
                assert told == name
                counts.setdefault(layout.stage, set()).add(exchanges)
                if layout.stage < layout.pp - 1:
                    assert not their_tokens.size, "only the last stage samples"
                    continue
                if dtype == "float32" or layout.stage_size == 1:
                    assert (their_tokens == tokens).all(), name
                else:  # the sum is rounded otherwise; the first request is greedy
                    assert their_tokens[0, 0] == tokens[0, 0], name
                close = 1e-4 if dtype == "float32" else 0.15
                assert abs(their_logprobs[0] - logprobs[0]).max() < close, name
                close = 1e-4 if dtype == "float32" else 0.5
                assert abs(their_sums - sums).max() < close, name
            # These counts identify a rank that lags in its stage.
            assert all(len(of_stage) == 1 for of_stage in counts.values())


OVERLAPPED: dict[int, list[tuple[str, Layout]]] = {
    1: [("llama", Layout())],
    2: [
        ("llama", Layout(tp=2)),
        ("experts", Layout(tp=2)),
        ("experts", Layout(tp=2, ep=2)),
        ("experts", Layout(ep=2)),
        ("window", Layout(cp=2)),
        ("tied", Layout(pp=2)),
        *((model, Layout(tp=2)) for model in ("shared gate", "wide norms", "four norms")),
        ("parallel", Layout(tp=2)),
    ],
}
MORE_OVERLAPPED: dict[int, list[tuple[str, Layout]]] = {
    2: [
        *((model, Layout(tp=2)) for model in ("tied", "odd vocabulary", "mixtral", "shared bias")),
        ("groups", Layout(tp=2)),
        *((model, Layout(ep=2)) for model in NEWER),
        *((model, Layout(tp=2, ep=2)) for model in ("groups", "wide norms")),
        ("wide norms", Layout(cp=2)),
        ("output norms", Layout(tp=2)),
        *((model, Layout(tp=2)) for model in ("layer norms", "parallel windows")),
        ("four norms", Layout(cp=2)),
        *((model, Layout(tp=2)) for model in EXPERTS),
        *((model, Layout(ep=2)) for model in EXPERTS),
    ],
    4: [
        *((model, Layout(tp=4)) for model in (*NEWER, "output norms")),
        *((model, Layout(ep=4)) for model in ("groups", "wide norms")),
        ("tied", Layout(tp=2, pp=2)),
        *((model, Layout(tp=4)) for model in ("llama", "experts")),
        *(("experts", Layout(tp=4, ep=ep)) for ep in (2, 4)),
        ("tied", Layout(tp=2, cp=2)),
    ],
}


@pytest.mark.features("gpu", "overlapped", "graphs", "tp", "ep")
@pytest.mark.features("gpu", "overlapped", "cp")
@pytest.mark.features("gpu", "overlapped", "pp")
@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        *OVERLAPPED.items(),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE_OVERLAPPED.items()),
    ],
    ids=["1", "2", "2 more", "4 more"],
)
def test_overlapped_kernels_give_the_tokens_of_plain_ones(
    size: int, layouts: list[tuple[str, Layout]], interpreted: dict[str, Path]
) -> None:
    """Prefill is sharded between the products, decode is not."""
    compare(size, layouts, interpreted)


@pytest.mark.parametrize(
    "layouts",
    [
        [("llama", Layout(tp=2))],
        pytest.param([("tied", Layout(tp=2)), ("mixtral", Layout(tp=2))], marks=pytest.mark.slow),
    ],
    ids=["llama", "more"],
)
def test_an_all_reduce_after_the_products_gives_the_tokens_of_plain_ones(
    layouts: list[tuple[str, Layout]], interpreted: dict[str, Path]
) -> None:
    """A decode step has more tokens than products send to all ranks, and fewer than are split."""
    compare(2, layouts, interpreted, fused=1)


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        (1, [(model, Layout()) for model in ("shared gate", "groups", "wide norms", "four norms")]),
        (1, [(model, Layout()) for model in ("parallel", "layer norms", "scaled inputs")]),
        (2, [("llama", Layout(tp=2)), ("window", Layout(cp=2))]),
        pytest.param(1, [(model, Layout()) for model in OTHERS], marks=pytest.mark.slow),
        pytest.param(
            2,
            [
                *((model, Layout(tp=2)) for model in ("mixtral", "wide norms", "shared bias")),
                *((model, Layout(tp=2)) for model in ("output norms", "four norms")),
                *((model, Layout(ep=2)) for model in ("groups", "wide norms")),
                ("shared gate", Layout(tp=2, ep=2)),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            2,
            [
                *((model, Layout(tp=2)) for model in ("window", *OTHERS)),
                *((model, Layout(ep=2)) for model in ("mixtral", "ling", "shared bias")),
                *((model, Layout(ep=2)) for model in ("neighbours", "normed after turning")),
                *((model, Layout(ep=2)) for model in ("qwen3_vl_moe", "scaled inputs", "llama4")),
            ],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            4,
            [
                *((model, Layout(tp=2, ep=4)) for model in ("experts", *NEWER)),
                *((model, Layout(tp=4)) for model in ("groups", "wide norms")),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["1", "layer norms", "2", "1 more", "2 more", "each family", "4"],
)
def test_gpu_kernels_between_plain_collectives_give_the_tokens_of_cpu_kernels(
    size: int, layouts: list[tuple[str, Layout]], interpreted: dict[str, Path]
) -> None:
    compare(size, layouts, interpreted, overlapped=False)


def compare(
    size: int,
    layouts: list[tuple[str, Layout]],
    checkpoints: dict[str, Path],
    *,
    fused: int = 4,
    overlapped: bool = True,
) -> None:
    """Compare Triton kernels, in the interpreter, with CPU kernels on one rank."""
    cases = [
        (f"{model} {layout}", checkpoints[model], (model, "float32", layout))
        for model, layout in layouts
    ]
    with running(size, be_rank, size, cases, after=(4, fused, overlapped)) as pipes:
        for name, path, (_, dtype, first) in cases:
            expected = each_copy(path, dtype, first, INTERPRETED_DECODES)
            counts = set()
            for rank, pipe in enumerate(pipes):
                layout = replace(first, rank=rank)
                tokens, logprobs, sums = expected[layout.dp_group]
                told, their_tokens, their_logprobs, their_sums, exchanges = pipe.recv()
                assert told == name
                if layout.stage < layout.pp - 1:
                    continue
                counts.add(exchanges)
                assert (their_tokens == tokens).all(), name
                assert abs(their_logprobs - logprobs).max() < 1e-4, name
                assert abs(their_sums - sums).max() < 1e-4, name
            assert len(counts) == 1  # by which the rank is found that is behind
            # In each of a stage's layers, and each step.
            layers = len(read_spec(path).layers) // layout.pp
            ran = layers * (2 + INTERPRETED_DECODES)
            assert counts.pop() >= (ran if layout.stage_size > 1 else 0)


def test_a_rank_reads_its_share(checkpoints: dict[str, Path]) -> None:
    for name, whole in (
        ("llama", Layout(tp=2)),
        ("llama", Layout(tp=4)),
        ("llama", Layout(tp=2, cp=2)),
        ("experts", Layout(tp=2, ep=2)),
        ("experts", Layout(ep=4)),
        ("tied", Layout(tp=2, pp=2)),
        ("deep", Layout(pp=4)),
        ("experts", Layout(ep=2, pp=2)),
    ):
        spec = read_spec(checkpoints[name])
        for rank in range(whole.world_size):
            told: list[tuple[int, int]] = []
            layout = replace(whole, rank=rank)
            weights = Weights(
                checkpoints[name], spec, lambda *state, told=told: told.append(state), layout
            )
            share = layout.local(spec)
            for weight in layout.of_stage(spec).weights:
                list(weights.read_each(weight))
            assert told[-1][0] == told[-1][1] == share.parameters * 4, (name, layout)
