"""The shipped demo checkpoints: their files, and that they answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from train_demo.export import generate, load_exported
from weft.models.bundled import tasks

SHIPPED = Path(tasks.__file__).parent
NAMES = ("weft-demo", "weft-demo-moe")


def test_both_models_share_one_tokenizer() -> None:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        first, second = ((SHIPPED / name / file).read_bytes() for name in NAMES)
        assert first == second


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_released_names_in_bfloat16(name: str) -> None:
    config = json.loads((SHIPPED / name / "config.json").read_text())
    path = SHIPPED / name / "model.safetensors"
    assert path.stat().st_size < 20e6
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        assert {file.get_slice(key).get_dtype() for key in names} == {"BF16"}
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [
            config["vocab_size"], config["hidden_size"],
        ]  # fmt: skip
    assert "lm_head.weight" not in names
    mlp = "model.layers.0.mlp."
    expected = {f"{mlp}{kind}_proj.weight" for kind in ("gate", "up", "down")}
    if name.endswith("moe"):
        expected = {
            f"{mlp}experts.{expert}.{kind}_proj.weight"
            for expert in range(config["num_experts"])
            for kind in ("gate", "up", "down")
        } | {f"{mlp}gate.weight"}
    assert {key for key in names if key.startswith(mlp)} == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_model_answers_and_stops(name: str) -> None:
    model, tokenizer = load_exported(SHIPPED / name)
    question = tasks.ask("arithmetic", "What is 21 + 34?", "21 + 34 = 55")
    assert generate(model, tokenizer, question) == question.answer
