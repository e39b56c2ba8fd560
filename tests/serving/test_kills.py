"""Engines and ranks that are killed under load: `weft serve --restart` goes on, however often.

Clients ask all the time. Each gets an answer or an error of OpenAI's shape, soon after the kill,
and the server serves again as it did, with nothing left of what was killed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import asking, complete
from support.processes import shared_memory_left_alone, wait_until_gone
from support.server import TIMEOUT, Server, start_server

SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 4}


@dataclass(frozen=True)
class Layout:
    """Flags, and how many processes and engine cores they make."""

    flags: dict[str, int]
    processes: int
    cores: int = 1


LAYOUTS = {
    "tp 1": Layout({}, 1),
    "tp 2": Layout({"tp": 2}, 3),
    "dp 2": Layout({"dp": 2}, 2, 2),
}
DEADLINE = 20.0
"""Seconds from a kill to the end of every request, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


def family(server: Server) -> list[psutil.Process]:
    """Engines, and then ranks; those that are about to go are not counted."""
    return [
        process
        for process in psutil.Process(server.process.pid).children(recursive=True)
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    ]


def restarts(server: Server) -> int:
    return int(server.metric("engine_restarts_total"))


def wait_until_served(server: Server, layout: Layout, restarted: int) -> None:
    """Until cores have been started again so often and all serve, alive all the while."""
    deadline = time.monotonic() + TIMEOUT
    while restarts(server) < restarted or server.metric("engine_cores") < layout.cores:
        assert server.process.poll() is None, server.log.read_text()
        assert server.http.get("/health").status_code == 200
        assert time.monotonic() < deadline, server.log.read_text()
        time.sleep(0.05)
    assert server.http.get("/ready").status_code == 200


def strike(
    server: Server, how: Callable[[psutil.Process], None], victim: int | None, rng: random.Random
) -> list[int]:
    """Do that to a process, by its place in the family or any; returns the pids of all of them."""
    deadline = time.monotonic() + TIMEOUT
    while not (everyone := family(server)):  # the next one is about to be started
        assert time.monotonic() < deadline
        time.sleep(0.01)
    how(rng.choice(everyone) if victim is None else everyone[victim])
    return [process.pid for process in everyone]


def kill(
    server: Server,
    layout: Layout,
    rng: random.Random,
    *,
    how: Callable[[psutil.Process], None] = psutil.Process.kill,
    victim: int | None = None,
    again: bool = False,
    deadline: float = DEADLINE,
) -> None:
    """Under load, strike once, or with `again` once more while what came loads; then compare."""
    expected, count = complete(server), restarts(server) + 1
    with asking(server, rng.randrange(1000)) as clients:
        time.sleep(rng.uniform(0, 1))
        pids = strike(server, how, victim, rng)
        at = time.monotonic()
        while any(client.began is not None and client.began < at for client in clients):
            assert time.monotonic() < at + deadline, "a request has not ended"
            time.sleep(0.01)
        if again:
            while restarts(server) < count:
                time.sleep(0.01)
            time.sleep(rng.uniform(0, 3))
            pids += strike(server, how, victim, rng)
            count += 1
        wait_until_served(server, layout, count)
    assert [fault for client in clients for fault in client.faults] == []
    assert sum(client.failed for client in clients) > 0 or layout.cores > 1
    assert complete(server) == expected
    now = [process.pid for process in family(server)]
    assert len(now) == layout.processes
    wait_until_gone([pid for pid in pids if pid not in now])


@contextmanager
def started(model: Path, log: Path, layout: Layout, **settings: Any) -> Iterator[Server]:
    """A server that goes on whatever is killed, and leaves nothing in the end."""
    flags = layout.flags | SIZES | settings | {"restart": True}
    with shared_memory_left_alone(), start_server(model, log, **flags) as server:
        yield server
        last = [process.pid for process in family(server)]
    assert server.process.returncode == 0
    wait_until_gone(last)


def test_ranks_and_engines_come_back(model: Path, tmp_path: Path) -> None:
    """A rank is killed, the engine is, and then a rank is stopped, seen after 3 s."""
    layout = LAYOUTS["tp 2"]
    with started(model, tmp_path, layout, stall_timeout=6) as server:
        for victim in (2, 0):
            kill(server, layout, random.Random(victim), victim=victim)
        stop = psutil.Process.suspend
        kill(server, layout, random.Random(1), how=stop, victim=1, deadline=DEADLINE + 6)


def test_one_engine_of_two_comes_back(model: Path, tmp_path: Path) -> None:
    with started(model, tmp_path, LAYOUTS["dp 2"]) as server:
        kill(server, LAYOUTS["dp 2"], random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_fifty_kills(name: str, seed: int, model: Path, tmp_path: Path) -> None:
    """Ten for each seed, every third of them followed by another while it loads."""
    rng = random.Random(seed)
    with started(model, tmp_path, LAYOUTS[name]) as server:
        for i in range(10):
            kill(server, LAYOUTS[name], rng, again=i % 3 == 2)
