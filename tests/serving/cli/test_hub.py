"""`weft serve OWNER/NAME` and the other commands, with the test's own hub."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.bucket import Storage
from support.checkpoints import make_checkpoint
from support.hub import Hub
from support.server import ENVIRONMENT, free_port, start_server

MODEL = "owner/name"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("origin") / "m", "llama", max_shard_size="200KB")


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    with Hub() as hub:
        hub.add(MODEL, checkpoint)
        yield hub


def weft(
    environment: dict[str, str], *arguments: object, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *map(str, arguments)],
        input=stdin,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_serve_cold_warm_and_offline(hub: Hub, tmp_path: Path) -> None:
    variables = ENVIRONMENT | hub.environment(tmp_path)
    body = {"model": MODEL, "prompt": "one two", "max_tokens": 4, "temperature": 0}
    texts = []
    for more in ({}, {}, {"HF_HUB_OFFLINE": "1"}):
        with start_server(Path(MODEL), tmp_path, environment=variables | more) as server:
            assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == [MODEL]
            assert server.http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
            answer = server.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["text"])
            log = server.log.read_text()
        assert f"weft serves {MODEL} at {server.url}" in log
        begin = "weft downloads" if len(texts) == 1 else "weft loads"
        assert f"{begin} {MODEL}, and will answer on {server.url}" in log
        assert ("download owner/name: " in log) == (len(texts) == 1)
    assert texts[0] == texts[1] == texts[2]
    assert hub.requests[f"GET /api/models/{MODEL}/revision/main"] == 1


def test_health_answers_during_the_download_and_a_signal_ends_it(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    hub.held = {file.name for file in checkpoint.glob("*.safetensors")}
    variables = ENVIRONMENT | hub.environment(tmp_path)
    with start_server(
        Path(MODEL), tmp_path, until="healthy", environment=variables, port=free_port()
    ) as server:
        assert hub.waiting.wait(600)
        ready = server.http.get("/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "downloading"})
        assert server.http.get("/health").json()["engine"] == "downloading"
        children = server.processes()[1:]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(600) == 0
        for child in children:
            child.wait(600)
    hub.gate.set()
    with start_server(Path(MODEL), tmp_path, environment=variables) as server:
        assert server.http.get("/ready").status_code == 200


def test_a_killed_server_leaves_no_download_behind(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    hub.held = {file.name for file in checkpoint.glob("*.safetensors")}
    variables = ENVIRONMENT | hub.environment(tmp_path)
    with start_server(Path(MODEL), tmp_path, until="started", environment=variables) as server:
        assert hub.waiting.wait(600)
        children = server.processes()[1:]
        assert children
        server.process.kill()
        for child in children:
            child.wait(600)


def test_a_model_that_is_not_there_ends_the_server_with_one_line(hub: Hub, tmp_path: Path) -> None:
    done = weft(hub.environment(tmp_path), "serve", "owner/other", "--port", 0)
    assert done.returncode == 1
    first, last = done.stderr.strip().splitlines()
    assert first.startswith("weft downloads owner/other, and will answer on ")
    assert last.startswith("weft: error: owner/other: there is no such directory, and http://")


def test_an_error_does_not_wait_for_the_other_files(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    first, second, *_ = sorted(file.name for file in checkpoint.glob("*.safetensors"))
    hub.held, hub.wrong = {second}, {first}
    done = weft(hub.environment(tmp_path), "generate", MODEL, "one two")
    assert done.returncode == 1
    assert f"weft: error: {MODEL}: {first} is damaged" in done.stderr
    assert not hub.gate.is_set()


@pytest.mark.parametrize(
    "command",
    [
        ("chat", "owner/other"),
        ("eval", "owner/other"),
        ("compile", "owner/other", "--for", "v5e:1x1"),
        ("generate", "--model", "hf://owner/other", "one"),
        ("batch", "--model", "owner/other", "IN", "-o", "OUT"),
    ],
    ids=lambda command: command[0],
)
def test_each_command_asks_the_hub(hub: Hub, tmp_path: Path, command: tuple[str, ...]) -> None:
    files = {"IN": tmp_path / "in.jsonl", "OUT": tmp_path / "out.jsonl"}
    files["IN"].write_text('{"prompt": "one"}\n')
    done = weft(hub.environment(tmp_path), *(files.get(each, each) for each in command))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    directory = "" if "hf://owner/other" in command else "there is no such directory, and "
    assert last.startswith(f"weft: error: owner/other: {directory}{hub.url} has no such model")


def test_a_chat_a_batch_and_the_settings_of_a_hub_model(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    before = weft(environment, "config", MODEL)
    assert f"Sampling defaults: {MODEL} is not on this machine yet" in before.stdout, before.stderr
    chat = weft(environment, "chat", MODEL, "--max-tokens", 2, stdin="hi\n")
    assert chat.returncode == 0, chat.stderr
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "one", "max_tokens": 2}\n')
    environment["HF_HUB_OFFLINE"] = "1"
    batch = weft(environment, "batch", source, "-o", output, "--model", f"hf://{MODEL}@v1")
    assert batch.returncode == 1
    assert "owner/name at v1: it is not in the cache, and HF_HUB_OFFLINE is set" in batch.stderr
    batch = weft(environment, "batch", source, "-o", output, "--model", MODEL)
    assert batch.returncode == 0, batch.stderr
    assert '"finish_reason":"length"' in output.read_text()
    after = weft(environment, "config", "--model", MODEL)
    assert "Sampling defaults, for requests" in after.stdout, after.stderr


def test_a_model_in_a_bucket(checkpoint: Path, tmp_path: Path) -> None:
    with Storage() as storage:
        for file in checkpoint.iterdir():
            storage.objects[f"models/tiny/{file.name}"] = file.read_bytes()
        variables = ENVIRONMENT | storage.environment() | {"XDG_CACHE_HOME": str(tmp_path)}
        url = "s3://models/tiny"
        with start_server(url, tmp_path, environment=variables) as server:
            assert [each["id"] for each in server.http.get("/v1/models").json()["data"]] == ["tiny"]
            assert (
                f"weft downloads {url}, and will answer on {server.url}" in server.log.read_text()
            )
    done = weft(variables, "generate", url, "one two", "--max-tokens", 2)
    assert done.returncode == 0, done.stderr


def test_other_commands_take_the_id(hub: Hub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path)
    before = weft(environment, "doctor", MODEL, "--port", 0)
    assert "owner/name is not on this machine" in before.stdout, before.stderr
    assert before.returncode == 0
    offline = weft(environment | {"HF_HUB_OFFLINE": "1"}, "doctor", MODEL, "--port", 0)
    assert offline.returncode == 1
    assert "unset HF_HUB_OFFLINE" in offline.stdout, offline.stderr
    asked = ("--max-tokens", 4)
    first = weft(environment, "generate", MODEL, "one two", *asked)
    assert first.returncode == 0, first.stderr
    again = weft(environment, "generate", "--model", f"hf://{MODEL}", "--revision", "v1", "one two")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith(first.stdout[:-1])
    after = weft(environment, "doctor", MODEL, "--port", 0)
    assert "owner/name: LlamaForCausalLM" in after.stdout, after.stderr
    code = f"import weft; print(weft.LLM({MODEL!r}).generate('one two')[0].text)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_a_tokenizer_comes_from_the_hub_without_weights(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    arguments = ("--tokenizer", MODEL, "--max-tokens", 4, "one two")
    done = weft(hub.environment(tmp_path), "generate", checkpoint, *arguments)
    assert done.returncode == 0, done.stderr
    assert hub.sent["tokenizer.json"] > 0
    assert not any(name.endswith(".safetensors") for name in hub.sent)


def test_a_broken_link_in_the_cache_is_downloaded_again(
    hub: Hub, checkpoint: Path, tmp_path: Path
) -> None:
    environment = hub.environment(tmp_path)
    arguments = ("generate", MODEL, "--max-tokens", 2, "one two")
    assert weft(environment, *arguments).returncode == 0
    snapshot = next((tmp_path / "hub" / "models--owner--name" / "snapshots").iterdir())
    shard = sorted(snapshot.glob("*.safetensors"))[0]
    shard.resolve().unlink()
    done = weft(environment, *arguments)
    assert done.returncode == 0, done.stderr
    assert shard.read_bytes() == (checkpoint / shard.name).read_bytes()


def test_another_node_downloads_for_itself(hub: Hub, tmp_path: Path) -> None:
    port = free_port()
    first, second = (
        ENVIRONMENT | hub.environment(tmp_path / name) | {"WEFT_NODE_TOKEN": "x" * 20}
        for name in ("first", "second")
    )
    address = f"127.0.0.1:{port}"
    joiner = subprocess.Popen([sys.executable, "-m", "weft", "join", address, "--once"], env=second)
    try:
        with start_server(
            Path(MODEL), tmp_path, environment=first, tp=2, nodes=2, node_port=port
        ) as server:
            body = {"model": MODEL, "prompt": "one two", "max_tokens": 4}
            assert server.http.post("/v1/completions", json=body).status_code == 200
        assert joiner.wait(600) == 0
    finally:
        joiner.kill()
        joiner.wait()
    snapshots = [
        {file.name for file in (tmp_path / name).rglob("snapshots/*/*")}
        for name in ("first", "second")
    ]
    assert snapshots[0] == snapshots[1] != set()
