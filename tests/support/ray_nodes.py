"""A Ray cluster on this machine: nodes that `ray start` starts, as processes of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from support.server import ENVIRONMENT, TIMEOUT, free_port

STORE = (
    80_000_000  # bytes for objects, of which there are none: hardly more than Ray takes at least
)


class RayNode:
    """A node, from the moment that it has joined its cluster."""

    def __init__(self, cluster: RayCluster, *arguments: str) -> None:
        self._cluster = cluster
        log = cluster.directory / f"node-{time.monotonic_ns()}.log"
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *arguments),
            *("--node-ip-address=127.0.0.1", f"--num-cpus={cluster.cpus}"),
            f"--object-store-memory={STORE}",
            # Ports that the system chooses: Ray's own, 10002 to 19999, may hold the cluster's.
            *("--min-worker-port=0", "--max-worker-port=0"),
        ]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, env=cluster.environment, stdout=out, stderr=out, cwd=cluster.directory
            )
        cluster.nodes.append(self)
        deadline = time.monotonic() + TIMEOUT
        while "Ray runtime started" not in log.read_text():
            assert self.process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        children = psutil.Process(self.process.pid).children()
        self.raylet = next(child for child in children if child.name() == "raylet")

    def of_weft(self) -> list[psutil.Process]:
        """Weft's actor on it, and the ranks of that."""
        actors = [p for p in self.raylet.children() if "_AgentActor" in " ".join(p.cmdline())]
        return [each for actor in actors for each in (actor, *actor.children(recursive=True))]

    def kill(self) -> None:
        """End all of it at once, as when a machine ends; or what is left of it."""
        self._cluster.nodes.remove(self)
        if self.process.poll() is not None:
            return  # as it does when its raylet has ended
        process = psutil.Process(self.process.pid)
        everyone = [process, *process.children(recursive=True)]
        for each in everyone:
            each.suspend()  # else some see others go, and end by themselves
        for each in [*everyone, *process.children(recursive=True)]:
            each.kill()
        self.process.wait()
        psutil.wait_procs(everyone, TIMEOUT)


@dataclass
class RayCluster:
    """A cluster, at first of one node.

    Attributes:
        directory: of logs and sockets.
        port: at which it is found.
        cpus: of each node.
        nodes: those that have not been killed.
    """

    directory: Path
    port: int
    cpus: int
    nodes: list[RayNode] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        """In which a driver finds it."""
        return ENVIRONMENT | {
            "RAY_ADDRESS": f"127.0.0.1:{self.port}",
            "RAY_TMPDIR": str(self.directory),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
        }

    def add(self) -> RayNode:
        """Start another node."""
        return RayNode(self, f"--address=127.0.0.1:{self.port}", "--include-log-monitor=false")


@contextmanager
def ray_cluster(cpus: int = 1) -> Iterator[RayCluster]:
    """A cluster of one node; its processes are gone in the end.

    Args:
        cpus: of each of its nodes.
    """
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short, for the paths of sockets
    cluster = RayCluster(directory, free_port(), cpus)
    try:
        RayNode(cluster, "--head", f"--port={cluster.port}", "--include-dashboard=false")
        yield cluster
    finally:
        for node in [*cluster.nodes]:
            node.kill()
        shutil.rmtree(directory)
