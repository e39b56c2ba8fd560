"""A model whose ranks are on several machines.

    this machine                                   others
    RankExecutor ──► LocalMachine: ranks 0, 1
                 ──► RemoteMachine ──── TCP ────►  agent: ranks 2, 3

The other machines have joined the front (pool.py), which says to the agents of those that are in
this engine's slice (resources.py) that they connect here, too. When all have, each is given its
ranks, and the port is closed.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
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
from weft.serving.loading import LOOPBACK, LoadedModel

LEND = 30.0
"""Seconds for the machines of a slice to connect."""

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

    def fileno(self) -> int:
        """Can be read when somebody has connected."""
        return self._listener.fileno()

    def wait_for(self, count: int, timeout: float | None = None) -> list[Joined]:
        """So many machines, in the order in which they came; or those that came in time."""
        joined: list[Joined] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            deadline = None if timeout is None else time.monotonic() + timeout
            while len(joined) < count:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                for key, _ in selector.select(left):
                    if key.data is None:
                        if (machine := self.admit()) is not None:
                            joined.append(machine)
                            selector.register(machine.link.socket, selectors.EVENT_READ, machine)
                            logger.info("%s has joined", machine.where)
                    else:  # it has nothing to say before it is told something
                        logger.info("%s has left", key.data.where)
                        selector.unregister(key.fileobj)
                        key.data.link.close()
                        joined.remove(key.data)
        return joined

    def admit(self) -> Joined | None:
        """Who has connected, if it may join."""
        try:
            sock, (address, *_) = self._listener.accept()
        except OSError as error:  # it has hung up
            logger.warning("a machine could not join: %s", error.strerror)
            return None
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
        config: of this engine, with a slice.
        load_model: `loading.load_model`, or what stands in for it, on this machine.
        announce: told the port at which the machines of the slice are awaited.

    Raises:
        EngineError: a machine did not come.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_model: Callable[..., LoadedModel],
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(config, gather(config, load_model, announce))


def gather(
    config: EngineConfig, load_model: Callable[..., LoadedModel], announce: Callable[[int], None]
) -> Iterator[Machine]:
    """All machines of the slice, each started when it is asked for."""
    others = {share.machine for share in config.replica.slice if share.machine}
    with Head(replace(config, node_port=0)) as head:
        announce(head.port)
        joined = {each.hello.machine: each for each in head.wait_for(len(others), LEND)}
    if missing := others - joined.keys():
        for each in joined.values():
            each.link.close()
        raise EngineError(f"{len(missing)} of the machines did not connect within {LEND:g} s")
    yield from deal_out(config, joined, head.token, named(load_model))


def deal_out(
    config: EngineConfig, machines: Mapping[int, Joined], token: str, load_model: str
) -> Iterator[Machine]:
    """Start the ranks on each machine of the slice, in their order.

    Args:
        config: of this engine, with a slice.
        machines: those that have joined, by number; what is of the slice and not of these is here.
        token: the group's.
        load_model: "module:function", for the ranks that are here.

    Raises:
        ConfigError: some of the addresses cannot be reached by all.
        EngineError: a machine cannot reach another one, or has left.
    """
    slice, others = config.replica.slice, list(machines.values())
    waiting = list(others)
    try:
        here = any(share.machine not in machines for share in slice)
        own = own_address(config, others) if here else None
        where = [
            machines[s.machine].hello.address if s.machine in machines else own or LOOPBACK
            for s in slice
        ]
        check_addresses(where)
        for source, target, way in measure(own, others, token, seconds=0.0):
            if isinstance(way, Unreachable):
                raise EngineError(f"{source} does not reach {target} at a free port: {way.why}")
        first = 0
        for share, address in zip(slice, where, strict=True):
            ranks = range(first, first := first + len(share.devices))
            joined = machines.get(share.machine)
            if joined is None:
                yield LocalMachine(
                    config,
                    load_model,
                    ranks,
                    config.world_size,
                    host=where[0],
                    address=address,
                    devices=share.devices,
                )
                continue
            patience = config.stall_timeout * STUCK
            waiting.remove(joined)
            try:
                yield RemoteMachine(
                    joined,
                    config,
                    share,
                    ranks,
                    config.world_size,
                    host=where[0],
                    patience=patience,
                )
            except OSError as error:
                joined.link.close()
                raise EngineError(f"{joined.where} has left: {error.strerror}") from None
    finally:
        for joined in waiting:
            joined.link.close()


def check_nodes(config: EngineConfig) -> None:
    """Refuse what cannot be, before others are waited for.

    Raises:
        ConfigError: naming what is wrong.
    """
    ranks = config.dp * config.world_size
    if config.nodes > ranks and config.devices is None:
        raise ConfigError(
            f"--nodes is {config.nodes}; it must be at most {ranks}: each machine has a rank"
        )
    check_address(config.node_address)


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
