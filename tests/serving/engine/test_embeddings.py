"""Embeddings are the last hidden states of `transformers`, pooled. For jax, see test_jax.py."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint

from weft import LLM, SamplingParams
from weft.errors import RequestError

SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 24,
    "max_model_len": 128,
    "kv_cache_memory": 2**18,
    "threads": 1,
}
LENGTHS = (1, 5, 70, 128, 24, 25, 33)
RANDOM = np.random.default_rng(3)
PROMPTS = [RANDOM.integers(3, 300, length).tolist() for length in LENGTHS]
PROMPTS.append(PROMPTS[2][:48] + PROMPTS[4])  # of which the prefix cache has something
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)

Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def states(model: Path) -> list[Vectors]:
    return hidden_states(model)


def hidden_states(path: Path) -> list[Vectors]:
    """What transformers gives for `PROMPTS`, [tokens, hidden] each."""
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return [theirs(torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


def pooled(states: list[Vectors], kind: str) -> Vectors:
    rows = [each.mean(0) if kind == "mean" else each[-1] for each in states]
    return np.stack([row / np.linalg.norm(row) for row in rows])


def embed_beside_answers(llm: LLM) -> Vectors:
    """Twice, at once with requests that generate, whose tokens must stay what they are."""
    alone = llm.generate(PROMPTS[4:], GREEDY)
    begun = threading.Event()

    def generate() -> list[list[int]]:
        begun.set()
        return [answer.token_ids for answer in llm.generate(PROMPTS[4:], GREEDY)]

    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(generate)
        begun.wait()
        vectors = llm.embed(PROMPTS)
        again = llm.embed(PROMPTS[::-1])
        assert answers.result() == [answer.token_ids for answer in alone]
    np.testing.assert_allclose(again[::-1], vectors, atol=1e-5)
    return vectors


@pytest.mark.parametrize("kind", ["mean", "last"])
def test_torch(model: Path, states: list[Vectors], kind: str) -> None:
    """In chunks, in batches with requests that generate, with a prefix cache."""
    with LLM(model, pooling=kind, backend="torch", **SIZES) as llm:
        vectors = embed_beside_answers(llm)
        few = llm.embed(PROMPTS[:2], dimensions=8)
        assert llm.embed([]).shape == (0, 64)
        for none in (0, 65):
            with pytest.raises(RequestError, match=rf"dimensions is {none}; it must be in \[1, 64"):
                llm.embed(PROMPTS, dimensions=none)
        with pytest.raises(RequestError, match="prompt 1: the prompt has 129 tokens; the context"):
            llm.embed([PROMPTS[0], [5] * 129])
    expected = pooled(states, kind)
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
    short = expected[:2, :8] / np.linalg.norm(expected[:2, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(few, short, atol=1e-4)


@pytest.mark.features("embeddings", "tp", "pp")
def test_ranks(model: Path, states: list[Vectors]) -> None:
    """Processes that share layers, and stages of them."""
    with LLM(model, pooling="mean", backend="torch", tp=2, pp=2, **SIZES) as llm:
        vectors = llm.embed(PROMPTS)
    np.testing.assert_allclose(vectors, pooled(states, "mean"), atol=1e-4)


def test_a_checkpoint_of_sentence_transformers(
    tmp_path: Path, model: Path, states: list[Vectors]
) -> None:
    """It says how it pools, does not normalize, and has the names of a model without its head."""
    path = shutil.copytree(model, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(path / "model.safetensors")
    del tensors["lm_head.weight"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, path / "model.safetensors")
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    listed = [{"path": p, "type": f"sentence_transformers.models.{t}"} for p, t in modules]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    with LLM(path, backend="torch", **SIZES) as llm:
        vectors = llm.embed(PROMPTS[1:3])
    expected = np.stack([states[i].mean(0) for i in (1, 2)])
    np.testing.assert_allclose(vectors, expected, atol=1e-4)
