"""A model whose ranks are on several machines.

    this machine                                   others
    RankExecutor ──► LocalMachine: ranks 0, 1
                 ──► RemoteMachine ──── TCP ────►  agent: ranks 2, 3

The other machines join this one (agent.py), which waits for them, deals the ranks out in their
order, equally many to each machine, and closes the port at which it waited.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Self

import msgspec

from weft.errors import ConfigError, EngineError
from weft.serving.config import EngineConfig
from weft.serving.executor.link import Link, admit, check_address, check_token
from weft.serving.executor.machine import LocalMachine, Machine
from weft.serving.executor.machine_wire import (
    FromAgent,
    Hello,
    Refused,
    Unreachable,
    differences,
    versions,
)
from weft.serving.executor.processes import STUCK, RankExecutor, named
from weft.serving.executor.reach import measure
from weft.serving.executor.remote import Joined, RemoteMachine
from weft.serving.loading import LoadedModel

HELLO = 5.0
"""Seconds for a machine to say what it is, after it has proved that it may."""

logger = logging.getLogger(__name__)


class Head:
    """Waits for machines to join this one. As a context manager it gives the port back.

    Args:
        config: of the engine: node_address, node_port, node_token.
        strict: turn machines away that have other versions.

    Attributes:
        port: at which it listens.
        token: that machines must know.

    Raises:
        ConfigError: the address is not to be had, or the token is too short.
    """

    def __init__(self, config: EngineConfig, *, strict: bool = True) -> None:
        check_token(config.node_token)
        self._strict = strict
        self._given = config.node_token is not None
        self.token = config.node_token or secrets.token_urlsafe(24)
        self._name = config.node_address or socket.gethostname()
        self._listener = _listen(config.node_address, config.node_port)
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def invite(self, count: int) -> None:
        """Say what to run on so many other machines."""
        token = "" if self._given else f"WEFT_NODE_TOKEN={self.token} "
        machines = "another machine" if count == 1 else f"{count} other machines"
        command = f"{token}weft join {self._name}:{self.port}"
        logger.warning("waiting for %s to run: %s", machines, command)  # else nothing goes on

    def wait_for(self, count: int, timeout: float | None = None) -> list[Joined]:
        """So many machines, in the order in which they came; or those that came in time."""
        joined: list[Joined] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            deadline = None if timeout is None else time.monotonic() + timeout
            while len(joined) < count:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for key, _ in selector.select(left):
                    if key.data is None:
                        if (machine := self._admit()) is not None:
                            joined.append(machine)
                            selector.register(machine.link.socket, selectors.EVENT_READ, machine)
                            logger.info("%s has joined", machine.where)
                    else:  # it has nothing to say before it is told something
                        logger.info("%s has left", key.data.where)
                        selector.unregister(key.fileobj)
                        key.data.link.close()
                        joined.remove(key.data)
        return joined

    def _admit(self) -> Joined | None:
        """Who has connected, if it may join."""
        sock, (address, *_) = self._listener.accept()
        with suppress(OSError, msgspec.DecodeError):
            if not admit(sock, self.token):
                logger.warning("%s was turned away: it does not know --node-token", address)
                sock.close()
                return None
            link: Link[FromAgent] = Link(sock, FromAgent)
            hello = link.wait(HELLO)
            if isinstance(hello, Hello):
                wrong = differences(versions(), hello.versions)
                if not (wrong and self._strict):
                    return Joined(link, hello)
                logger.warning("%s cannot take part: %s", hello.name, "; ".join(wrong))
                wrong = differences(hello.versions, versions())
                link.send(Refused(f"this machine cannot take part: {'; '.join(wrong)}"))
        sock.close()
        return None


class HostsExecutor(RankExecutor):
    """Ranks on this machine and on others that join it; see RankExecutor.

    Args:
        config: of the engine, with `nodes` above 1.
        load_model: `loading.load_model`, or what stands in for it, on this machine.

    Raises:
        ConfigError: the ranks cannot be dealt out, or the port is not to be had.
    """

    def __init__(self, config: EngineConfig, load_model: Callable[..., LoadedModel]) -> None:
        check_nodes(config)
        super().__init__(config, gather(config, load_model))


def gather(config: EngineConfig, load_model: Callable[..., LoadedModel]) -> Iterator[Machine]:
    """All machines, each started when it is asked for."""
    with Head(config) as head:
        head.invite(config.nodes - 1)
        others = head.wait_for(config.nodes - 1)
    yield from deal_out(config, others, head.token, named(load_model))


def deal_out(
    config: EngineConfig,
    others: list[Joined],
    token: str,
    load_model: str,
    *,
    own_ranks: bool = True,
) -> Iterator[Machine]:
    """Start each machine's ranks, on this one first if it is to have some.

    Raises:
        ConfigError: some of the addresses cannot be reached by all.
        EngineError: a machine cannot reach another one, or has left.
    """
    world_size = config.world_size
    share = world_size // config.nodes
    waiting = list(others)
    try:
        own = own_address(config, others) if own_ranks else None
        addresses = [joined.hello.address for joined in others]
        host = own or addresses[0]
        check_addresses([host, *addresses])
        for source, target, way in measure(own, others, token, seconds=0.0):
            if isinstance(way, Unreachable):
                raise EngineError(f"{source} does not reach {target} at a free port: {way.why}")
        first = 0
        if own is not None:
            ranks = range(share)
            yield LocalMachine(config, load_model, ranks, world_size, host=own, address=own)
            first = share
        for joined in others:
            ranks = range(first, first + share)
            try:
                yield RemoteMachine(
                    joined,
                    config,
                    ranks,
                    world_size,
                    host=host,
                    patience=config.stall_timeout * STUCK,
                )
            except OSError as error:
                raise EngineError(f"{joined.where} has left: {error.strerror}") from None
            waiting.remove(joined)
            first += share
    finally:
        for joined in waiting:
            joined.link.close()


def check_nodes(config: EngineConfig) -> None:
    """Refuse a number of machines that the ranks cannot be dealt out to.

    Raises:
        ConfigError: naming the numbers that work.
    """
    ranks, nodes = config.world_size, config.nodes
    if ranks % nodes:
        works = ", ".join(str(n) for n in range(1, ranks + 1) if not ranks % n)
        raise ConfigError(
            f"--nodes is {nodes}; it must divide the {ranks} ranks of --tp, --ep, --cp "
            f"and --pp. These numbers work: {works}"
        )
    # With Ray the one node is not this machine's own either.
    given, works = (
        (f"--nodes is {nodes}", "1") if nodes > 1 else ("--executor is 'ray'", "processes")
    )
    if config.dp > 1:
        raise ConfigError(f"{given}; with --dp {config.dp} it must be {works}")
    check_address(config.node_address)
    if config.kernels == "overlapped":
        raise ConfigError(
            f"{given}; with --kernels overlapped it must be {works}: on CPUs these meet in one "
            "machine's memory"
        )


def own_address(config: EngineConfig, others: list[Joined]) -> str:
    """This machine's address, at which others reach it.

    Raises:
        ConfigError: they use several.
    """
    if config.node_address is not None:
        return config.node_address
    used = sorted({joined.link.own_address for joined in others})
    if len(used) > 1:
        raise ConfigError(
            f"machines have joined this one at {' and '.join(used)}: --node-address must say at "
            "which of these all of them reach it"
        )
    return used[0]


def check_addresses(addresses: list[str]) -> None:
    """Refuse addresses of which some are loopback, and cannot be reached from the others.

    Raises:
        ConfigError: naming them.
    """
    local = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    if local and len(local) < len(addresses):
        far = next(address for address in addresses if address not in local)
        raise ConfigError(
            f"a machine has joined at {local[0]}, where {far} cannot reach it: "
            "--node-address must give each machine's address"
        )


def _listen(address: str | None, port: int) -> socket.socket:
    """At one address, or at all of this machine."""
    where = "" if address is None else f"--node-address {address} "
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        why = str(error.strerror).split(" (")[0]
        raise ConfigError(f"{where}--node-port {port}: {why}") from None
