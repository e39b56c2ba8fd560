"""Finding checkpoints, and reading config.json without running code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError, ModelError
from weft.models.checkpoint.locate import (
    BUNDLED,
    Bucket,
    HubModel,
    locate,
    model_name,
    read_json,
    read_spec,
    remote,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a checkpoint's file names."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_a_directory_is_found(checkpoint: Path) -> None:
    assert locate(str(checkpoint)) == checkpoint


def test_the_home_directory_can_be_written_as_a_tilde(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(checkpoint))
    assert locate("~") == checkpoint


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


def test_a_directory_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert remote("owner/name") == HubModel("owner/name")
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert remote("owner/name") is None
    assert remote("hf://owner/name") == HubModel("owner/name")


@pytest.mark.parametrize(
    ("model", "revision", "source"),
    [
        ("Qwen/Qwen3-0.6B", None, HubModel("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B", "v1", HubModel("Qwen/Qwen3-0.6B", "v1")),
        ("hf://Qwen/Qwen3-0.6B@abc", None, HubModel("Qwen/Qwen3-0.6B", "abc")),
        ("hf://Qwen/Qwen3-0.6B@abc", "abc", HubModel("Qwen/Qwen3-0.6B", "abc")),
        ("s3://bucket/models/Qwen3/", None, Bucket("s3://bucket/models/Qwen3")),
        ("gs://bucket/Qwen3", None, Bucket("gs://bucket/Qwen3")),
        *((path, None, None) for path in ("weft-demo", "./a/b", "../a/b", "/a/b", "~/a", "a/b/c")),
    ],
)
def test_names_of_models(model: str, revision: str | None, source: object) -> None:
    assert remote(model, revision) == source


@pytest.mark.parametrize(
    ("model", "revision", "message"),
    [
        ("http://host/model", None, "--model is http://host/model; a URL must begin with hf://"),
        ("hf://Qwen", None, "--model is hf://Qwen; it must be hf://OWNER/NAME"),
        ("hf://a/b@v1", "v2", "--revision is v2; --model hf://a/b@v1 names another one"),
        ("s3://b/m", "v1", "--revision is v1; s3:// has no revisions"),
        ("weft-demo", "v1", "--revision is v1; weft-demo is a directory on this machine"),
    ],
)
def test_names_that_do_not_fit(model: str, revision: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        remote(model, revision)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("hf://Qwen/Qwen3-0.6B@abc", "Qwen/Qwen3-0.6B"),
        ("s3://bucket/models/Qwen3-0.6B/", "Qwen3-0.6B"),
        ("/models/my-finetune/", "my-finetune"),
        ("/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/7ae5576", "Qwen/Qwen3-0.6B"),
        ("weft-demo", "weft-demo"),
    ],
)
def test_the_name_in_the_api(model: str, name: str) -> None:
    assert model_name(model) == name


@pytest.mark.parametrize(
    ("files", "at", "message"),
    [
        (["model.safetensors"], "model.safetensors", "is a file: give the directory"),
        (["model.GGUF"], "model.GGUF", "or a GGUF file whose name ends in .gguf"),
        ([], "", "is empty: give a directory with config.json"),
        (["m-q4.gguf"], "", "has no config.json; it has m-q4.gguf, in llama.cpp's format: give"),
        (["adapter_config.json", "adapter_model.safetensors"], "", "an adapter without its model"),
        (["params.json", "tokenizer.model"], "", "has no config.json: give the directory"),
        (
            ["models--Qwen--Qwen3/snapshots/7ae5/config.json", "models--Qwen--Qwen3/refs/main"],
            "models--Qwen--Qwen3",
            "give Qwen/Qwen3, or the directory",
        ),
        (
            ["models--a--b/refs/main", "version.txt"],
            "",
            "is the hub's cache, not a checkpoint: give",
        ),
    ],
)
def test_what_is_there_but_is_no_checkpoint_is_named(
    tmp_path: Path, files: list[str], at: str, message: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ModelError) as error:
        locate(str(tmp_path / at))
    assert message in str(error.value)
    assert str(tmp_path / at) in str(error.value)


def test_a_dangling_link_of_the_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("../../blobs/abc")
    with pytest.raises(ModelError, match=r"is a link to ../../blobs/abc, which does not exist"):
        locate(str(tmp_path))


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
