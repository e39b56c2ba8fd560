"""Downloads from the test's own hub and from object storage, into a temporary cache."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.bucket import Storage
from support.checkpoints import make_checkpoint
from support.disks import small_disk
from support.hub import Hub

CODE = """
import json, sys
from weft.errors import WeftError
from weft.models.checkpoint.download import download
from weft.models.checkpoint.locate import locate, remote

model, revision, weights = json.load(sys.stdin)
seen = []
try:
    source = remote(model, revision)
    commit = download(source, lambda done, total: seen.append((done, total)), weights=weights)
    print(json.dumps([str(locate(model, revision)), commit, seen]))
except WeftError as error:
    print(json.dumps(["error", str(error), seen]))
"""

MODEL = "owner/name"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("origin") / "m", "llama", max_shard_size="200KB")


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add(MODEL, checkpoint)
        yield hub


def start(
    environment: dict[str, str],
    model: str = MODEL,
    revision: str | None = None,
    weights: bool = True,
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    process.stdin.write(json.dumps([model, revision, weights]))
    process.stdin.close()
    process.stdin = None
    return process


def result(process: subprocess.Popen[str]) -> tuple[str, str | None, list[tuple[int, int]]]:
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    place, told, seen = json.loads(out)
    assert told is None or "\n" not in told
    return place, told, seen


def fetch(
    environment: dict[str, str],
    model: str = MODEL,
    revision: str | None = None,
    weights: bool = True,
) -> tuple[str, str | None, list[tuple[int, int]]]:
    return result(start(environment, model, revision, weights))


def error(environment: dict[str, str], model: str = MODEL, revision: str | None = None) -> str:
    place, message, _ = fetch(environment, model, revision)
    assert place == "error", place
    assert message is not None
    return message


def shards(path: Path) -> list[str]:
    return sorted(file.name for file in path.glob("*.safetensors"))


def test_only_the_needed_files_come_and_only_once(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    repository = hub.models[MODEL]
    for name in ("README.md", "consolidated.safetensors", "original/params.json", "m.gguf"):
        repository.files[name] = b"not needed"
    environment = hub.environment(tmp_path)
    place, commit, seen = fetch(environment)
    assert commit == repository.commit
    path = Path(place)
    assert path.parent == tmp_path / "hub" / "models--owner--name" / "snapshots"
    assert {file.name for file in path.iterdir()} == {file.name for file in checkpoint.iterdir()}
    for file in checkpoint.iterdir():
        assert (path / file.name).read_bytes() == file.read_bytes()
    totals = {total for _, total in seen}
    assert totals == {sum(file.stat().st_size for file in checkpoint.iterdir())}
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)

    asked = hub.requests.total()
    assert fetch(environment) == (place, commit, [])
    assert fetch(environment | {"HF_HUB_OFFLINE": "1"}) == (place, commit, [])
    assert fetch(environment, MODEL, commit)[0] == place
    assert fetch(environment, f"hf://{MODEL}")[0] == place
    assert hub.requests.total() == asked  # the network is not asked again


def test_hf_home_alone_places_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = hub.environment(tmp_path)
    for name in ("HF_HUB_CACHE", "HF_TOKEN_PATH"):
        del environment[name]
        monkeypatch.delenv(name, raising=False)
    hub.models[MODEL].token = "hf_right"
    (tmp_path / "token").write_text("hf_right")  # as `hf auth login` leaves it
    place, _, _ = fetch(environment)
    assert Path(place).is_relative_to(tmp_path / "hub" / "models--owner--name")


def has_xet() -> bool:
    """Tell whether this release can make a store in a folder."""
    return find_spec("hf_xet") is not None and hasattr(import_module("hf_xet"), "XetSession")


needs_xet = pytest.mark.skipif(not has_xet(), reason="hf_xet cannot make a store")


@needs_xet
def test_files_in_xet_storage_come_from_there(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    repository = hub.models[MODEL]
    enlarge(hub, checkpoint)
    repository.move_to_xet(tmp_path / "store")
    place, _, seen = fetch(hub.environment(tmp_path / "home"))
    for file in shards(checkpoint):
        assert (Path(place) / file).read_bytes() == repository.files[file]
        assert file not in hub.sent
    assert hub.requests[f"GET /api/models/{MODEL}/xet-read-token/{repository.commit}"] > 0
    done = [each for each, _ in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1][1] > LARGE
    without = hub.environment(tmp_path / "other", HF_HUB_DISABLE_XET="1")
    assert shards(Path(fetch(without)[0])) == shards(checkpoint)
    assert hub.sent[shards(checkpoint)[0]] == LARGE


@needs_xet
def test_xet_storage_that_fails_is_one_line(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.models[MODEL].move_to_xet(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    message = error(hub.environment(tmp_path / "home"))
    assert "safetensors does not come from Xet storage (" in message
    assert message.endswith("or set HF_HUB_DISABLE_XET=1 to fetch it over plain HTTP")
    place, _, _ = fetch(hub.environment(tmp_path / "home", HF_HUB_DISABLE_XET="1"))
    assert shards(Path(place)) == shards(checkpoint)


def test_weights_come_after_the_small_files(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    hub.wrong = {"tokenizer.json"}
    commit = hub.models[MODEL].commit
    assert "tokenizer.json is damaged" in error(environment, MODEL, commit)
    assert not any(name.endswith(".safetensors") for name in hub.sent)
    hub.wrong = set()
    place, _, _ = fetch(environment, MODEL, commit)
    assert (Path(place) / "tokenizer.json").is_file()


def test_config_without_weights(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    place, _, _ = fetch(environment, weights=False)
    assert (Path(place) / "config.json").is_file()
    assert shards(Path(place)) == []
    assert shards(Path(fetch(environment)[0])) != []


def test_a_tag_and_a_commit_are_revisions(hub: Hub, tmp_path: Path) -> None:
    commit = hub.models[MODEL].commit
    environment = hub.environment(tmp_path)
    assert fetch(environment, MODEL, "v1")[1] == commit
    assert fetch(environment, f"hf://{MODEL}@v1")[1] == commit
    assert fetch(hub.environment(tmp_path / "other"), MODEL, commit)[1] == commit
    assert "but not the revision 'v2'" in error(environment, MODEL, "v2")


LARGE = 32 * 2**20
"""Bytes; huggingface_hub keeps a partial file in steps of 10 MB."""


def enlarge(hub: Hub, checkpoint: Path) -> str:
    """Make one shard large; returns its name."""
    file = shards(checkpoint)[0]
    hub.models[MODEL].files[file] = bytes(LARGE)
    return file


def test_a_cut_connection_continues_where_it_ended(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    file = enlarge(hub, checkpoint)
    hub.cuts[file] = 1
    place, _, seen = fetch(hub.environment(tmp_path))
    assert (Path(place) / file).read_bytes() == bytes(LARGE)
    assert LARGE < hub.sent[file] < LARGE * 5 // 4
    assert seen[-1][0] == seen[-1][1]


def test_a_killed_download_keeps_the_files_that_are_whole(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    *whole, last = shards(checkpoint)
    hub.held = {last}
    environment = hub.environment(tmp_path)
    process = start(environment)
    blobs = tmp_path / "hub" / "models--owner--name" / "blobs"
    digests = [hashlib.sha256((checkpoint / file).read_bytes()).hexdigest() for file in whole]
    while not (hub.waiting.is_set() and all((blobs / digest).exists() for digest in digests)):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.communicate()
    assert "HF_HUB_OFFLINE" in error(environment | {"HF_HUB_OFFLINE": "1"})
    hub.gate.set()
    hub.sent.clear()
    place, _, seen = fetch(environment)
    for file in shards(checkpoint):
        assert (Path(place) / file).read_bytes() == (checkpoint / file).read_bytes()
    assert {file for file in hub.sent if file.endswith(".safetensors")} == {last}
    assert seen[-1][0] == seen[-1][1]


def test_two_processes_download_once(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.held = set(shards(checkpoint))
    environment = hub.environment(tmp_path)
    processes = [start(environment) for _ in range(2)]
    assert hub.waiting.wait(600)
    asked = "GET /api/models/owner/name/revision/main"
    while hub.requests[asked] < 2:
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)
    hub.gate.set()
    first, second = (result(process) for process in processes)
    assert first[:2] == second[:2]
    for file in shards(checkpoint):
        assert hub.sent[file] == (checkpoint / file).stat().st_size


def test_a_wrong_hash_is_found_and_the_next_run_mends_it(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    for file, kind in (("tokenizer.json", "git hash"), (shards(checkpoint)[1], "SHA-256")):
        environment = hub.environment(tmp_path / kind)
        hub.wrong = {file}
        message = error(environment)
        assert f"{file} is damaged: its {kind} is " in message
        assert message.endswith("; it has been deleted, so run the command again")
    assert hashlib.sha256((checkpoint / file).read_bytes()).hexdigest()[:12] in message
    hub.wrong.clear()
    place, _, _ = fetch(environment)
    assert (Path(place) / file).read_bytes() == (checkpoint / file).read_bytes()


def test_what_the_hub_refuses(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    assert "has no such model; if it is private, HF_TOKEN" in error(environment, "owner/other")
    repository = hub.models[MODEL]
    repository.token = "hf_right"
    assert "HF_TOKEN must hold a token" in error(environment)
    assert "HF_TOKEN must hold a token" in error(environment | {"HF_TOKEN": "hf_wrong"})
    assert fetch(environment | {"HF_TOKEN": "hf_right"})[1] == repository.commit
    repository.token = None
    for status in (401, 403):
        repository.gated = status
        message = error(hub.environment(tmp_path / str(status), HF_TOKEN="hf_other"))
        assert f"accept the terms at {hub.url}/owner/name, and set HF_TOKEN" in message
    repository.gated, repository.forbidden = 0, True
    message = error(hub.environment(tmp_path / "other"))
    assert f"{hub.url} refuses the token in HF_TOKEN (status 403)" in message


def test_a_file_of_another_size_is_fetched_again_by_the_next_run(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    for file in ("tokenizer.json", shards(checkpoint)[0]):
        environment = hub.environment(tmp_path / file)
        hub.short = {file}
        size = (checkpoint / file).stat().st_size
        message = error(environment)
        assert message.startswith("owner/name: ")
        assert f"file should be of size {size} but has size {size - 1} " in message
        assert message.endswith("; run the command again")
        assert "HF_HUB_OFFLINE" in error(environment | {"HF_HUB_OFFLINE": "1"})
    hub.short = set()
    place, _, _ = fetch(environment)
    for file in checkpoint.iterdir():
        assert (Path(place) / file.name).read_bytes() == file.read_bytes()


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(2 * 2**20) as path:
        yield path


def test_a_download_that_does_not_fit_is_refused_at_once(
    hub: Hub, checkpoint: Path, disk: Path
) -> None:
    enlarge(hub, checkpoint)
    message = error(hub.environment(disk))
    cache = disk / "hub" / "models--owner--name"
    assert re.match(rf"owner/name needs 32\.\d MiB in {cache}, where \S+ \wiB are free: ", message)
    assert "set HF_HOME" in message
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def test_a_disk_that_fills_up_leaves_nothing_half_written(
    hub: Hub, checkpoint: Path, disk: Path
) -> None:
    hub.held = {shards(checkpoint)[0]}
    environment = hub.environment(disk)
    process = start(environment)
    assert hub.waiting.wait(600)
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as out:
        while out.write(bytes(4096)):
            pass
    hub.gate.set()
    place, message, _ = result(process)
    assert place == "error"
    assert message is not None
    assert f"cannot write to {disk}/hub/models--owner--name: No space left on device" in message
    ballast.unlink()
    assert "HF_HUB_OFFLINE" in error(environment | {"HF_HUB_OFFLINE": "1"})
    place, _, _ = fetch(environment)
    for file in shards(checkpoint):
        assert (Path(place) / file).read_bytes() == (checkpoint / file).read_bytes()


def test_without_a_network_it_says_how_to_fetch_it_elsewhere(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    cache = str(tmp_path / "hub" / "models--owner--name")
    for more, reason in (
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "there is no such directory, and http://127.0.0.1:9 cannot be reached",
        ),
    ):
        message = error(environment | more)
        assert reason in message
        assert "`hf download owner/name` fetches it" in message
        assert cache in message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config.json": None}, "owner/name has no config.json"),
        ({"config.json": b'{"architectures": ["MambaForCausalLM"]}'}, "MambaForCausalLM"),
        ({"model.safetensors.index.json": None}, "which only an index joins"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "gone.safetensors"}}'},
            "owner/name lacks gone.safetensors",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../up.safetensors"}}'},
            "names '../up.safetensors', which is not a file beside it",
        ),
        (
            {"model.safetensors.index.json": b'{"weight_map": ["a.safetensors"]}'},
            "owner/name: model.safetensors.index.json has no weight_map",
        ),
    ],
)
def test_a_model_that_does_not_load_is_refused_before_its_weights(
    hub: Hub, tmp_path: Path, change: dict[str, bytes | None], message: str
) -> None:
    files = hub.models[MODEL].files
    for name, content in change.items():
        del files[name]
        if content is not None:
            files[name] = content
    assert message in error(hub.environment(tmp_path))
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def test_pickled_weights_are_named(hub: Hub, tmp_path: Path) -> None:
    files = hub.models[MODEL].files
    for name in [name for name in files if "safetensors" in name]:
        del files[name]
    files["pytorch_model.bin"] = b"pickle"
    message = error(hub.environment(tmp_path))
    assert "it has pytorch_model.bin, pickled" in message
    assert "save_pretrained" in message


@pytest.fixture
def storage(checkpoint: Path) -> Iterator[Storage]:
    """Object storage with the checkpoint in models/tiny/."""
    with Storage() as storage:
        for file in checkpoint.iterdir():
            storage.objects[f"models/tiny/{file.name}"] = file.read_bytes()
        yield storage


def test_object_storage(storage: Storage, checkpoint: Path, tmp_path: Path) -> None:
    storage.objects["models/tiny/README.md"] = b"not needed"
    storage.objects["models/tiny/original/more.safetensors"] = b"not needed"
    environment = storage.environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    place, commit, seen = fetch(environment, "s3://models/tiny/")
    assert commit is None
    assert Path(place).parent == tmp_path / "weft" / "models"
    for file in checkpoint.iterdir():
        assert (Path(place) / file.name).read_bytes() == file.read_bytes()
    assert not (Path(place) / "README.md").exists()
    assert seen[-1][0] == seen[-1][1] > 0
    unreachable = environment | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    assert fetch(unreachable, "s3://models/tiny") == (place, None, [])
    message = error(unreachable, "s3://models/other")
    assert message.startswith("s3://models/other cannot be copied to ")
    assert "s3://models/nothing has no config.json" in error(environment, "s3://models/nothing")


@pytest.mark.skipif(find_spec("gcsfs") is None, reason="needs gcsfs: pip install 'weft[gs]'")
def test_google_s_object_storage(
    storage: Storage, checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment = storage.environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    folder = Path(copy_of(environment, "gs://models/tiny"))
    folder.mkdir(parents=True)
    first, *_ = shards(checkpoint)
    (folder / f"{first}.incomplete").write_bytes((checkpoint / first).read_bytes()[:1000])
    place, commit, seen = fetch(environment, "gs://models/tiny/")
    assert (Path(place), commit) == (folder, None)
    for file in checkpoint.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert seen[-1][0] == seen[-1][1] > 0
    assert "gs://models/nothing has no config.json" in error(environment, "gs://models/nothing")
    assert "there is no such bucket or file (" in error(environment, "gs://nowhere/tiny")
    assert capfd.readouterr().err == ""


def test_a_partial_copy_of_object_storage_continues(
    storage: Storage, checkpoint: Path, tmp_path: Path
) -> None:
    environment = storage.environment() | {"XDG_CACHE_HOME": str(tmp_path)}
    folder = Path(copy_of(environment, "s3://models/tiny"))
    folder.mkdir(parents=True)
    first, second, *_ = shards(checkpoint)
    content = (checkpoint / first).read_bytes()
    (folder / f"{first}.incomplete").write_bytes(content[:1000])
    (folder / f"{second}.incomplete").write_bytes(bytes(10**6))  # longer than the file
    place, _, seen = fetch(environment, "s3://models/tiny")
    assert Path(place) == folder
    for file in (first, second):
        assert (folder / file).read_bytes() == (checkpoint / file).read_bytes()
    assert not list(folder.glob("*.incomplete"))
    assert seen[-1][0] == seen[-1][1]


def copy_of(environment: dict[str, str], url: str) -> str:
    """Return the directory for the copy from a bucket."""
    code = f"from weft.models.checkpoint.locate import remote; print(remote({url!r}).copy)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_a_missing_driver_is_named(tmp_path: Path) -> None:
    message = error({"XDG_CACHE_HOME": str(tmp_path)}, "gs://models/tiny")
    assert message == "gs://models/tiny needs gcsfs: pip install 'weft[gs]'"
