"""Several nodes on one machine: agents (`weft join`) as processes, each with its own ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import zmq

from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_process import share_out
from weft.serving.executor.nodes.curve import Context, derive_keys
from weft.serving.executor.nodes.join_client import JoinClient
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import LINGER, Link
from weft.serving.executor.nodes.messages import Hello, ToAgent
from weft.serving.executor.nodes.multi_node_executor import start_nodes
from weft.serving.executor.nodes.remote import JoinedNode
from weft.serving.executor.placement import Inventory
from weft.serving.executor.ranks import RankExecutor

TOKEN = "a token of the tests"
LOAD = "weft.serving.executor.loading:load_model"
MOCK = "support.mock_ranks:load"

_AGENT = """
import logging, sys
from weft.errors import WeftError
from weft.serving.cli.doctor import examine_machine
from weft.serving.executor.nodes.agent import join
logging.basicConfig(level=logging.INFO)
host, port, token, name, load_model, address, once, node_ranks = sys.argv[1:]
try:
    join(
        host,
        int(port),
        token,
        address=address or None,
        name=name,
        once=once == "once",
        load_model=load_model,
        node_ranks=int(node_ranks) if node_ranks else None,
        examine=examine_machine,
    )
except WeftError as error:
    sys.exit(f"weft: error: {error}")
"""


Agent = subprocess.Popen[bytes]


@contextmanager
def agent(
    port: int,
    log: Path,
    *,
    name: str = "node1",
    token: str = TOKEN,
    load_model: str = MOCK,
    host: str = "127.0.0.1",
    address: str = "",
    once: bool = True,
    node_ranks: int | None = None,
) -> Iterator[Agent]:
    """Start an agent that joins at a port; its stderr goes to the file `log`."""
    with log.open("wb") as stderr:
        ranks = "" if node_ranks is None else str(node_ranks)
        ends = "once" if once else "again"
        arguments = [host, str(port), token, name, load_model, address, ends, ranks]
        command = [sys.executable, "-P", "-c", _AGENT, *arguments]
        process = subprocess.Popen(command, stderr=stderr, env=_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


@contextmanager
def listening(config: EngineConfig) -> Iterator[JoinListener]:
    """Listen at a free port for nodes with the tests' token; end all connections after it."""
    context: Context = zmq.Context()
    try:
        with JoinListener(context, replace(config, node_port=0, node_token=TOKEN)) as listener:
            yield listener
    finally:
        context.destroy(LINGER)


@contextmanager
def pretended(listener: JoinListener, hello: Hello) -> Iterator[tuple[JoinedNode, Link[ToAgent]]]:
    """Join from this process; yield the connection's two ends."""
    context: Context = zmq.Context()
    client = JoinClient(context, "127.0.0.1", derive_keys(TOKEN), hello.name)
    try:
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(_join_and_say, client, listener.port, hello)
            (joined,) = listener.wait_for(1, 60)
            link = joining.result()
        yield joined, link
        for each in (joined.link, link):
            each.close()
    finally:
        context.destroy(LINGER)


def _join_and_say(client: JoinClient, port: int, hello: Hello) -> Link[ToAgent]:
    link = client.join(port)
    link.send(hello)
    return link


@contextmanager
def spread(
    config: EngineConfig, logs: Path, load_model: str = MOCK
) -> Iterator[tuple[RankExecutor, list[Agent]]]:
    """Create an executor with ranks here and on joined nodes: node1, node2, ..."""
    with ExitStack() as stack:
        listener = stack.enter_context(listening(config))
        agents = []
        for number in range(1, config.nodes):
            name = f"node{number}"
            log = logs / f"{name}.log"
            started = agent(listener.port, log, name=name, load_model=load_model)
            agents.append(stack.enter_context(started))
        others = listener.wait_for(config.nodes - 1)
        others.sort(key=lambda joined: joined.hello.name)
        (config,) = share_out(config, [Inventory()] * config.nodes)
        nodes = start_nodes(config, dict(enumerate(others, 1)), load_model)
        executor = RankExecutor(config, nodes)
        try:
            yield executor, agents
        finally:
            executor.close()
            for each in agents:
                each.wait(60)  # agents end with their executor
