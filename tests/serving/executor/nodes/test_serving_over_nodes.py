"""A model on several nodes, served over HTTP: `weft serve --nodes 2` and `weft join`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import answer_of_one_rank, complete, fail_in_a_request
from support.netns import Host, two_hosts
from support.nodes import LOAD, TOKEN, agent
from support.processes import wait_until_gone
from support.server import ENVIRONMENT, TIMEOUT, Server, free_port, start_server

SIZES = {"kv_cache_memory": 2**22, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    return answer_of_one_rank(model, **SIZES)


def ranks_of(server: Server) -> list[psutil.Process]:
    (engine,) = psutil.Process(server.process.pid).children()
    return engine.children()


def settings(**more: Any) -> dict[str, Any]:
    return SIZES | {"tp": 2, "nodes": 2, "node_token": TOKEN} | more


@pytest.mark.features("cpu", "nodes", "tp")
def test_two_nodes_answer_as_one_and_a_lost_one_is_named(
    model: Path, expected: str, tmp_path: Path
) -> None:
    port = free_port()
    with (
        agent(port, tmp_path / "agent", load_model=LOAD) as joined,
        start_server(model, tmp_path, **settings(node_port=port)) as server,
    ):
        ranks = [*ranks_of(server), *psutil.Process(joined.pid).children()]
        assert len(ranks) == 2
        assert complete(server) == expected
        message = fail_in_a_request(server, joined.kill)
        assert "node1 at 127.0.0.1 is lost, with rank 1, in step " in message
        assert server.process.wait(60) != 0
        wait_until_gone([rank.pid for rank in ranks])
        assert TOKEN not in server.log.read_text()


@pytest.fixture
def first_process() -> list[str]:
    """Return a command prefix that runs a command as a container's first process."""
    unshare = ["unshare", "--pid", "--fork", "--kill-child"]
    done = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"PID namespaces cannot be made here: {done.stderr.strip()}")
    return unshare


@contextmanager
def joining(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`weft join`, run by `command`."""
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [*command, sys.executable, "-m", "weft", "join", f"127.0.0.1:{port}"],
            env=ENVIRONMENT | {"WEFT_NODE_TOKEN": TOKEN},
            stderr=stderr,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_node_that_waits_leaves_when_told(
    number: signal.Signals, first_process: list[str], tmp_path: Path
) -> None:
    port = free_port()
    with joining(first_process, port, log := tmp_path / "log") as process:
        wait_until_said(log, f"waiting for 127.0.0.1:{port}")
        (joined,) = psutil.Process(process.pid).children()
        joined.send_signal(number)
        assert process.wait(TIMEOUT) == 0, "unshare passes on how it ended"


def test_a_node_that_serves_ends_its_ranks_when_told(
    first_process: list[str], model: Path, tmp_path: Path
) -> None:
    port = free_port()
    with (
        joining(first_process, port, log := tmp_path / "log") as process,
        start_server(model, tmp_path, **settings(node_port=port)) as server,
    ):
        (joined,) = psutil.Process(process.pid).children()
        ranks = joined.children()
        assert len(ranks) == 1
        message = fail_in_a_request(server, joined.terminate)
        assert " is lost, with rank 1, in step " in message
        assert process.wait(TIMEOUT) == 0
        assert f"left 127.0.0.1:{port}" in log.read_text()
        wait_until_gone([rank.pid for rank in ranks])
        assert server.process.wait(60) == 1


def wait_until_said(log: Path, text: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while text not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


def test_two_hosts_are_examined_before_a_model_is_loaded(
    hosts: tuple[Host, Host], model: Path, tmp_path: Path
) -> None:
    first, other = hosts
    flags = ["--model", str(model), "--tp", "2", "--nodes", "2", "--port", "0", "--json"]
    with ExitStack() as stack:
        with other.inside():
            joining = agent(7333, tmp_path / "agent", host=first.address, name="other")
            stack.enter_context(joining)
        stack.enter_context(first.inside())
        done = subprocess.run(
            [sys.executable, "-m", "weft", "doctor", *flags],
            cwd=tmp_path,
            env=os.environ | {"WEFT_NODE_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=400,
        )
    findings = json.loads(done.stdout)
    links = [finding for finding in findings if finding["name"] == "link"]
    assert [link["seen"].split(":")[0] for link in links] == [
        "this node to other at 10.77.0.2",
        "other at 10.77.0.2 to this node",
    ]
    for link in links:
        assert link["status"] in ("ok", "warn")
        assert " GB/s, " in link["seen"]
    there = {f["name"]: f for f in findings if f["machine"] == "other at 10.77.0.2"}
    for name in ("versions", "libraries", "model", "memfd"):
        assert there[name]["status"] == "ok", there[name]
    own = [finding for finding in findings if not finding["machine"]]
    islands = [finding["seen"] for finding in own if finding["name"] == "devices"]
    assert [seen.split(", ")[0] for seen in islands] == [
        "island of this node: any number of CPU ranks",
        "island of other at 10.77.0.2: any number of CPU ranks",
    ]
    (ranks,) = (finding["seen"] for finding in own if finding["name"] == "slice")
    assert ranks == "rank 0 on this node, rank 1 on other at 10.77.0.2"


def test_two_hosts_answer_as_one_and_one_whose_cable_is_cut_is_named(
    hosts: tuple[Host, Host], model: Path, expected: str, tmp_path: Path
) -> None:
    first, other = hosts
    with ExitStack() as stack:
        with other.inside():
            joining = agent(
                7333, tmp_path / "agent", host=first.address, load_model=LOAD, name="other"
            )
            joined = stack.enter_context(joining)
        stack.enter_context(first.inside())
        started = start_server(model, tmp_path, **settings(stall_timeout=4.0))
        server = stack.enter_context(started)
        assert complete(server) == expected
        own, others = ranks_of(server), psutil.Process(joined.pid).children()
        for host, ranks in ((first, own), (other, others)):
            sockets = [each for rank in ranks for each in rank.net_connections()]
            listening = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
            assert listening <= {host.address}
            assert listening or host is other
        message = fail_in_a_request(server, other.cut)
        assert "other at 10.77.0.2 is lost, with rank 1, in step " in message
        assert server.process.wait(60) != 0
        wait_until_gone([rank.pid for rank in own])
        assert joined.wait(60) == 1  # by itself: nobody could tell it
        wait_until_gone([rank.pid for rank in others])
