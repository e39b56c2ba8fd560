"""Several engines on several nodes, which join once; a lost node is replaced."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import GREEDY, answer_of_one_rank, complete, fail_in_a_request
from support.clock import Clock
from support.nodes import LOAD, TOKEN, Agent, agent
from support.processes import wait_until_gone
from support.server import TIMEOUT, Server, free_port, start_server

import weft.serving.executor.nodes.node_pool
from weft.errors import EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_process import share_out
from weft.serving.executor.nodes.node_pool import NodePool
from weft.serving.executor.placement import Inventory

SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 4}
LONG = 400
"""Tokens in an answer during which a node is lost."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """Return the long answer."""
    return answer_of_one_rank(model, LONG, **SIZES)


@pytest.fixture(scope="module")
def short(model: Path) -> str:
    return answer_of_one_rank(model, **SIZES)


def begin(server: Server, stack: ExitStack) -> Iterator[dict[str, Any]]:
    """Request a long answer; return its events once the first has arrived."""
    body = GREEDY | {"model": server.model, "max_tokens": LONG, "stream": True}
    http = stack.enter_context(closing(httpx.Client(base_url=server.url, timeout=TIMEOUT)))
    response = stack.enter_context(http.stream("POST", "/v1/completions", json=body))

    def events() -> Iterator[dict[str, Any]]:
        for line in response.iter_lines():
            if line and "[DONE]" not in line:
                yield json.loads(line.removeprefix("data: "))

    came = events()
    first = next(came)

    def all_of_them() -> Iterator[dict[str, Any]]:
        yield first
        yield from came

    return all_of_them()


def text_of(events: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children()


def wait_for_log(path: Path, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.01)


def test_a_lost_node_ends_its_engine_alone_and_another_takes_its_place(
    model: Path, expected: str, short: str, tmp_path: Path
) -> None:
    port = free_port()
    many = {"dp": 2, "nodes": 2, "node_port": port, "node_token": TOKEN, "restart": True}
    with ExitStack() as stack:
        lost = stack.enter_context(agent(port, tmp_path / "agent1", load_model=LOAD))
        server = stack.enter_context(start_server(model, tmp_path, **many, **SIZES))
        assert len(children(lost.pid)) == 1
        ranks = [rank.pid for rank in children(lost.pid)]

        here, there = begin(server, stack), begin(server, stack)
        lost.kill()
        *_, last = there
        assert "the model runner failed: node1 at 127.0.0.1 is lost, " in (last["error"]["message"])
        assert text_of(here) == expected
        wait_until_gone(ranks)
        server.wait_until("engine_cores", 1)
        wait_for_log(server.log, "waiting for node1 at 127.0.0.1, or another node")
        assert server.http.get("/ready").status_code == 200
        assert complete(server) == short

        other = stack.enter_context(agent(port, tmp_path / "agent2", name="node2", load_model=LOAD))
        server.wait_until("engine_cores", 2)
        assert server.metric("engine_restarts_total") == 1
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda _: complete(server), range(2))) == [short] * 2
        ranks = [rank.pid for rank in children(other.pid)]
        assert len(ranks) == 1
        server.process.terminate()
        assert server.process.wait(TIMEOUT) == 0
        assert other.wait(TIMEOUT) == 0, "the agent has ended with the server"
        wait_until_gone(ranks)


@pytest.mark.slow
def test_a_node_that_hangs_is_named_given_up_and_replaced(
    model: Path, expected: str, short: str, tmp_path: Path
) -> None:
    port = free_port()
    two = {"tp": 2, "nodes": 2, "node_port": port, "node_token": TOKEN}
    with ExitStack() as stack:
        hung = stack.enter_context(agent(port, tmp_path / "agent1", load_model=LOAD))
        started = start_server(model, tmp_path, restart=True, stall_timeout=4.0, **two, **SIZES)
        server = stack.enter_context(started)
        message = fail_in_a_request(server, lambda: hung.send_signal(signal.SIGSTOP))
        assert "node1 at 127.0.0.1 is lost, with rank 1, in step " in message
        assert message.endswith(": it has said nothing for 2 s")
        server.wait_until_said("node1 at 127.0.0.1 has said nothing for 1 s; dropped")
        server.wait_until_said("waiting for node1 at 127.0.0.1, or another node")
        stack.enter_context(agent(port, tmp_path / "agent2", name="node2", load_model=LOAD))
        server.wait_until("engine_cores", 1)
        assert server.metric("engine_restarts_total") == 1
        assert complete(server) == short
        hung.send_signal(signal.SIGCONT)
        assert hung.wait(TIMEOUT) == 1
        assert f"127.0.0.1:{port} has hung up" in (tmp_path / "agent1").read_text()


def test_a_node_that_comes_late_waits_and_takes_the_place_of_a_lost_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    clock = Clock()
    monkeypatch.setattr(weft.serving.executor.nodes.node_pool, "time", clock)
    config = EngineConfig(tp=3, nodes=2, node_port=0, node_token=TOKEN)

    async def wait_for(text: str) -> None:
        while text not in caplog.text:
            await asyncio.sleep(0.01)

    async def lose_one(stack: ExitStack) -> None:
        pool = NodePool(config)

        def join(name: str, max_ranks: int) -> Agent:
            log = tmp_path / name
            return stack.enter_context(agent(pool.port, log, name=name, node_ranks=max_ranks))

        first = join("first", 2)
        (inventory,) = await pool.inventories()
        assert (inventory.max_ranks, inventory.where) == (2, "first at 127.0.0.1")
        pool.assign(share_out(config, [Inventory(1), inventory]))
        small = join("small", 1)
        await wait_for("small at 127.0.0.1 is kept in reserve: not needed, or too few devices")
        clock.paused = 1000.0  # nothing ran in this time, so no node counts as silent
        before = pool._nodes[0].last_heard
        while pool._nodes[0].last_heard < before + clock.paused:
            await asyncio.sleep(0.01)
        first.kill()
        await wait_for("first at 127.0.0.1 has left")
        waiting = asyncio.ensure_future(pool.wait_for_slice(0))
        await wait_for("waiting for first at 127.0.0.1, or another node")
        assert not waiting.done()
        with pytest.raises(EngineError, match=r"first at 127\.0\.0\.1 has left: its"):
            pool.connect_nodes(0, 1)
        large = join("large", 2)
        part = (await waiting).replica.slice[1]
        assert (part.node, part.where) == (1, "large at 127.0.0.1")
        await pool.close()
        await pool.close()
        assert [small.wait(TIMEOUT), large.wait(TIMEOUT)] == [0, 0]

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(lose_one(stack), TIMEOUT))


def test_engines_share_nodes_that_have_joined_once(
    model: Path, expected: str, short: str, tmp_path: Path
) -> None:
    """Both engines have one rank on each node; one remote rank is killed."""
    port = free_port()
    many = {"dp": 2, "tp": 2, "nodes": 2, "devices": "2x1", "node_port": port, "restart": True}
    with (
        agent(port, tmp_path / "agent1", load_model=LOAD, once=False, node_ranks=2) as joined,
        start_server(model, tmp_path, node_token=TOKEN, **many, **SIZES) as server,
        ExitStack() as stack,
    ):
        ranks = sorted(children(joined.pid), key=lambda rank: rank.pid)
        assert len(ranks) == 2
        streams = [begin(server, stack), begin(server, stack)]
        ranks[0].kill()
        endings = [list(events) for events in streams]
        failed = [events[-1]["error"]["message"] for events in endings if "error" in events[-1]]
        (message,) = failed
        assert f"rank 1 (process {ranks[0].pid} on node1 at 127.0.0.1) was killed" in message
        assert text_of(iter(next(e for e in endings if "error" not in e[-1]))) == expected
        server.wait_until("engine_restarts_total", 1)
        server.wait_until("engine_cores", 2)
        after = children(joined.pid)
        assert len(after) == 2
        assert ranks[1] in after
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda _: complete(server), range(2))) == [short] * 2
    assert (tmp_path / "agent1").read_text().count(f"joined 127.0.0.1:{port}") == 1


def test_while_nodes_are_awaited_it_is_healthy_and_a_signal_ends_it(
    model: Path, tmp_path: Path
) -> None:
    many = {"tp": 2, "nodes": 2, "node_port": free_port(), "port": free_port()}
    with start_server(model, tmp_path, until="healthy", **many, **SIZES) as server:
        assert server.http.get("/ready").status_code == 503
        wait_for_log(server.log, "waiting for another node to run: WEFT_NODE_TOKEN=")
        server.process.terminate()
        assert server.process.wait(TIMEOUT) == 0


def test_a_node_with_too_few_ranks_is_named_with_what_fits(model: Path, tmp_path: Path) -> None:
    port = free_port()
    many = {"tp": 4, "nodes": 2, "node_ranks": 2, "node_port": port, "node_token": TOKEN}
    with (
        agent(port, tmp_path / "agent1", load_model=LOAD, node_ranks=1) as joined,
        start_server(model, tmp_path, until="started", **many, **SIZES) as server,
    ):
        assert server.process.wait(TIMEOUT) == 2
        assert joined.wait(TIMEOUT) == 0
        assert server.log.read_text().splitlines()[-1] == (
            "weft: error: no room for 4 ranks. Available: this node: 2 CPU ranks; node1 at "
            "127.0.0.1: 1 CPU rank. No --devices would fit: 4 are needed"
        )
