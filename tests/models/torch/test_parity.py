"""Every family and option gives transformers' logits, for any division into steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.checkpoints import FAMILIES, VOCAB_SIZE, load_oracle, make_checkpoint
from support.ragged import Step, run_ragged

from weft.models.checkpoint.locate import read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.spec import ModelSpec
from weft.models.torch.cpu_model import CpuModel

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0}
LONGROPE = {
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 4,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
    },
}
OF_16 = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 4,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}
"""longrope for heads with 16 dimensions, all rotated."""
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("llama", {"head_dim": 32}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, norm eps": ("llama", {"rms_norm_eps": 0.1}),
    "granite": ("granite", {"tie_word_embeddings": True}),
    "granite, untied, biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite, no multipliers": (
        "granite",
        {
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
        },
    ),
    "granitemoe": ("granitemoe", {"tie_word_embeddings": True}),
    "granitemoe, untied, biases, no multipliers": (
        "granitemoe",
        {
            "attention_bias": True,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "logits_scaling": 1.0,
            "num_experts_per_tok": 3,
            "residual_multiplier": 1.0,
        },
    ),
    "granitemoeshared": ("granitemoeshared", {}),
    "granitemoeshared, nothing shared": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "cohere": ("cohere", {}),
    "cohere, no q/k norm, untied, biases, one KV head": (
        "cohere",
        {
            "attention_bias": True,
            "logit_scale": 0.0625,
            "num_key_value_heads": 1,
            "tie_word_embeddings": False,
            "use_qk_norm": False,
        },
    ),
    "cohere, norm eps": ("cohere", {"layer_norm_eps": 0.1, "rope_parameters": LLAMA3}),
    "cohere2": ("cohere2", {"logit_scale": 1.0}),
    "cohere2, layer types, untied, biases": (
        "cohere2",
        {
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention"],
            "num_hidden_layers": 2,
            "tie_word_embeddings": False,
        },
    ),
    "llama4": ("llama4_text", {}),
    "llama4, layers, no q/k norm, biases, tied, one KV head": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],
            "moe_layers": [0, 3],
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "num_key_value_heads": 1,
            "attn_temperature_tuning": False,
            "rope_parameters": LLAMA3,
        },
    ),
    "llama4, all sparse, norm eps": (
        "llama4_text",
        {"interleave_moe_layer_step": 1, "rms_norm_eps": 0.1, "attention_chunk_size": 64},
    ),
    "llama4, text of several modalities": ("llama4", {}),
    "stablelm": ("stablelm", {}),
    "stablelm, parallel, q/k norm, tied": (
        "stablelm",
        {
            "partial_rotary_factor": 0.5,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "use_parallel_residual": True,
            "use_qkv_bias": False,
        },
    ),
    "stablelm, parallel": ("stablelm", {"use_parallel_residual": True, "layer_norm_eps": 0.1}),
    "mistral": ("mistral", {}),
    "mistral, window": ("mistral", {"sliding_window": 6}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, window on the second layer": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, layer types": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3, biases": ("qwen3", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"num_experts_per_tok": 3}),
    "qwen3_moe, first layer dense": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3_moe, window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 7}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe, first layer dense": ("qwen2_moe", {"mlp_only_layers": [0]}),
    "qwen2_vl": ("qwen2_vl", {}),
    "qwen2_5_vl": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, yarn with its own amplitude": (
        "llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 20}},
    ),
    "qwen3, yarn, fractions": ("qwen3", {"rope_parameters": YARN | {"truncate": False}}),
    "phi3": ("phi3", {}),
    "phi3, half of a head": ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 9}),
    "phi3, long context": ("phi3", LONGROPE),
    "phi3, short context": ("phi3", LONGROPE | {"original_max_position_embeddings": 64}),
    "glm": ("glm", {}),
    "glm, a quarter of a head, linear": (
        "glm",
        {"rope_parameters": LINEAR | {"partial_rotary_factor": 0.25}, "attention_bias": False},
    ),
    "glm4": ("glm4", {}),
    "glm4, no biases": ("glm4", {"attention_bias": False, "rms_norm_eps": 0.1}),
    "olmo2": ("olmo2", {}),
    "olmo2, biases, one KV head": ("olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo3": ("olmo3", {}),
    "olmo3, layer types, yarn on full attention": (
        "olmo3",
        {
            "num_hidden_layers": 2,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "olmoe": ("olmoe", {}),
    "olmoe, biases, one KV head, normalized": (
        "olmoe",
        {"attention_bias": True, "num_key_value_heads": 1, "norm_topk_prob": True},
    ),
    "flex_olmo": ("flex_olmo", {}),
    "flex_olmo, biases, one KV head, normalized": (
        "flex_olmo",
        {"attention_bias": True, "num_key_value_heads": 1, "norm_topk_prob": True},
    ),
    "exaone4": ("exaone4", {}),
    "exaone4, no window": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "exaone4, layer types": (
        "exaone4",
        {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, groups": ("glm4_moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": True}),
    "glm4_moe, two shared experts": (
        "glm4_moe",
        {"n_shared_experts": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
    "dots1": ("dots1", {"norm_topk_prob": True, "routed_scaling_factor": 2.5}),
    "dots1, window on the second layer, groups": (
        "dots1",
        {"sliding_window": 5, "max_window_layers": 1, "n_group": 4, "topk_group": 2},
    ),
    "dots1, layer types, biases": (
        "dots1",
        {
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "bailing_moe": ("bailing_moe", {}),
    "bailing_moe, bias, other groups, yarn": (
        "bailing_moe",
        {
            "attention_bias": True,
            "first_k_dense_replace": 0,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": YARN | {"partial_rotary_factor": 0.5},
        },
    ),
    "bailing_moe, two shared experts, no q/k norm": (
        "bailing_moe",
        {"n_shared_experts": 2, "use_qk_norm": False, "tie_word_embeddings": True},
    ),
    "minimax_m2": ("minimax_m2", {}),
    "minimax_m2, one KV head": ("minimax_m2", {"num_key_value_heads": 1, "rotary_dim": 16}),
    "hy_v3": ("hy_v3", {}),
    "ernie4_5": ("ernie4_5", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {}),
    "ernie4_5_moe, all layers, none shared": (
        "ernie4_5_moe",
        {"moe_layer_start_index": 0, "moe_num_shared_experts": 0},
    ),
    "hy_v3, biases, all layers sparse": (
        "hy_v3",
        {"attention_bias": True, "mlp_bias": True, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {}),
    "hunyuan_v1_dense, alpha": (
        "hunyuan_v1_dense",
        {
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
            "attention_bias": True,
        },
    ),
    "hunyuan_v1_dense, yarn": ("hunyuan_v1_dense", {"rope_parameters": YARN}),
    "hunyuan_v1_moe, longrope": (
        "hunyuan_v1_moe",
        {"rope_parameters": OF_16, "original_max_position_embeddings": 4},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {}),
    "hunyuan_v1_moe, experts by layer": ("hunyuan_v1_moe", {"moe_topk": [1, 3]}),
    "ministral3": ("ministral3", {}),
    "mistral3": ("mistral3", {}),
    "mistral3, with Mistral": (
        "mistral3",
        {"model_type": "mistral", "rope_parameters": None, "sliding_window": None},
    ),
    "seed_oss": ("seed_oss", {}),
    "seed_oss, other biases": (
        "seed_oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "smollm3, window": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [0, 1]},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "mixtral": ("mixtral", {}),
    "mixtral, window": ("mixtral", {"sliding_window": 9}),
}

LENGTHS = (37, 5, 21)
WHOLE: list[Step] = [[(0, 37)], [(1, 5)], [(2, 21)]]
CHUNKS: list[Step] = [[(0, 7)], [(0, 1)], [(0, 24)], [(0, 5)], [(1, 5)], [(2, 20)], [(2, 1)]]
MIXED: list[Step] = [
    [(0, 9), (1, 5)],
    [(2, 13), (0, 1)],
    [(0, 26), (2, 7)],
    [(2, 1), (0, 1)],
]
TOKEN_BY_TOKEN: list[Step] = [
    [(request, 1) for request, length in enumerate(LENGTHS) if i < length]
    for i in range(max(LENGTHS))
]
SCHEDULES = {"whole": WHOLE, "chunks": CHUNKS, "mixed": MIXED, "token by token": TOKEN_BY_TOKEN}


class Case(NamedTuple):
    """A loaded checkpoint, requests, and transformers' logits for them."""

    model: CpuModel
    spec: ModelSpec
    requests: list[list[int]]
    expected: list[torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MODELS.values(), ids=MODELS.keys())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One case for each of `MODELS`."""
    family, overrides = request.param
    path = make_checkpoint(tmp_path_factory.mktemp("model"), family, **overrides)
    requests = _requests()
    spec = read_spec(path).for_context(max(LENGTHS))
    return Case(
        model=CpuModel(spec, Weights(path, spec), torch.float32),
        spec=spec,
        requests=requests,
        expected=_transformers_logits(path, requests, torch.float32),
    )


@pytest.mark.parametrize("steps", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_logits_equal_those_of_transformers(case: Case, steps: list[Step]) -> None:
    logits = run_ragged(case.model, case.spec, case.requests, steps)
    for actual, expected in zip(logits, case.expected, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_exact_as_transformers(family: str, tmp_path: Any) -> None:
    """Against float32 on the same weights; without ties, it also picks the same tokens.

    Rounding may exchange two experts with nearly equal scores, in transformers as here. The few
    tokens of such ties are left out.
    """
    path = make_checkpoint(tmp_path, family, dtype="bfloat16")
    spec = read_spec(path)
    requests = _requests()
    exact = torch.cat(_transformers_logits(path, requests, torch.float32))
    theirs = torch.cat(_transformers_logits(path, requests, torch.bfloat16))
    model = CpuModel(spec, Weights(path, spec), torch.bfloat16)
    ours = torch.cat(run_ragged(model, spec, requests, MIXED, dtype=torch.bfloat16))

    error = (ours - exact).abs().mean(-1)
    noise = (theirs - exact).abs().mean(-1).median()
    assert error.median() < 1.25 * noise
    settled = error < 4 * noise
    assert settled.float().mean() > 0.9
    best, second = exact.topk(2).values.unbind(-1)
    clear = settled & (best - second > 10 * noise)
    assert clear.sum() > 10
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


def _requests() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def _transformers_logits(
    path: Any, requests: list[list[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    model = load_oracle(path, dtype)
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].float() for tokens in requests]
