"""Connections between one model's nodes.

    joining node                          controller
    Knock                ──► join port    compares versions (join_listener.py)
                         ◄── join port    Welcome(port): opens a port for this node alone
    Hello                ──► that port
    further messages     ◄─► that port

Each `Link` has its own ZeroMQ socket, with CURVE (curve.py). So closing it ends one connection.
Messages are MessagePack in declared types. ZeroMQ queues at most 1,000 messages on each side.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from math import ceil
from typing import Any, Generic, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from weft.errors import ConfigError
from weft.serving.executor.nodes.curve import (
    HANDSHAKE_TIMEOUT,
    Context,
    Keys,
    make_socket,
    use_as_head,
    use_as_node,
)

PATIENCE = 30.0
"""Seconds without a sign of life from the other node until a connection counts as lost."""

CONNECT_TIMEOUT = 5.0
"""Seconds for the other side to accept a connection."""

LINGER = 1000
"""Maximum milliseconds for the last messages to leave when a connection is closed."""

DIAL_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

ENDED = "its connection has ended"

Message = TypeVar("Message")


class HandshakeError(ConnectionError):
    """A handshake ended by the other side: it has another token, or it is going away."""


class Link(Generic[Message]):
    """One end of an encrypted connection.

    Args:
        context: owner of the socket.
        kind: the ZeroMQ socket's type.
        receives: type of the received messages.
        patience: silent seconds until the connection counts as lost.
        events: events for ZeroMQ to report.

    Attributes:
        sockets: one is readable when there is something to receive.
        has_ended: True if nothing more can be received.
        own_address: this node's address, as used by the other node.
    """

    def __init__(
        self, context: Context, kind: int, receives: Any, patience: float, events: int
    ) -> None:
        self._socket = make_socket(context, kind, patience)
        self._monitor = self._socket.get_monitor_socket(events)
        self.sockets = (self._socket, self._monitor)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(receives)
        self.has_ended = False
        self.own_address = ""
        self._descriptor: int | None = None  # the TCP connection's, once the other node is known

    @classmethod
    def listen(
        cls, context: Context, address: str | None, keys: Keys, receives: Any, patience: float
    ) -> tuple[Self, int]:
        """Wait for one node at a free port; return the link and the port.

        The port stays open, because closing it would end the connection. It admits no second node.

        Args:
            address: address to listen at; None means all addresses.
            keys: the group's keys.

        Raises:
            zmq.ZMQError: there are too many sockets.
        """
        link = cls(context, zmq.PAIR, receives, patience, zmq.EVENT_DISCONNECTED)
        try:
            use_as_head(link._socket, keys)
            link._socket.bind(endpoint(address or "*", 0))
        except BaseException:
            link.close(0)
            raise
        return link, port_of(link._socket)

    @classmethod
    def dial(
        cls,
        context: Context,
        kind: int,
        host: str,
        port: int,
        keys: Keys,
        receives: Any,
        patience: float = PATIENCE,
    ) -> Self:
        """Connect to a listening node, and complete the handshake.

        Raises:
            OSError: nobody answers there. HandshakeError: the listener has ended the handshake.
            ConfigError: the listener is not weft, or it has another token.
        """
        failure: OSError | None = None
        for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            numeric, _ = socket.getnameinfo(address, socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
            link = cls(context, kind, receives, patience, DIAL_EVENTS)
            try:
                use_as_node(link._socket, keys)
                link._socket.connect(endpoint(numeric, port))
                link._shake_hands()
                return link
            except OSError as error:
                link.close(0)
                failure = error
            except BaseException:
                link.close(0)
                raise
        assert failure is not None  # getaddrinfo returns at least one address
        raise failure

    def _shake_hands(self) -> None:
        descriptor, deadline = -1, time.monotonic() + CONNECT_TIMEOUT + HANDSHAKE_TIMEOUT
        while (left := deadline - time.monotonic()) > 0 and self._monitor.poll(ceil(1000 * left)):
            event = recv_monitor_message(self._monitor)
            match event["event"]:
                case zmq.EVENT_CONNECTED:
                    descriptor = event["value"]
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._establish(descriptor)
                    return
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if event["value"] == errno.EAGAIN:
                    break
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    raise HandshakeError(0, "it has ended the handshake")
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise ConfigError("--node-token is not the token of that server")
                case zmq.EVENT_DISCONNECTED:  # the first bytes were no handshake
                    raise ConfigError("the server there is not this version of weft with --nodes")
                case zmq.EVENT_CLOSED:
                    raise ConnectionError(0, "nothing accepts connections there")
        raise TimeoutError(0, "it does not answer")

    def _establish(self, descriptor: int) -> None:
        """Note the TCP connection.

        Raises:
            OSError: it has ended.
        """
        with socket.socket(fileno=os.dup(descriptor)) as own:
            self.own_address = unmapped(own.getsockname()[0])
        self._descriptor = descriptor

    def send(self, message: object) -> None:
        """Send a message without waiting.

        Raises:
            OSError: the connection has ended, or too many messages wait for the other node.
        """
        if self._socket.closed or self.has_ended:  # ZeroMQ may take messages for an ended one
            raise ConnectionError(0, ENDED)
        try:
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            reason = ENDED if self._has_event() else "it does not read its messages"
            raise ConnectionError(0, reason) from None

    def _has_event(self) -> bool:
        return bool(int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN)  # faster than poll

    def receive(self) -> Message | None:
        """Receive a message if there is one; else return None, and bring `has_ended` up to date.

        Raises:
            msgspec.DecodeError: the message has none of the declared types.
        """
        has_event = self._has_event()  # if it is the end, all messages have come already
        try:
            if self._descriptor is not None:
                return self._decoder.decode(self._socket.recv(zmq.NOBLOCK))
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if has_event:
                event = recv_monitor_message(self._monitor)
                ended = event["event"] == zmq.EVENT_DISCONNECTED
                # Others may have tried to connect to the same port, and failed.
                self.has_ended = ended and event["value"] == self._descriptor
            return None
        try:
            self._establish(int(frame.get(zmq.SRCFD)))
        except OSError:
            self.has_ended = True
            return None
        return self._decoder.decode(frame.bytes)

    def wait(
        self, timeout: float | None = None, interrupts: Sequence[socket.socket] = ()
    ) -> Message | None:
        """Wait for a message and receive it.

        Returns None at the connection's end, after `timeout` seconds, or if any of `interrupts` is
        readable.
        """
        poller = zmq.Poller()
        for each in (*self.sockets, *interrupts):
            poller.register(each, zmq.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (message := self.receive()) is None and not self.has_ended:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                break
            events = poller.poll(None if left is None else ceil(1000 * left))
            if any(each not in self.sockets for each, _ in events):
                break
        return message

    def close(self, linger: int = LINGER) -> None:
        """End the connection. Sent messages have `linger` ms to leave, in the background."""
        if self._socket.closed:
            return
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger)


def check_address(address: str | None) -> None:
    """Raise ConfigError for anything but an IP address; host names are not accepted."""
    with suppress(ValueError):
        if address is not None:
            ipaddress.ip_address(address)
        return
    raise ConfigError(f"--node-address is {address!r}; it must be an IP address of this node")


def endpoint(address: str, port: int) -> str:
    """Build a ZeroMQ endpoint; port 0 means a free one."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def port_of(bound: zmq.Socket[bytes]) -> int:
    """Return a bound socket's port."""
    return int(bound.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])


def unmapped(address: str) -> str:
    """Convert an IPv4-mapped IPv6 address to plain IPv4; return others unchanged."""
    return address.removeprefix("::ffff:")
