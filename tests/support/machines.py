"""Several machines on one: agents (`weft join`) as processes, each with ranks of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from weft.serving.config import EngineConfig
from weft.serving.executor.head import Head
from weft.serving.executor.hosts import deal_out
from weft.serving.executor.processes import RankExecutor
from weft.serving.launch import share_out
from weft.serving.resources import Offer

TOKEN = "a token of the tests"
LOAD = "weft.serving.loading:load_model"
MOCK = "support.mock_ranks:load"

_AGENT = """
import logging, sys
from weft.errors import WeftError
from weft.serving.executor.agent import join
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
    name: str = "machine1",
    token: str = TOKEN,
    load_model: str = MOCK,
    host: str = "127.0.0.1",
    address: str = "",
    once: bool = True,
    node_ranks: int | None = None,
) -> Iterator[Agent]:
    """A machine that joins the head at that port; its stderr goes to the file `log`."""
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
def spread(
    config: EngineConfig, logs: Path, load_model: str = MOCK
) -> Iterator[tuple[RankExecutor, list[Agent]]]:
    """An executor with ranks here and on machines that have joined: machine1 and so on."""
    with ExitStack() as stack:
        with Head(replace(config, node_port=0, node_token=TOKEN)) as head:
            agents = []
            for number in range(1, config.nodes):
                name = f"machine{number}"
                log = logs / f"{name}.log"
                started = agent(head.port, log, name=name, load_model=load_model)
                agents.append(stack.enter_context(started))
            others = head.wait_for(config.nodes - 1)
        others.sort(key=lambda joined: joined.hello.name)
        (config,) = share_out(config, [Offer()] * config.nodes)
        machines = deal_out(config, dict(enumerate(others, 1)), TOKEN, load_model)
        executor = RankExecutor(config, machines)
        try:
            yield executor, agents
        finally:
            executor.close()
            for each in agents:
                each.wait(60)  # they end with what they took part in
