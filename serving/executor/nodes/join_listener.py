"""Where nodes join: a port of this one, at which strangers may connect, too.

    connects ──► proves that it knows the token ──► says Hello ──► Joined
                 within HANDSHAKE_TIMEOUT seconds, for both; else it is turned away

Nobody is waited for: what each has said is taken in as it comes, so that one that is silent, or
slow, or says nonsense, keeps no other one from joining.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import time
from dataclasses import dataclass
from typing import Self

import msgspec

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes.link import Handshake, Link, check_token, unmapped
from weft.serving.executor.nodes.messages import FromAgent, Hello, Refused, differences, versions
from weft.serving.executor.nodes.remote import JoinedNode

MAX_PENDING = 64
"""At once; for one more, the one that has been there longest is turned away."""

CHECK_INTERVAL = 1.0
"""Seconds between two looks for strangers whose time is over, at most."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _PendingConnection:
    """Who has connected; `link` is there once it has proved that it knows the token."""

    handshake: Handshake
    address: str
    link: Link[FromAgent] | None = None


class JoinListener:
    """Waits for nodes to join this one. As a context manager it gives the port back.

    Args:
        config: of the engine: node_address, node_port, node_token.
        strict: turn nodes away that have other versions.

    Attributes:
        port: at which it listens.
        token: that nodes must know.

    Raises:
        ConfigError: the address is not to be had, or the token is too short.
    """

    def __init__(self, config: EngineConfig, *, strict: bool = True) -> None:
        check_token(config.node_token)
        self._strict = strict
        self._token_is_given = config.node_token is not None
        self.token = config.node_token or secrets.token_urlsafe(24)
        self._name = config.node_address or socket.gethostname()
        self._socket = _listen(config.node_address, config.node_port)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._pending: list[_PendingConnection] = []
        self._selector = selectors.EpollSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the port back, and hang up on who has not joined yet."""
        for pending in self._pending:
            pending.handshake.socket.close()
        self._pending.clear()
        self._selector.close()
        self._socket.close()

    def log_join_command(self, count: int) -> None:
        """Say what to run on so many other nodes."""
        token = "" if self._token_is_given else f"WEFT_NODE_TOKEN={self.token} "
        nodes = "another node" if count == 1 else f"{count} other nodes"
        command = f"{token}weft join {self._name}:{self.port}"
        logger.warning("waiting for %s to run: %s", nodes, command)  # else nothing goes on

    def fileno(self) -> int:
        """Can be read when `accept` has something to do."""
        return self._selector.fileno()

    def wait_for(self, count: int, timeout: float | None = None) -> list[JoinedNode]:
        """So many nodes, in the order in which they came; or those that came in time."""
        joined: list[JoinedNode] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            deadline = None if timeout is None else time.monotonic() + timeout
            while len(joined) < count:
                left = CHECK_INTERVAL if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(min(left, CHECK_INTERVAL)):
                    if key.data is not None:  # it has nothing to say before it is told something
                        logger.info("%s has left", key.data.where)
                        selector.unregister(key.fileobj)
                        key.data.link.close()
                        joined.remove(key.data)
                if len(joined) < count and (node := self.accept()) is not None:
                    joined.append(node)
                    selector.register(node.link.socket, selectors.EVENT_READ, node)
        return joined

    def accept(self) -> JoinedNode | None:
        """Take in what has come, and turn those away whose time is over; who may join, if one
        has become that.
        """
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
                continue
            if key.data not in self._pending:  # another one has taken its place
                continue
            try:
                joined = self._receive(key.data)
            except (OSError, msgspec.DecodeError) as error:
                self._reject(key.data, str(error))
                continue
            if joined is not None:
                self._forget(key.data)
                logger.info("%s has joined", joined.where)
                return joined
        now = time.monotonic()
        for pending in [each for each in self._pending if each.handshake.deadline < now]:
            self._reject(pending, "it has not proved in time that it knows --node-token")
        return None

    def _accept(self) -> None:
        try:
            sock, (address, *_) = self._socket.accept()
        except OSError as error:  # it has hung up
            logger.warning("a node could not join: %s", error.strerror)
            return
        if len(self._pending) == MAX_PENDING:
            self._reject(self._pending[0], "too many others have connected")
        pending = _PendingConnection(Handshake(sock, self.token), unmapped(address))
        self._pending.append(pending)
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _receive(self, pending: _PendingConnection) -> JoinedNode | None:
        """Take in what one says; the node, if that was the last of it.

        Raises:
            OSError: it has hung up, or may not join.
            msgspec.DecodeError: it makes no sense.
        """
        if pending.link is None:
            if (knows := pending.handshake.advance()) is False:
                raise ConnectionError("it does not know --node-token")
            if knows:  # so it means well: what it says next comes as a whole
                pending.link = Link(pending.handshake.socket, FromAgent)
            return None
        hello = pending.link.receive()
        if not isinstance(hello, Hello):
            raise ConnectionError("it has not said what it is")
        wrong = differences(versions(), hello.versions)
        if wrong and self._strict:
            theirs = differences(hello.versions, versions())
            pending.link.send(Refused(f"this node cannot take part: {'; '.join(theirs)}"))
            raise ConnectionError(f"{hello.name} cannot take part: {'; '.join(wrong)}")
        return JoinedNode(pending.link, hello)

    def _reject(self, pending: _PendingConnection, why: str) -> None:
        logger.warning("%s was turned away: %s", pending.address, why)
        self._forget(pending)
        pending.handshake.socket.close()

    def _forget(self, pending: _PendingConnection) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.handshake.socket)


def _listen(address: str | None, port: int) -> socket.socket:
    """At one address, or at all of this node."""
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
