"""Ranks on a Ray cluster with two nodes on this machine, served over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import answer_of_one_rank, complete, fail_in_a_request
from support.processes import shared_memory_left_alone, wait_until_gone
from support.ray_nodes import RayCluster, ray_cluster
from support.server import TIMEOUT, free_port, start_server
from support.tokenizers import write_byte_level

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.executor.loading import load_model
from weft.serving.executor.nodes.ray_executor import RayExecutor

SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 4}
LAYOUT = {"pp": 2, "nodes": 2, "executor": "ray"}
NO_ROOM = "waiting for Ray to have room for 1 + 1 ranks (each number on a separate node, one CPU"
LOST = re.compile(
    r"the model runner failed: Ray node \w{8} at [\d.]+ is lost, with rank \d, "
    r"(in|after) step \d+: its connection has ended"
)


def of_weft(cluster: RayCluster) -> list[int]:
    """Return the pids of actors and ranks on all nodes."""
    return [process.pid for node in cluster.nodes for process in node.of_weft()]


REFUSED = """
from support.mock_ranks import load
from weft.errors import EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes import join_listener
from weft.serving.executor.nodes.ray_executor import RayExecutor
from weft.serving.engine.core_process import share_out
from weft.serving.executor.placement import Inventory

join_listener.versions = lambda: {"weft": "of tomorrow"}
try:
    (config,) = share_out(EngineConfig(), [Inventory()])
    RayExecutor(config, load)
except EngineError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with shared_memory_left_alone(), ray_cluster() as cluster:
        yield cluster


def test_a_node_that_does_not_take_part_is_named_and_says_why(cluster: RayCluster) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", REFUSED],
        env=cluster.environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
    )
    # Ray prints there too what TPU compilers on this node log.
    assert re.search(
        r"^Ray node \w{8} at [\d.]+ has not joined: this node cannot join: "
        r"weft is of tomorrow there and .* here$",
        done.stdout,
        re.MULTILINE,
    ), done.stdout


@pytest.mark.timeout(1800)  # four starts of Ray, and three of a server
def test_two_nodes_answer_as_one_rank_and_one_that_is_lost_is_named_and_replaced(
    cluster: RayCluster, model: Path, tmp_path: Path
) -> None:
    expected = answer_of_one_rank(model, **SIZES)
    settings = SIZES | LAYOUT | {"port": free_port(), "restart": True}
    started = start_server(
        model, tmp_path, until="healthy", environment=cluster.environment, **settings
    )
    with started as server:
        server.wait_until_said(NO_ROOM)
        node = cluster.add()
        server.wait_until_said("weft serves ")
        assert complete(server) == expected
        there = of_weft(cluster)
        assert len(there) == 2 + 2

        message = fail_in_a_request(server, node.raylet.kill)
        assert LOST.fullmatch(message)
        wait_until_gone(there)
        node.kill()
        server.wait_until_said(NO_ROOM, times=2)
        assert server.http.get("/ready").json() == {"status": "restarting"}

        cluster.add()
        server.wait_until_said("the engine serves again")
        assert complete(server) == expected
        there = of_weft(cluster)
    wait_until_gone(there)


@pytest.mark.slow
def test_engines_that_ray_places_on_one_node_share_it(tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    settings = {"tokenizer": str(tmp_path), "dp": 2, "tp": 2, "executor": "ray"}
    with ray_cluster(cpus=4) as cluster:
        started = start_server(
            tmp_path,
            tmp_path,
            loader="support.mock_ranks:load",
            environment=cluster.environment,
            **settings,
        )
        with started as server:
            assert server.metric("engine_cores") == 2
            assert len(of_weft(cluster)) == 2 + 4
    notes = [tmp_path / f"replica{engine}-{rank}" for engine in range(2) for rank in range(2)]
    replicas = [msgspec.json.decode(note.read_bytes(), type=Replica) for note in notes]
    assert [(r.number, r.engines) for r in replicas] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert all(r.memory and 2 * r.memory <= psutil.virtual_memory().total for r in replicas)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2, "pp": 2, "nodes": 2}])
def test_layouts_on_two_nodes_answer_as_one_rank(
    layout: dict[str, int], model: Path, tmp_path: Path
) -> None:
    """Engines on separate nodes; stages on separate nodes, with several ranks each."""
    expected = answer_of_one_rank(model, **SIZES)
    with ray_cluster(cpus=layout.get("tp", 1)) as cluster:
        cluster.add()
        started = start_server(
            model, tmp_path, environment=cluster.environment, executor="ray", **SIZES, **layout
        )
        with started as server:
            assert [complete(server) for _ in range(4)] == [expected] * 4
            on_each = [len(node.of_weft()) for node in cluster.nodes]
            assert on_each == [1 + layout.get("tp", 1)] * 2


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--executor ray needs Ray: pip install 'ray>=2.50'"):
        RayExecutor(EngineConfig(tp=2, nodes=2), load_model)
