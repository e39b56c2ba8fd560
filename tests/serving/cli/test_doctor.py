"""`weft doctor` finds what is wrong, and says what to do."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.server import start_server
from support.tokenizers import write_byte_level

from weft.errors import ConfigError
from weft.serving.cli.doctor import Finding, devices, examine, examine_others, run
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.executor.placement import Inventory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def found(engine: EngineConfig, server: ServerConfig) -> dict[str, Finding]:
    """Findings by name; of the models, the last."""
    return {finding.name: finding for finding in examine(engine, server)}


def test_a_good_model_and_a_free_port_are_ok(checkpoint: Path) -> None:
    findings = found(EngineConfig(model=str(checkpoint)), ServerConfig(port=0))
    for name in ("Python", "libraries", "sockets", "model", "port"):
        assert findings[name].status == "ok", findings[name]
    assert "Qwen3ForCausalLM" in findings["model"].seen


def test_a_torn_checkpoint_fails_and_names_the_file(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    finding = found(EngineConfig(model=str(tmp_path)), ServerConfig(port=0))["model"]
    assert finding.status == "fail"
    assert "model.safetensors" in finding.seen
    assert finding.advice


@pytest.mark.parametrize("setting", ["chat_template", "generation_config"])
def test_a_file_that_the_server_could_not_read_fails(checkpoint: Path, setting: str) -> None:
    engine = EngineConfig(model=str(checkpoint), **{setting: "/absent/file"})
    models = [each for each in examine(engine, ServerConfig(port=0)) if each.name == "model"]
    assert [each.status for each in models] == ["ok", "ok", "fail"], models
    assert f"--{setting.replace('_', '-')} is /absent/file" in models[-1].seen


def test_a_port_in_use_fails(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        config = EngineConfig(model=str(checkpoint))
        assert run(config, ServerConfig(port=port), as_json=True) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["port"]["status"] == "fail"
    assert str(port) in findings["port"]["seen"]
    assert "--port" in findings["port"]["advice"]


def test_a_port_where_weft_answers_is_fine(checkpoint: Path, tmp_path: Path) -> None:
    model = write_byte_level(tmp_path / "mock")
    config = EngineConfig(model=str(checkpoint))
    settings: dict[str, Any]
    for settings in ({}, {"api_key": "sk-0123456789abcdef"}):
        with start_server(model, tmp_path, loader="support.mock_runner:load", **settings) as server:
            port = int(server.url.rpartition(":")[2])
            finding = found(config, ServerConfig(port=port))["port"]
        assert finding.status == "ok"
        assert finding.seen.endswith("a weft server already answers there; its engine is ready")


def test_more_ranks_than_cores_are_slow(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    for dp, status in ((2, "ok"), (3, "warn")):
        config = EngineConfig(model=str(checkpoint), dp=dp, tp=2)
        finding = found(config, ServerConfig(port=0))["cores"]
        assert finding.status == status
        assert f"for {2 * dp} ranks ({dp} engines of 2)" in finding.seen


def test_a_model_that_is_not_here_yet_gets_one_gpu() -> None:
    engine = EngineConfig(model="owner/name")
    found = devices(engine, [Inventory(gpus=(2**34,) * 8)])
    assert [finding.seen for finding in found] == [
        "island of this node: 8 GPUs, 16.0 GiB free each",
        "rank 0 on this node",
    ]


def test_devices_and_who_gets_them_are_shown(checkpoint: Path) -> None:
    engine = EngineConfig(model=str(checkpoint), dp=2, tp=2, node_ranks=4)
    findings = examine(engine, ServerConfig(port=0))
    (island,) = (finding.seen for finding in findings if finding.name == "devices")
    assert island.startswith("island of this node: 4 CPU ranks, ")
    assert [finding.seen for finding in findings if finding.name == "slice"] == [
        "engine 0: ranks 0 to 1 on this node",
        "engine 1: ranks 0 to 1 on this node",
    ]
    jax = devices(replace(engine, backend="jax"), [Inventory(tpus=(2**30,) * 2)] * 2)
    assert [finding.seen for finding in jax] == [
        "island of this node: 2 TPUs",
        "island of this node: 2 TPUs",
        "engine 0: rank 0 with 2 devices on this node",
        "engine 1: rank 0 with 2 devices on this node",
    ]
    (slice_,) = (
        finding
        for finding in examine(replace(engine, node_ranks=3), ServerConfig(port=0))
        if finding.name == "slice"
    )
    assert slice_.status == "fail"
    assert "Available: this node: 3 CPU ranks" in slice_.seen


def test_every_problem_comes_with_advice(checkpoint: Path) -> None:
    for finding in examine(EngineConfig(model=str(checkpoint)), ServerConfig(port=0)):
        assert finding.status == "ok" or finding.advice


def test_the_table_has_a_line_for_each_check(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(EngineConfig(model=str(checkpoint)), ServerConfig(port=0))
    table = capsys.readouterr().out
    for name in ("processor", "cores", "memory", "/dev/shm", "GPU", "model", "port"):
        assert f" {name} " in table
    assert "\x1b" not in table, "no colors when it is no terminal"


def test_nodes_of_ray_are_not_waited_for() -> None:
    with pytest.raises(ConfigError, match="leave out --executor, and run weft join"):
        examine_others(EngineConfig(tp=2, nodes=2, executor="ray"))
