"""Sites for a server's ranks: this machine, a joined node, or Ray nodes.

A site lists further processes to kill by name, and restarts them like a supervisor.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import psutil

from support.nodes import TOKEN
from support.ray_nodes import RayCluster, ray_cluster
from support.server import ENVIRONMENT, TIMEOUT, free_port


class Victim(Protocol):
    """Something to kill."""

    def kill(self) -> None: ...


class Site:
    """Site with this machine only.

    Attributes:
        settings: settings for the server.
        environment: environment for the server.
    """

    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = ENVIRONMENT

    def victims(self) -> dict[str, Victim]:
        """Return the victims by name."""
        return {}

    def processes(self) -> list[psutil.Process]:
        """Return weft's processes there."""
        return []

    def mend(self, name: str) -> None:
        """Restart a killed victim, unless weft itself does so."""


class TwoJoinedNodes(Site):
    """Site with a second node, which runs `weft join`."""

    def __init__(self, directory: Path) -> None:
        port = free_port()
        self.settings = {"nodes": 2, "node_port": port, "node_token": TOKEN}
        self._command = [sys.executable, "-m", "weft", "join", f"127.0.0.1:{port}"]
        self._directory = directory
        self._start()

    def _start(self) -> None:
        with (self._directory / "join.log").open("ab") as log:
            self._join = subprocess.Popen(
                self._command,
                env=ENVIRONMENT | {"WEFT_NODE_TOKEN": TOKEN},
                stderr=log,
                cwd=self._directory,
            )

    def victims(self) -> dict[str, Victim]:
        joined = psutil.Process(self._join.pid)
        return {"node": joined, **{f"its rank {i}": r for i, r in enumerate(joined.children())}}

    def processes(self) -> list[psutil.Process]:
        joined = psutil.Process(self._join.pid)
        return [joined, *joined.children(recursive=True)]

    def mend(self, name: str) -> None:
        if name == "node":
            self._join.wait()
            self._start()

    def close(self) -> None:
        """Interrupt `weft join`."""
        self._join.terminate()
        self._join.wait()


class TwoNodes(Site):
    """Site with two Ray nodes. The second one may be lost as a whole, or only its raylet."""

    settings: Mapping[str, Any] = {"nodes": 2, "executor": "ray"}

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self.environment = cluster.environment
        cluster.add()

    def victims(self) -> dict[str, Victim]:
        node = self._cluster.nodes[1]
        return {"node": node, "raylet": node.raylet}

    def processes(self) -> list[psutil.Process]:
        return [process for node in self._cluster.nodes for process in node.of_weft()]

    def mend(self, name: str) -> None:
        if name == "raylet":
            node = self._cluster.nodes[1]
            node.process.wait(TIMEOUT)  # which ends when its raylet does
            node.kill()
        if name in ("node", "raylet"):
            self._cluster.add()


@contextmanager
def here(directory: Path) -> Iterator[Site]:
    """Use this machine only."""
    yield Site()


@contextmanager
def two_joined_nodes(directory: Path) -> Iterator[Site]:
    """Add a joined node; its log is in the directory."""
    site = TwoJoinedNodes(directory)
    try:
        yield site
    finally:
        site.close()


@contextmanager
def two_nodes(directory: Path) -> Iterator[Site]:
    """Add a Ray cluster."""
    with ray_cluster() as cluster:
        yield TwoNodes(cluster)
