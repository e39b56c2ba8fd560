"""Ranks on the nodes of a Ray cluster: two nodes on this machine, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until_gone

from weft.errors import ConfigError
from weft.serving.config import EngineConfig
from weft.serving.executor.ray_cluster import RayExecutor
from weft.serving.loading import load_model

ON_TWO_NODES = """
import os, sys
import psutil
from ray.cluster_utils import Cluster
from support.mock_ranks import batch, failure_of, load
from weft.errors import ConfigError
from weft.serving.config import EngineConfig
from weft.serving.executor import ray_cluster
from weft.serving.executor.ray_cluster import RayExecutor
from weft.serving.launch import share_out
from weft.serving.resources import Offer

def on_two(**settings):
    (config,) = share_out(EngineConfig(nodes=2, **settings), [Offer()] * 2)
    return config

ray_cluster.PLACE = 3.0
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
try:
    try:
        RayExecutor(on_two(tp=4), load)
    except ConfigError as error:
        print(error, flush=True)
    executor = RayExecutor(on_two(model="none", tp=2, tokenizer=sys.argv[1]), load)
    print(*(pid for machine in executor._machines for pid in machine.pids), flush=True)
    print(*(executor.submit((batch(step),)).result(10)[0].step for step in range(5)), flush=True)
    for process in other.live_processes():
        if process[0] == "raylet":
            raylet = psutil.Process(process[1].pid)
            for each in [raylet, *raylet.children(recursive=True)]:  # as when a machine ends
                each.kill()
    print(failure_of(executor), flush=True)
    executor.close()
finally:
    cluster.shutdown()
"""


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs pip install 'weft[ray]'")
def test_ranks_are_on_the_nodes_of_a_cluster_and_a_lost_node_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", ON_TWO_NODES, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    refused, pids, steps, failure = done.stdout.splitlines()
    assert refused.startswith("Ray has no room for 2 + 2 ranks, a CPU each, on a node for each ")
    assert steps == "0 1 2 3 4"
    assert failure.startswith("Ray node ")
    assert " is lost, with rank 1, after step 5: " in failure
    wait_until_gone([int(pid) for pid in pids.split()])
    for rank in range(2):
        assert len((tmp_path / f"rank{rank}").read_text().splitlines()) >= 5


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"--executor ray needs Ray: pip install 'weft\[ray\]'"):
        RayExecutor(EngineConfig(tp=2, nodes=2), load_model)
