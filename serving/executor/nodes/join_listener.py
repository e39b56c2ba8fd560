"""The port where other nodes join; anybody on the network may connect to it.

    connects ──► proves that it knows the token ──► sends Hello ──► JoinedNode
                 both within HANDSHAKE_TIMEOUT seconds; else it is rejected

Nothing blocks: bytes are processed as they arrive. A silent, slow or invalid peer therefore never
keeps another node from joining.
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
"""Maximum number of pending connections. One more replaces the oldest."""

CHECK_INTERVAL = 1.0
"""Maximum seconds between two checks for expired handshakes."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _PendingConnection:
    """A connection before joining. It gets a `link` after the handshake."""

    handshake: Handshake
    address: str
    link: Link[FromAgent] | None = None


class JoinListener:
    """Listener for joining nodes. As a context manager it closes itself.

    Args:
        config: uses node_address, node_port and node_token.
        strict: reject nodes with other library versions.

    Attributes:
        port: port of the listener.
        token: token that nodes must know.

    Raises:
        ConfigError: the address or the port is not available, or the token is too short.
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
        """Close the port and all pending connections."""
        for pending in self._pending:
            pending.handshake.socket.close()
        self._pending.clear()
        self._selector.close()
        self._socket.close()

    def log_join_command(self, count: int) -> None:
        """Log the command to run on `count` other nodes."""
        token = "" if self._token_is_given else f"WEFT_NODE_TOKEN={self.token} "
        nodes = "another node" if count == 1 else f"{count} other nodes"
        command = f"{token}weft join {self._name}:{self.port}"
        # A warning, because nothing continues before somebody runs it.
        logger.warning("waiting for %s to run: %s", nodes, command)

    def fileno(self) -> int:
        """Return a descriptor; it is readable when `accept` has something to do."""
        return self._selector.fileno()

    def wait_for(self, count: int, timeout: float | None = None) -> list[JoinedNode]:
        """Wait for `count` nodes; return them in the order of joining, fewer after `timeout`."""
        joined: list[JoinedNode] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            deadline = None if timeout is None else time.monotonic() + timeout
            while len(joined) < count:
                left = CHECK_INTERVAL if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    break
                for key, _ in selector.select(min(left, CHECK_INTERVAL)):
                    if key.data is not None:  # a node sends nothing before it gets a message
                        logger.info("%s has left", key.data.where)
                        selector.unregister(key.fileobj)
                        key.data.link.close()
                        joined.remove(key.data)
                if len(joined) < count and (node := self.accept()) is not None:
                    joined.append(node)
                    selector.register(node.link.socket, selectors.EVENT_READ, node)
        return joined

    def accept(self) -> JoinedNode | None:
        """Process available input and expired handshakes; return a newly joined node."""
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._accept()
                continue
            if key.data not in self._pending:  # replaced by a newer connection
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
            self._reject(pending, "it did not prove in time that it knows --node-token")
        return None

    def _accept(self) -> None:
        try:
            sock, (address, *_) = self._socket.accept()
        except OSError as error:  # the peer has hung up
            logger.warning("a node could not join: %s", error.strerror)
            return
        if len(self._pending) == MAX_PENDING:
            self._reject(self._pending[0], "too many others have connected")
        pending = _PendingConnection(Handshake(sock, self.token), unmapped(address))
        self._pending.append(pending)
        self._selector.register(sock, selectors.EVENT_READ, pending)

    def _receive(self, pending: _PendingConnection) -> JoinedNode | None:
        """Process input from a pending connection; return the node once it has sent its Hello.

        Raises:
            OSError: the peer has hung up, or it may not join.
            msgspec.DecodeError: its message is invalid.
        """
        if pending.link is None:
            if (knows := pending.handshake.advance()) is False:
                raise ConnectionError("it does not know --node-token")
            if knows:  # it is trusted now, so reading whole messages may block
                pending.link = Link(pending.handshake.socket, FromAgent)
            return None
        hello = pending.link.receive()
        if not isinstance(hello, Hello):
            raise ConnectionError("it did not introduce itself")
        wrong = differences(versions(), hello.versions)
        if wrong and self._strict:
            theirs = differences(hello.versions, versions())
            pending.link.send(Refused(f"this node cannot join: {'; '.join(theirs)}"))
            raise ConnectionError(f"{hello.name} cannot join: {'; '.join(wrong)}")
        return JoinedNode(pending.link, hello)

    def _reject(self, pending: _PendingConnection, reason: str) -> None:
        logger.warning("rejected %s: %s", pending.address, reason)
        self._forget(pending)
        pending.handshake.socket.close()

    def _forget(self, pending: _PendingConnection) -> None:
        self._pending.remove(pending)
        self._selector.unregister(pending.handshake.socket)


def _listen(address: str | None, port: int) -> socket.socket:
    """Listen at one address, or at all addresses of this node."""
    where = "" if address is None else f"--node-address {address} "
    try:
        if address is not None:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        reason = str(error.strerror).split(" (")[0]
        raise ConfigError(f"{where}--node-port {port}: {reason}") from None
