"""benchmarks/make_checkpoint.py writes what weft and transformers expect of a release."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from make_checkpoint import (
    COMMON,
    SHAPES,
    STD,
    make_checkpoint,
    make_tokenizer,
    tensor_shapes,
    write_checkpoint,
)
from safetensors.torch import load_file

from weft import LLM, SamplingParams
from weft.errors import ConfigError
from weft.models.checkpoint.locate import read_spec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "make_checkpoint.py"
SMALL = {
    "vocab_size": 400,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def shrunk(shape: str) -> dict[str, Any]:
    """A shape's config with small sizes where it has any."""
    config = COMMON | SHAPES[shape]
    return config | {name: size for name, size in SMALL.items() if name in config}


@pytest.mark.parametrize("shape", SHAPES)
def test_loads_in_transformers_and_in_weft(shape: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = tmp_path / "model"
    write_checkpoint(shrunk(shape), path)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(info.values()), info  # missing, unexpected and mis-shaped tensors
    assert model.dtype == torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert len(tokenizer) == model.config.vocab_size == SMALL["vocab_size"]
    assert tokenizer.eos_token_id == model.config.eos_token_id
    prompt = tokenizer.encode("How is cloth made? 日本")
    assert tokenizer.decode(prompt) == "How is cloth made? 日本"
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with LLM(path, threads=1) as llm:
        assert llm.tokenizer.encode("How is cloth made? 日本") == prompt
        assert len(llm.generate("How is cloth made?", params)[0].token_ids) == 4
        chat = llm.chat([{"role": "user", "content": "How is cloth made?"}], params)
        assert len(chat[0].token_ids) == 4


@pytest.mark.parametrize(
    ("shape", "billions"), [("qwen2.5-0.5b", 0.494), ("tinyllama-1.1b", 1.1), ("moe-1b", 1.0)]
)
def test_the_full_shapes_have_the_sizes_of_their_names(
    shape: str, billions: float, tmp_path: Path
) -> None:
    config = COMMON | SHAPES[shape]
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = dict(tensor_shapes(config))
    usual = [(each.known_places[0], each.shape[0]) for each in read_spec(tmp_path).weights]
    expected = {name: place.shape for place, count in usual for name in place.tensors(count)}
    assert shapes == expected
    sizes = [numbers[0] * (numbers[1] if len(numbers) > 1 else 1) for numbers in shapes.values()]
    assert sum(sizes) / 1e9 == pytest.approx(billions, rel=0.05)


def test_weights_are_random_and_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_checkpoint(shrunk("qwen2.5-0.5b"), tmp_path / name, seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"].float()
    assert embedding.std().item() == pytest.approx(STD, rel=0.1)
    assert tensors["model.layers.1.self_attn.q_proj.bias"].float().std() > 0
    assert (tensors["model.norm.weight"] == 1).all()


@pytest.mark.parametrize("size", [259, 260, 400, 32000, 151936])
def test_the_tokenizer_has_exactly_the_size(size: int) -> None:
    tokenizer = make_tokenizer(size)
    assert tokenizer.get_vocab_size() == size
    text = "Cloth: warp and weft,\n über 日本 🧵"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("size", [258, 300_000])
def test_a_vocabulary_that_cannot_be_made(size: int) -> None:
    with pytest.raises(ConfigError, match=f"vocab_size is {size}; it must be from 259 to"):
        make_tokenizer(size)


def test_what_is_there_is_replaced_only_when_told_and_only_by_a_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"
    config = shrunk("tinyllama-1.1b")
    write_checkpoint(config, path, 1)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(ConfigError, match="exists; --force replaces it"):
        write_checkpoint(config, path, 2)
    broken = {name: value for name, value in config.items() if name != "tie_word_embeddings"}
    with pytest.raises(KeyError):
        write_checkpoint(broken, path, 2, force=True)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(path.parent.iterdir()) == [path]
    write_checkpoint(config, path, 2, force=True)
    assert (path / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert list(path.parent.iterdir()) == [path]


def test_force_spares_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        make_checkpoint("moe-1b", tmp_path, force=True)
    assert (tmp_path / "thesis.tex").exists()


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "moe-1b", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: {tmp_path} exists; --force replaces it\n")
