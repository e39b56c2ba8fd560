"""The first lines about a checkpoint: its faults, or its unused parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from support.checkpoints import make_checkpoint

from weft.models.checkpoint.locate import INDEX_FILE, SINGLE_FILE


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model") / "m", "llama")


@pytest.fixture
def checkpoint(origin: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return copytree(origin, tmp_path / "m")


def weft(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )


def edit(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def as_gguf(path: Path) -> None:
    (path / SINGLE_FILE).rename(path / "m-q4.gguf")


def without_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").rename(path / "tokenizer.model")


def without_shard(path: Path) -> None:
    (path / SINGLE_FILE).unlink()
    (path / INDEX_FILE).write_text('{"weight_map": {"a": "b.safetensors"}}')


def quantized(method: str) -> Callable[[Path], None]:
    return lambda path: edit(path / "config.json", quantization_config={"quant_method": method})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_gguf, "it has m-q4.gguf, in llama.cpp's format: give the path of one"),
        (quantized("hqq"), "quantization_config.quant_method is 'hqq'; supported is 'fp8' or "),
        (quantized("gptq"), "quantization_config.bits is missing"),
        (without_tokenizer, "looked for tokenizer.json; tokenizer.model alone is not enough"),
        (without_shard, "b.safetensors is missing; model.safetensors.index.json names it"),
        (lambda path: (path / "config.json").unlink(), "has no config.json: give the directory"),
        (lambda path: (path / "config.json").write_text("{"), "config.json is not JSON"),
        (
            lambda path: edit(path / "config.json", architectures=["GPT2LMHeadModel"]),
            "architectures is ['GPT2LMHeadModel']; supported is one of LlamaForCausalLM, ",
        ),
    ],
)
def test_a_checkpoint_that_does_not_load_is_one_line(
    checkpoint: Path, change: Callable[[Path], object], message: str
) -> None:
    change(checkpoint)
    done = weft("serve", checkpoint, "--port", 0)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("weft: error: ")
    assert str(checkpoint) in line
    assert message in line


def test_warnings_about_a_checkpoint_come_once(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "m", "llama", vocab_size=319)
    edit(path / "config.json", rope_thetaa=5.0, foo=None, unsloth_version="1")
    (path / "chat_template.jinja").unlink()
    done = weft("generate", path, "one two", "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    for warning in (
        f"{path}/config.json: weft does not read rope_thetaa (did you mean rope_theta?), "
        "unsloth_version\n",
        f"the tokenizer of {path} has 320 tokens, and the model has 319: a prompt with a token",
        "the model has no chat template: it continues the text, as with --raw\n",
    ):
        assert done.stderr.count(warning) == 1, done.stderr
    raw = weft("generate", path, "one two", "--max-tokens", 2, "--raw")
    assert raw.stdout == done.stdout
    assert "chat template" not in raw.stderr


def test_nothing_is_said_about_a_checkpoint_of_transformers(checkpoint: Path) -> None:
    done = weft("generate", checkpoint, "one two", "--max-tokens", 2)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert "template" not in done.stderr
