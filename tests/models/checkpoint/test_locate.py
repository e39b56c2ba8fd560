"""Finding checkpoints, and reading config.json without running code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from weft.errors import ModelError
from weft.models.checkpoint.locate import BUNDLED, locate, read_json, read_spec


def test_a_directory_is_found(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


def test_the_home_directory_can_be_written_as_a_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate("~") == tmp_path


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_models_are_beside_the_package(name: str) -> None:
    assert read_spec(locate(name)).vocab_size > 0


def test_what_is_not_there_is_named_with_what_is(tmp_path: Path) -> None:
    missing = str(tmp_path / "nope")
    with pytest.raises(ModelError) as error:
        locate(missing)
    message = str(error.value)
    assert missing in message
    assert all(name in message for name in BUNDLED)
    assert "\n" not in message


def test_a_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelError, match="no checkpoint at"):
        locate(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"[]", "holds a JSON list, not an object"),
        (b"null", "holds a JSON NoneType, not an object"),
    ],
)
def test_broken_json_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message) as error:
        read_spec(tmp_path)
    assert str(file) in str(error.value)


def test_a_directory_without_config_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot read .*config\.json: No such file"):
        read_spec(tmp_path)


def test_a_config_that_is_a_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        read_json(tmp_path)


def test_code_in_a_checkpoint_never_runs(tmp_path: Path) -> None:
    from weft.models.torch.runner import TorchRunner

    path = make_checkpoint(tmp_path / "model", "llama")
    config = json.loads((path / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_trap.TrapConfig",
        "AutoModelForCausalLM": "modeling_trap.TrapModel",
    }
    (path / "config.json").write_text(json.dumps(config))
    trap = tmp_path / "sprung"
    (path / "modeling_trap.py").write_text(f"import pathlib; pathlib.Path({str(trap)!r}).touch()")

    runner = TorchRunner.load(
        path,
        read_spec(path),
        dtype="auto",
        block_size=8,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        max_model_len=8,
    )
    runner.allocate_kv_cache(1)
    runner.warm_up()
    assert not trap.exists()
    assert not any("modeling_trap" in name for name in sys.modules)
