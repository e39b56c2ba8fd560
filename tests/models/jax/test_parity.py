"""Every family gives transformers' float32 logits, for any division into steps, on any mesh.

So do the TPU kernels, which Pallas interprets here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from support.checkpoints import VOCAB_SIZE, load_oracle, make_checkpoint
from support.switches import shard_tokens

from weft.models.checkpoint.locate import read_spec
from weft.models.interface import StepInput
from weft.models.jax.buckets import Buckets
from weft.models.jax.kernels import Kernels
from weft.models.jax.mesh import make_mesh
from weft.models.jax.parameters import load
from weft.models.jax.program import Program
from weft.models.spec.layout import Layout

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
QWEN2 = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
ONE_HEAD = {"num_key_value_heads": 1}
BIASES = {"attention_bias": True, "mlp_bias": True}
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
slow = pytest.mark.slow
PLAIN = Kernels()

# A family, some config fields, tp and ep.
CASES = [
    pytest.param("llama", BIASES | {"rope_parameters": LLAMA3}, 2, 1, id="llama, biases, tp 2"),
    pytest.param("mistral", {"sliding_window": 6}, 1, 1, id="mistral, window"),
    pytest.param("granite", BIASES | {"tie_word_embeddings": True}, 1, 1, marks=slow, id="granite"),
    pytest.param("llama4_text", {}, 2, 2, id="llama4_text, tp 2, ep 2"),
    pytest.param("llama4", {}, 2, 2, marks=slow, id="llama4, tp 2, ep 2"),
    pytest.param("cohere", {}, 2, 1, id="cohere, tp 2"),
    pytest.param("cohere", BIASES | ONE_HEAD, 4, 1, marks=slow, id="cohere, one KV head, tp 4"),
    pytest.param("cohere2", TWO_KINDS, 2, 1, marks=slow, id="cohere2, tp 2"),
    pytest.param("cohere2", {}, 1, 1, marks=slow, id="cohere2"),
    pytest.param("stablelm", {}, 2, 1, id="stablelm, tp 2"),
    pytest.param(
        *("stablelm", {"qk_layernorm": True, "use_parallel_residual": True}, 4, 1),
        marks=slow,
        id="stablelm, parallel, tp 4",
    ),
    pytest.param(
        "qwen2", QWEN2 | {"tie_word_embeddings": True}, 1, 1, marks=slow, id="qwen2, window, tied"
    ),
    pytest.param("qwen3", ONE_HEAD | {"head_dim": 24}, 2, 1, id="qwen3, tp 2, one KV head"),
    pytest.param("qwen3_moe", {"mlp_only_layers": [0]}, 4, 2, id="qwen3_moe, tp 4, ep 2"),
    pytest.param(
        *("mixtral", {"sliding_window": 9}, 2, 2), marks=slow, id="mixtral, window, tp 2, ep 2"
    ),
    pytest.param("llama", BIASES | {"intermediate_size": 52}, 4, 1, id="llama, weights travel"),
    pytest.param(
        *("glm4_moe", {"n_group": 4, "topk_group": 2, "use_qk_norm": True}, 4, 2),
        id="glm4_moe, groups, tp 4, ep 2",
    ),
    pytest.param("bailing_moe", {}, 2, 2, marks=slow, id="bailing_moe, tp 2, ep 2"),
    pytest.param("minimax_m2", ONE_HEAD, 2, 2, id="minimax_m2, one KV head, tp 2, ep 2"),
    pytest.param("olmo3", TWO_KINDS, 2, 1, marks=slow, id="olmo3, tp 2"),
    pytest.param("olmo3", {}, 1, 1, marks=slow, id="olmo3"),
    pytest.param("granite", BIASES, 2, 1, marks=slow, id="granite, tp 2"),
    pytest.param(
        "granitemoeshared", {"tie_word_embeddings": True}, 2, 2, marks=slow, id="granitemoeshared"
    ),
    pytest.param("granitemoe", BIASES, 2, 2, marks=slow, id="granitemoe, biases, tp 2, ep 2"),
    pytest.param("olmoe", {}, 2, 2, marks=slow, id="olmoe, tp 2, ep 2"),
    pytest.param("flex_olmo", {}, 2, 2, id="flex_olmo, tp 2, ep 2"),
    pytest.param("dots1", {}, 2, 2, marks=slow, id="dots1, tp 2, ep 2"),
    pytest.param("exaone4", {}, 4, 1, marks=slow, id="exaone4, tp 4"),
    pytest.param("glm4", {}, 2, 1, marks=slow, id="glm4, tp 2"),
    pytest.param("olmo2", BIASES, 2, 1, marks=slow, id="olmo2, biases, tp 2"),
    pytest.param("qwen2_moe", {}, 2, 1, marks=slow, id="qwen2_moe, tp 2"),
    pytest.param("ministral3", {}, 1, 1, marks=slow, id="ministral3"),
    pytest.param("hunyuan_v1_moe", {}, 2, 2, marks=slow, id="hunyuan_v1_moe, tp 2, ep 2"),
    pytest.param("hy_v3", {"mlp_bias": True}, 2, 2, marks=slow, id="hy_v3, biases, tp 2, ep 2"),
    pytest.param("ernie4_5_moe", {}, 2, 2, marks=slow, id="ernie4_5_moe, tp 2, ep 2"),
    pytest.param("ernie4_5", {}, 2, 1, marks=slow, id="ernie4_5, tp 2"),
    pytest.param("phi3", {"partial_rotary_factor": 0.5}, 2, 1, marks=slow, id="phi3, tp 2"),
    pytest.param("glm", {}, 2, 1, marks=slow, id="glm, tp 2"),
    pytest.param("glm4_moe", {}, 1, 1, marks=slow, id="glm4_moe"),
    pytest.param("minimax_m2", {}, 4, 4, marks=slow, id="minimax_m2, tp 4, ep 4"),
    pytest.param("smollm3", {"num_hidden_layers": 4}, 2, 1, marks=slow, id="smollm3, tp 2"),
    pytest.param("seed_oss", {}, 2, 1, marks=slow, id="seed_oss, tp 2"),
    pytest.param("llama", {"rope_parameters": YARN}, 1, 1, marks=slow, id="llama, yarn"),
    pytest.param("llama", {}, 1, 1, marks=slow, id="llama"),
    pytest.param("qwen3_moe", {"norm_topk_prob": True}, 1, 1, marks=slow, id="qwen3_moe"),
    pytest.param("llama", ONE_HEAD, 1, 1, marks=slow, id="llama, one KV head"),
    pytest.param("qwen3", {}, 4, 1, marks=slow, id="qwen3, tp 4, more than KV heads"),
    pytest.param("llama", {"vocab_size": 321}, 4, 1, marks=slow, id="llama, vocabulary, tp 4"),
    pytest.param("mistral", {}, 2, 1, marks=slow, id="mistral, tp 2"),
    pytest.param("mixtral", {}, 1, 1, marks=slow, id="mixtral"),
    pytest.param("mixtral", {}, 4, 4, marks=slow, id="mixtral, tp 4, ep 4"),
    pytest.param("qwen2", {}, 2, 1, marks=slow, id="qwen2, tp 2"),
    pytest.param("qwen3", {"attention_bias": True}, 2, 1, marks=slow, id="qwen3, biases, tp 2"),
    pytest.param("qwen3_moe", {"num_experts_per_tok": 3}, 2, 1, marks=slow, id="qwen3_moe, tp 2"),
    pytest.param("qwen2_vl", {}, 2, 1, marks=slow, id="qwen2_vl, tp 2"),
    pytest.param("qwen2_5_vl", {}, 2, 1, marks=slow, id="qwen2_5_vl, tp 2"),
    pytest.param("qwen3_vl", {}, 2, 1, marks=slow, id="qwen3_vl, tp 2"),
    pytest.param("qwen3_vl_moe", {}, 2, 2, marks=slow, id="qwen3_vl_moe, tp 2, ep 2"),
    pytest.param("mistral3", {}, 2, 1, marks=slow, id="mistral3, tp 2"),
    pytest.param("ministral3", {}, 2, 1, marks=slow, id="ministral3, tp 2"),
    pytest.param("qwen2_moe", {}, 2, 2, marks=slow, id="qwen2_moe, tp 2, ep 2"),
    pytest.param("hunyuan_v1_dense", {}, 2, 1, marks=slow, id="hunyuan_v1_dense, tp 2"),
]

WIDE = {"head_dim": 64, "hidden_size": 128}
"""Configs for which attention and the token exchange have kernels."""

# The same, and the kernels used in steps that shard tokens, and in other steps.
KERNEL_CASES = [
    pytest.param("mistral", WIDE | {"sliding_window": 6}, 1, 1, "attention", id="mistral, window"),
    pytest.param(
        *("qwen3_moe", WIDE, 2, 2, "attention products exchange"),
        id="qwen3_moe, ep 2",
        marks=slow,
    ),
    pytest.param("llama", WIDE | BIASES, 2, 1, "attention products", id="llama, tp 2", marks=slow),
    pytest.param("llama", {}, 2, 1, "products", id="llama, heads of 16", marks=slow),
    pytest.param("glm4", WIDE, 2, 1, "attention products", id="glm4, tp 2", marks=slow),
    pytest.param(
        *("glm4_moe", WIDE, 2, 2, "attention products exchange"), id="glm4_moe, ep 2", marks=slow
    ),
    pytest.param(
        *("qwen2_moe", WIDE, 2, 2, "attention products exchange"), id="qwen2_moe, ep 2", marks=slow
    ),
    pytest.param("mixtral", {}, 2, 2, "products", id="mixtral, heads of 16", marks=slow),
    pytest.param(
        *("qwen3_moe", WIDE | {"num_experts_per_tok": 3}, 4, 2, "attention products"),
        id="qwen3_moe, on two axes",
        marks=slow,
    ),
    pytest.param(
        *("mixtral", WIDE, 4, 4, "attention products exchange"), id="mixtral, ep 4", marks=slow
    ),
]

NUM_BLOCKS = 64
LENGTHS = (90, 5, 21)
# Steps: (request, number of its next tokens). All are in one bucket of 128 tokens, which a mesh of
# 2 or 4 shards between blocks; FEW is in a bucket of 32, which is not sharded.
MANY = [[(0, 53), (1, 5)], [(2, 13), (0, 1)], [(0, 36), (2, 8)]]
FEW = [[(0, 20), (1, 5)], [(2, 13), (0, 1)], [(0, 23), (2, 7)], [(2, 1), (0, 30)], [(0, 16)]]


@pytest.mark.parametrize(("family", "overrides", "tp", "ep"), CASES)
def test_logits_equal_those_of_transformers(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    tp: int,
    ep: int,
) -> None:
    weights_travel = "weights travel" in request.node.name
    shard_tokens(monkeypatch, weights_travel=weights_travel)
    path = make_checkpoint(tmp_path, family, **overrides)
    random = np.random.default_rng(1)
    requests = [random.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    expected = _transformers_logits(path, requests)
    few = FEW if tp > 1 else []
    for tokens, steps in ((128, MANY), (32, few)):
        if steps:
            travel = weights_travel and tokens == 128
            actual = _run(path, requests, steps, tokens, tp, ep, weights_travel=travel)
            _assert_close(actual, expected)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("family", "overrides", "tp", "ep", "parts"), KERNEL_CASES)
def test_kernels_give_the_same_logits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    family: str,
    overrides: dict[str, Any],
    tp: int,
    ep: int,
    parts: str,
) -> None:
    shard_tokens(monkeypatch)
    path = make_checkpoint(tmp_path, family, **overrides)
    random = np.random.default_rng(1)
    requests = [random.integers(0, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    kernels = Kernels(experts=True, **dict.fromkeys(parts.split(), True))
    actual = _run(path, requests, MANY, 128, tp, ep, kernels)
    _assert_close(actual, _transformers_logits(path, requests))


def _assert_close(actual: list[np.ndarray[Any, Any]], expected: list[np.ndarray[Any, Any]]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def _run(
    path: Path,
    requests: Sequence[list[int]],
    steps: Sequence[Sequence[tuple[int, int]]],
    tokens: int,
    tp: int,
    ep: int,
    kernels: Kernels = PLAIN,
    *,
    weights_travel: bool = False,
) -> list[np.ndarray[Any, Any]]:
    """Return the logits after every token of every request; the cache is full of NaN at first.

    Args:
        kernels: the choice that --kernels overlapped must make; without kernels, blocks are
            smaller.
        weights_travel: MLPs must pass on weights, not tokens.
    """
    block_size = 4 if kernels is PLAIN else 16
    spec, layout = read_spec(path), Layout(tp, ep)
    mesh = make_mesh(jax.devices(), tp, ep)
    buckets = Buckets(
        *(spec, layout, mesh, "float32"),
        max_num_seqs=tokens,
        max_num_batched_tokens=tokens,
        max_model_len=128,
        block_size=block_size,
    )
    bucket = next(one for one in buckets.all() if one.tokens == tokens and not one.decodes)
    program = Program(
        *(spec, layout, mesh),
        dtype="float32",
        block_size=block_size,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=tokens,
        buckets=[bucket],
        kernels="plain" if kernels is PLAIN else "overlapped",
    )
    assert program.shape(bucket).kernels == kernels
    assert program.shape(bucket).sharded == (tp > 1 and tokens == 128)
    assert program.shape(bucket).weights_travel == weights_travel
    params = load(path, spec, layout, mesh, "float32")
    forward = program.compile_forward(bucket)
    cache = jax.tree.map(
        lambda a: jax.device_put(np.full(a.shape, np.nan, a.dtype), a.sharding), program.cache
    )
    newest = jax.device_put(np.zeros(tokens, np.int32), program.state.newest.sharding)
    done = [0] * len(requests)
    logits: list[list[np.ndarray[Any, Any]]] = [[] for _ in requests]
    for step in steps:
        batch = buckets.pad(_step(requests, done, step, block_size), bucket)
        out, _, cache = forward(params, cache, newest, batch)
        out, start = np.asarray(out)[:, : spec.vocab_size], 0
        for request, count in step:
            logits[request].append(out[start : start + count])
            start += count
    return [np.concatenate(parts) for parts in logits]


def _step(
    requests: Sequence[list[int]],
    done: list[int],
    step: Sequence[tuple[int, int]],
    block_size: int,
) -> StepInput:
    """Make a step in which every token is sampled, in scattered blocks."""
    deal = np.random.default_rng(0).permutation(NUM_BLOCKS).astype(np.int32)
    blocks = np.split(deal, np.cumsum([-(-length // block_size) for length in LENGTHS]))
    table = np.zeros((len(step), max(map(len, blocks[: len(requests)]))), np.int32)
    tokens, positions = [], []
    for row, (request, count) in enumerate(step):
        table[row, : len(blocks[request])] = blocks[request]
        positions += range(done[request], done[request] + count)
        tokens += requests[request][done[request] : done[request] + count]
        done[request] += count
    which = np.array([request for request, _ in step], np.int32)
    return StepInput(
        step=0,
        token_ids=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        query_start=np.cumsum([0, *(count for _, count in step)], dtype=np.int32),
        context_len=np.array([done[request] for request, _ in step], np.int32),
        block_table=table,
        slot=which,
        sample_index=np.arange(len(tokens), dtype=np.int32),
        sample_slot=np.zeros(len(tokens), np.int32),
        output_index=np.zeros(len(tokens), np.int32),
    )


def _transformers_logits(path: Path, requests: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    model = load_oracle(path, torch.float32)
    with torch.no_grad():
        return [model(torch.tensor([tokens])).logits[0].numpy() for tokens in requests]
