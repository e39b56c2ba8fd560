"""The port where other nodes join; anybody on the network may connect to it.

    connects ──► proves knowledge of the token ──► sends Knock ──► gets Welcome, with a port
    connects to that port                       ──► sends Hello ──► JoinedNode

Each line must be done within HANDSHAKE_TIMEOUT seconds; else the connection is rejected. ZeroMQ
does the handshakes in a separate thread. A silent, slow or invalid peer therefore never keeps
another node from joining. Too many connections end the oldest, so descriptors never run out.
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import ceil
from typing import Self

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from weft.errors import ConfigError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.nodes.curve import (
    HANDSHAKE_TIMEOUT,
    Context,
    authenticate,
    check_curve,
    derive_keys,
    make_socket,
    read_token,
    use_as_head,
)
from weft.serving.executor.nodes.link import LINGER, PATIENCE, Link, endpoint, port_of
from weft.serving.executor.nodes.messages import (
    FromAgent,
    Hello,
    Knock,
    Refused,
    Welcome,
    differences,
    versions,
)
from weft.serving.executor.nodes.remote import JoinedNode

MAX_KNOCK = 1 << 16
"""Maximum bytes in a message to the join port."""

MAX_STRANGERS = 256
"""Maximum connections that have not sent their Knock; one more ends the oldest."""

CHECK_INTERVAL = 1.0
"""Maximum seconds between two checks for expired connections."""

_knock = msgspec.msgpack.Decoder(Knock)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _PendingNode:
    """A node with the token, from its `Knock` to its `Hello`."""

    link: Link[FromAgent]
    knock: Knock
    deadline: float


class JoinListener:
    """Listener for joining nodes. As a context manager it closes itself.

    Args:
        context: owner of all sockets, for one listener. The nodes' connections outlive the
            listener.
        config: uses node_address, node_port, node_token and node_token_file.
        strict: reject nodes with other library versions.
        patience: seconds without a sign of life from a node until its connection counts as lost.

    Attributes:
        port: the listener's port.
        token: the nodes' token.

    Raises:
        ConfigError: the address or the port is not available, the token is too short, or libzmq
            has no CURVE.
    """

    def __init__(
        self,
        context: Context,
        config: EngineConfig,
        *,
        strict: bool = True,
        patience: float = PATIENCE,
    ) -> None:
        check_curve()
        self._strict, self._patience, self._address = strict, patience, config.node_address
        given = read_token(config)
        self._token_file = config.node_token_file
        self._token_is_given = given is not None
        self.token = given or secrets.token_urlsafe(24)
        self._keys = derive_keys(self.token)
        self._name = config.node_address or socket.gethostname()
        self._context = context
        self._socket = make_socket(context, zmq.ROUTER, patience)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_KNOCK)
        use_as_head(self._socket, self._keys)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        )
        self._authenticator = authenticate(context, self._keys)
        self._strangers: dict[int, None] = {}  # descriptors for connections before their Knock
        self._failures = 0  # logged failures with an open connection
        self._pending: list[_PendingNode] = []
        try:
            self._socket.bind(endpoint(config.node_address or "*", config.node_port))
        except zmq.ZMQError as error:
            self.close()
            where = "" if config.node_address is None else f"--node-address {config.node_address} "
            reason = str(error.strerror).split(" (")[0]
            raise ConfigError(f"{where}--node-port {config.node_port}: {reason}") from None
        self.port = port_of(self._socket)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the port and all pending connections."""
        for pending in self._pending:
            pending.link.close(0)
        self._pending.clear()
        self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER)

    def log_join_command(self, count: int) -> None:
        """Log the command to run on `count` other nodes."""
        token = "" if self._token_is_given else f"WEFT_NODE_TOKEN={self.token} "
        nodes = "another node" if count == 1 else f"{count} other nodes"
        file = "" if self._token_file is None else f" --node-token-file {self._token_file}"
        command = f"{token}weft join {self._name}:{self.port}{file}"
        # A warning, because nothing continues before somebody runs it.
        logger.warning("waiting for %s to run: %s", nodes, command)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """All sockets; one is readable when `accept` has something to do."""
        links = [each for pending in self._pending for each in pending.link.sockets]
        return [self._socket, self._monitor, *links]

    def wait_for(self, count: int, timeout: float | None = None) -> list[JoinedNode]:
        """Wait for `count` nodes; return them in the order of joining, fewer after `timeout`."""
        joined: list[JoinedNode] = []
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(joined) < count:
            left = CHECK_INTERVAL if deadline is None else deadline - time.monotonic()
            if left <= 0:
                break
            poller = zmq.Poller()
            for each in (*self.sockets, *(each for node in joined for each in node.link.sockets)):
                poller.register(each, zmq.POLLIN)
            poller.poll(ceil(1000 * min(left, CHECK_INTERVAL)))
            for node in [*joined]:
                if has_left(node):
                    logger.debug("%s has hung up", node.where)
                    node.link.close(0)
                    joined.remove(node)
            while len(joined) < count and (new := self.accept()) is not None:
                joined.append(new)
        return joined

    def accept(self) -> JoinedNode | None:
        """Process available input and expired connections; return a newly joined node."""
        while self._socket.poll(0):
            self._answer()
        self._read_monitor()
        now = time.monotonic()
        for pending in [*self._pending]:
            try:
                hello = pending.link.receive()
            except msgspec.DecodeError as error:
                self._reject(pending, str(error))
                continue
            if isinstance(hello, Hello):
                self._pending.remove(pending)
                joined = JoinedNode(pending.link, hello, pending.knock.versions)
                logger.debug("%s has connected", joined.where)
                return joined
            if hello is not None or pending.link.has_ended or pending.deadline < now:
                self._reject(pending, "it did not introduce itself in time")
        return None

    def _answer(self) -> None:
        """Answer a message from a peer with the token."""
        peer, frame, *_ = self._socket.recv_multipart(copy=False)
        self._read_monitor()  # knows this connection by now
        self._strangers.pop(int(frame.get(zmq.SRCFD)), None)
        try:
            knock = _knock.decode(frame.bytes)
        except msgspec.DecodeError as error:
            logger.warning("rejected a node: %s", error)
            return
        wrong = differences(versions(), knock.versions)
        reply: Refused | Welcome
        if wrong and self._strict:
            logger.warning("rejected a node: %s cannot join: %s", knock.name, "; ".join(wrong))
            theirs = "; ".join(differences(knock.versions, versions()))
            reply = Refused(f"this node cannot join: {theirs}")
        else:
            link: Link[FromAgent]
            try:
                link, port = Link.listen(
                    self._context, self._address, self._keys, FromAgent, self._patience
                )
            except zmq.ZMQError as error:  # too many open files; the node will try again
                logger.warning("%s could not join: %s", knock.name, error.strerror)
                return
            deadline = time.monotonic() + HANDSHAKE_TIMEOUT
            self._pending.append(_PendingNode(link, knock, deadline))
            reply = Welcome(port, self._patience)
        self._socket.send_multipart([peer.bytes, msgspec.msgpack.encode(reply)])

    def _read_monitor(self) -> None:
        """Log rejected connections. ZeroMQ does not tell their addresses."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)
            value = event["value"]
            match event["event"]:
                case zmq.EVENT_ACCEPTED:
                    self._strangers[value] = None
                    self._make_room()
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._log_failure("it does not know --node-token")
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if value == errno.EAGAIN:
                    self._log_failure("it did not prove in time that it knows --node-token")
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._log_failure("it has hung up")
                case zmq.EVENT_DISCONNECTED if value in self._strangers:
                    del self._strangers[value]
                    if not self._failures:  # the first bytes were no handshake
                        self._log_failure("it is not from `weft join`")
                    self._failures -= 1

    def _make_room(self) -> None:
        """End the oldest connection that may stay no longer; it counts until ZeroMQ drops it."""
        surplus = len(self._strangers) - MAX_STRANGERS
        if surplus <= 0:
            return
        descriptor = next(islice(self._strangers, surplus - 1, None))
        logger.warning("ended a connection: over %d have not joined yet", MAX_STRANGERS)
        with (
            suppress(OSError),  # it has ended
            socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as stranger,
        ):
            if stranger.getsockname()[1] == self.port:  # else another file has its number now
                stranger.shutdown(socket.SHUT_RDWR)

    def _log_failure(self, reason: str) -> None:
        self._failures += 1
        logger.warning("rejected a connection: %s", reason)

    def _reject(self, pending: _PendingNode, reason: str) -> None:
        logger.warning("rejected %s: %s", pending.knock.name, reason)
        self._pending.remove(pending)
        pending.link.close(0)


def has_left(node: JoinedNode) -> bool:
    """Return whether the connection to an idle node has ended; drops its messages."""
    while node.link.receive() is not None:
        pass
    return node.link.has_ended
