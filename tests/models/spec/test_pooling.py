"""Pooling as checkpoints configure it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.errors import ModelError
from weft.models.spec.pooling import Pooling, read_pooling

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 320,
}
OLD = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False}


def write(path: Path, kinds: list[str], config: dict[str, Any] | None = None) -> Path:
    folders = [f"{i}_{kind}" if i else "" for i, kind in enumerate(kinds)]
    modules = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (folder, kind) in enumerate(zip(folders, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


def test_without_modules_it_is_the_last_token_with_unit_length(tmp_path: Path) -> None:
    assert read_pooling(tmp_path) == Pooling("last", normalize=True)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (OLD | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}, "mean"),
        (OLD | {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, "last"),
        ({"embedding_dimension": 64, "pooling_mode": "mean"}, "mean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_modules_say_it(tmp_path: Path, config: dict[str, Any], kind: Any) -> None:
    write(tmp_path, ["Transformer", "Pooling", "Normalize"], config)
    assert read_pooling(tmp_path) == Pooling(kind, normalize=True)
    write(tmp_path, ["Transformer", "Pooling"])
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_pooling(tmp_path) == Pooling(kind, normalize=False)


def test_a_scaled_final_norm_needs_unit_length(tmp_path: Path) -> None:
    granite = LLAMA | {"architectures": ["GraniteForCausalLM"], "tie_word_embeddings": True}
    path = write(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "mean"})
    (path / "config.json").write_text(json.dumps(granite))
    assert read_pooling(path) == Pooling("mean", normalize=False)
    (path / "config.json").write_text(json.dumps(granite | {"logits_scaling": 8.0}))
    with pytest.raises(ModelError, match="has no module Normalize; it must have one"):
        read_pooling(path)
    write(path, ["Transformer", "Pooling", "Normalize"])
    assert read_pooling(path) == Pooling("mean", normalize=True)


@pytest.mark.parametrize(
    ("config", "mode"),
    [
        ({"pooling_mode_cls_token": True}, "'cls'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "'mean+max'"),
        ({"pooling_mode": "weightedmean"}, "'weightedmean'"),
        ({}, "''"),
    ],
)
def test_other_modes_are_refused(tmp_path: Path, config: dict[str, Any], mode: str) -> None:
    write(tmp_path, ["Transformer", "Pooling"], config)
    with pytest.raises(ModelError, match=f"the pooling mode is {mode.replace('+', '.')}; suppor"):
        read_pooling(tmp_path)


def test_other_modules_are_refused(tmp_path: Path) -> None:
    write(tmp_path, ["Transformer", "Pooling", "Dense"], {"pooling_mode": "mean"})
    with pytest.raises(ModelError, match="has a module 'Dense'; supported is Transformer"):
        read_pooling(tmp_path)
    write(tmp_path, ["Transformer", "Normalize"])
    with pytest.raises(ModelError, match="has no module Pooling"):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["[", "3", "[3]", '[{"type": "Pooling"}]'])
def test_what_is_no_list_of_modules(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json is not a list of modules"):
        read_pooling(tmp_path)


def test_finish_truncates_and_then_normalizes() -> None:
    pooled = np.array([3.0, 4.0, 12.0], np.float32).tobytes()
    assert Pooling("last", normalize=False).finish(pooled).tolist() == [3.0, 4.0, 12.0]
    assert Pooling("last").finish(pooled, 2).tolist() == pytest.approx([0.6, 0.8])
    assert np.linalg.norm(Pooling("mean").finish(pooled)) == pytest.approx(1.0)
    assert Pooling().finish(np.zeros(2, np.float32).tobytes()).tolist() == [0.0, 0.0]
