"""`--backend jax` on several nodes: a process on each, and one mesh over all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import complete, fail_in_a_request
from support.nodes import LOAD, TOKEN, agent
from support.processes import shared_memory_left_alone
from support.ray_nodes import ray_cluster
from support.server import free_port, start_server

SIZES: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 8,
    "max_model_len": 512,
    "kv_cache_memory": 2**20,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the answer from one process."""
    with start_server(model, tmp_path_factory.mktemp("one"), **SIZES) as server:
        return complete(server)


@pytest.mark.features("tpu", "nodes", "tp", "restart")
def test_two_nodes_answer_as_one_and_are_there_again_after_one_of_their_processes_is_killed(
    model: Path, cache: Path, expected: str, tmp_path: Path
) -> None:
    port = free_port()
    jax = {"backend": "jax", "tp": 2, "nodes": 2, "devices": "2x1", "compile_cache": cache}
    nodes = {"node_port": port, "node_token": TOKEN, "restart": True}
    with (
        agent(port, tmp_path / "agent", load_model=LOAD) as joined,
        start_server(model, tmp_path, **jax, **nodes, **SIZES) as server,
    ):
        (engine,) = psutil.Process(server.process.pid).children()
        assert len(engine.children()) == 1
        (there,) = psutil.Process(joined.pid).children()
        assert complete(server) == expected
        message = fail_in_a_request(server, there.kill)
        named = f"rank 1 (process {there.pid} on node1 at 127.0.0.1) was killed by SIGKILL"
        assert named in message
        server.wait_until("engine_restarts_total", 1)
        server.wait_until("engine_cores", 1)
        assert complete(server) == expected
        assert "after warm-up" not in server.log.read_text()


@pytest.mark.slow
def test_several_engines_have_devices_of_their_own(
    model: Path, cache: Path, expected: str, tmp_path: Path
) -> None:
    jax = {"backend": "jax", "dp": 2, "compile_cache": cache}
    with start_server(model, tmp_path, **jax, **SIZES) as server:
        assert len(psutil.Process(server.process.pid).children()) == 2
        assert [complete(server), complete(server)] == [expected, expected]
        log = server.log.read_text()
    assert (
        log.count("memory of each of 2 engine cores (cpu): KV cache ") == log.count("compiled") == 1
    )


@pytest.mark.slow
def test_nodes_of_ray_answer_as_one(
    model: Path, cache: Path, expected: str, tmp_path: Path
) -> None:
    jax = {"backend": "jax", "tp": 2, "nodes": 2, "executor": "ray", "compile_cache": cache}
    with shared_memory_left_alone(), ray_cluster() as cluster:
        cluster.add()
        started = start_server(
            model, tmp_path, environment=cluster.environment, port=free_port(), **jax, **SIZES
        )
        with started as server:
            assert complete(server) == expected
            assert len([p for node in cluster.nodes for p in node.of_weft()]) == 2 + 2
