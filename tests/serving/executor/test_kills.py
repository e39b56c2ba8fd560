"""Engines and ranks killed under load: `weft serve --restart` recovers each time.

Clients send requests all the time. Soon after a kill, each one gets an answer or an error in
OpenAI's format. The server then serves as before, and the killed processes leave nothing behind.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import asking, complete
from support.processes import shared_memory_left_alone, wait_until_gone
from support.server import TIMEOUT, Server, start_server
from support.sites import Site, Victim, here, two_joined_nodes, two_nodes

SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 4}


@dataclass(frozen=True)
class Layout:
    """Flags, the number of processes and engine cores, their site, and the targets to kill."""

    flags: dict[str, int]
    processes: int
    targets: tuple[str, ...]
    cores: int = 1
    family: str = "qwen3"
    site: Callable[[Path], AbstractContextManager[Site]] = here


RANKS = ("rank 0", "rank 1")
LAYOUTS = {
    "tp 1": Layout({}, 1, ("engine",)),
    "tp 2": Layout({"tp": 2}, 3, ("engine", *RANKS)),
    "pp 2": Layout({"pp": 2}, 3, ("engine", *RANKS)),
    "ep 2": Layout({"ep": 2}, 3, ("engine", *RANKS), family="qwen3_moe"),
    "dp 2": Layout({"dp": 2}, 2, ("engine", "engine 1"), 2),
    "two joined nodes": Layout({"tp": 2}, 4, ("node", "its rank 0"), site=two_joined_nodes),
    "two nodes": Layout({"pp": 2}, 5, ("node", "raylet"), site=two_nodes),
}
DEADLINE = 20.0
"""Seconds from a kill to the end of every request, on a busy machine."""


class Kills:
    """Count of kills, and the longest recovery times."""

    def __init__(self) -> None:
        self.of: Counter[str] = Counter()
        self.until_error = self.until_served = 0.0

    def __str__(self) -> str:
        kills = ", ".join(f"{name}: {count}" for name, count in sorted(self.of.items()))
        return f"{kills}; {self.until_error:.1f} s, served again {self.until_served:.1f} s"


@dataclass
class Scene:
    """A server with its site."""

    server: Server
    layout: Layout
    site: Site
    rng: random.Random
    kills: Kills

    def processes(self) -> list[psutil.Process]:
        """Return the server's child processes and those on its site."""
        return [*family(self.server), *self.site.processes()]

    def strike(self, how: Callable[[Any], None], name: str) -> list[int]:
        """Apply `how` to a target; return the pids of all processes before that."""
        deadline = time.monotonic() + TIMEOUT
        while (victim := (named(self.server) | self.site.victims()).get(name)) is None:
            assert time.monotonic() < deadline  # its replacement is about to start
            time.sleep(0.01)
        everyone = [process.pid for process in self.processes()]
        how(victim)
        self.kills.of[name] += 1
        return everyone


def family(server: Server) -> list[psutil.Process]:
    """Return engines and ranks on this machine, without zombies."""
    return [
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def named(server: Server) -> dict[str, Victim]:
    """Return engines and ranks by name."""
    engines = psutil.Process(server.process.pid).children()
    ranks = [rank for engine in engines for rank in engine.children()]
    names = ["engine", *(f"engine {i}" for i in range(1, len(engines)))]
    return dict(zip(names, engines, strict=False)) | {f"rank {i}": r for i, r in enumerate(ranks)}


def restarts(server: Server) -> int:
    return int(server.metric("engine_restarts_total"))


def wait_until_served(scene: Scene, restarted: int) -> None:
    """Wait for a number of restarts and for all cores; the server stays healthy meanwhile."""
    server, deadline = scene.server, time.monotonic() + TIMEOUT
    while restarts(server) < restarted or server.metric("engine_cores") < scene.layout.cores:
        assert server.process.poll() is None, server.log.read_text()
        assert server.http.get("/health").status_code == 200
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)
    assert server.http.get("/ready").status_code == 200


def kill(
    scene: Scene,
    name: str,
    *,
    how: Callable[[Any], None] = lambda victim: victim.kill(),
    again: bool = False,
    deadline: float = DEADLINE,
) -> None:
    """Under load, strike once, or with `again` once more while what came loads; then compare."""
    server, rng, kills = scene.server, scene.rng, scene.kills
    expected, count = complete(server), restarts(server) + 1
    with asking(server, rng.randrange(1000)) as clients:
        time.sleep(rng.uniform(0, 1))
        pids = scene.strike(how, name)
        at = time.monotonic()
        while any(client.began is not None and client.began < at for client in clients):
            assert time.monotonic() < at + deadline, "a request has not ended"
            time.sleep(0.01)
        kills.until_error = max(kills.until_error, time.monotonic() - at)
        scene.site.mend(name)
        if again:
            while restarts(server) < count:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 3))
            pids += scene.strike(how, name)
            scene.site.mend(name)
            at = time.monotonic()
            count += 1
        wait_until_served(scene, count)
        kills.until_served = max(kills.until_served, time.monotonic() - at)
    assert [fault for client in clients for fault in client.faults] == []
    assert sum(client.failed for client in clients) > 0 or scene.layout.cores > 1
    assert complete(server) == expected
    now = [process.pid for process in scene.processes()]
    assert len(now) == scene.layout.processes
    wait_until_gone([pid for pid in pids if pid not in now])


@contextmanager
def started(name: str, directory: Path, seed: int = 0, **settings: Any) -> Iterator[Scene]:
    """A server that goes on whatever is killed, and leaves nothing in the end."""
    layout, kills = LAYOUTS[name], Kills()
    model = make_checkpoint(directory / "model", layout.family)
    with shared_memory_left_alone(), layout.site(directory) as site:
        flags = layout.flags | SIZES | site.settings | settings | {"restart": True}
        with start_server(model, directory, environment=site.environment, **flags) as server:
            scene = Scene(server, layout, site, random.Random(seed), kills)
            yield scene
            last = [process.pid for process in family(server)]
        assert server.process.returncode == 0
        wait_until_gone(last)
    print(f"{name}: {kills}")


@pytest.mark.features("cpu", "tp", "restart")
def test_ranks_and_engines_come_back(tmp_path: Path) -> None:
    """A rank is killed, the engine is, and then a rank is stopped, seen after 3 s."""
    with started("tp 2", tmp_path, stall_timeout=6) as scene:
        for name in ("rank 1", "engine"):
            kill(scene, name)
        kill(scene, "rank 0", how=psutil.Process.suspend, deadline=DEADLINE + 6)


@pytest.mark.slow
def test_one_engine_of_two_comes_back(tmp_path: Path) -> None:
    with started("dp 2", tmp_path) as scene:
        kill(scene, "engine")


@pytest.mark.features("cpu", "nodes", "tp", "restart")
@pytest.mark.slow
def test_a_joined_node_comes_back(tmp_path: Path) -> None:
    with started("two joined nodes", tmp_path) as scene:
        kill(scene, "node")


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills(name: str, seed: int, tmp_path: Path) -> None:
    """Ten for each seed, every third of them followed by another while it loads."""
    with started(name, tmp_path, seed) as scene:
        for i in range(10):
            kill(scene, scene.rng.choice(scene.layout.targets), again=i % 3 == 2)
