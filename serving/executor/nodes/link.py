"""Authenticated TCP connections between the nodes of one model.

Messages are MessagePack in declared types, each preceded by its length in 8 bytes. Before the first
message both sides prove that they know the group's token. The token itself is never sent:

    listener                                joining node
    MAGIC, nonce a                  ──►
                                    ◄──     nonce b, HMAC(token, "join" a b)
    HMAC(token, "listen" a b)       ──►

(HMAC with SHA-256, FIPS 198-1.) The messages are neither encrypted nor signed, and neither is the
traffic between ranks. Use a network that outsiders cannot reach.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import select
import socket
import time
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from weft.errors import ConfigError

PROTOCOL = b"weft-join-"
MAGIC = PROTOCOL + b"3\n"
"""Protocol version. Increase it if messages change that nodes exchange before `Hello.versions`."""

NONCE = 32
PROOF = 32
REJECTION = bytes(PROOF)
"""Answer to a wrong proof, in place of the listener's own proof."""

HANDSHAKE_TIMEOUT = 5.0
"""Seconds for the other side to prove that it knows the token and to introduce itself."""

MAX_PATIENCE = 100_000.0
"""Maximum patience in seconds. A quarter of it fits TCP's limit for keepalive times, 32,767."""

PATIENCE = 30.0
"""Seconds without a sign of life from the other node until a connection counts as lost."""

TOKEN_LENGTH = 16
"""Minimum characters in a token. Whoever sees a proof can test guesses against it."""

Message = TypeVar("Message")


class Link(Generic[Message]):
    """One end of an authenticated connection.

    TCP keepalive detects a node that vanishes without closing the connection.

    Args:
        sock: the connection.
        receives: type of the received messages.

    Attributes:
        socket: becomes readable when there is something to receive.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self.socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(receives)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_patience(PATIENCE)

    def set_patience(self, seconds: float) -> None:
        """Set the seconds without a sign of life until the connection counts as lost."""
        tcp = socket.IPPROTO_TCP
        seconds = min(seconds, MAX_PATIENCE)
        probe = max(1, round(seconds / 4))
        self.socket.settimeout(seconds)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.socket.setsockopt(tcp, socket.TCP_KEEPIDLE, probe)
        self.socket.setsockopt(tcp, socket.TCP_KEEPINTVL, probe)
        self.socket.setsockopt(tcp, socket.TCP_USER_TIMEOUT, round(1000 * seconds))

    @property
    def own_address(self) -> str:
        """This node's address, as used by the other node."""
        return unmapped(self.socket.getsockname()[0])

    @property
    def address(self) -> str:
        """The other node's address, as seen from here."""
        return unmapped(self.socket.getpeername()[0])

    @property
    def has_input(self) -> bool:
        """True if a message, or the end of the connection, can be received now."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return bool(poll.poll(0))

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: the connection is lost.
        """
        data = self._encoder.encode(message)
        self.socket.sendall(len(data).to_bytes(8, "little") + data)

    def receive(self) -> Message | None:
        """Receive a message whose first byte has arrived; None if the connection has ended.

        Raises:
            msgspec.DecodeError: the message has none of the declared types.
        """
        header = read(self.socket, 8)
        data = read(self.socket, int.from_bytes(header, "little")) if header else b""
        return self._decoder.decode(data) if data else None

    def wait(self, timeout: float | None = None) -> Message | None:
        """Wait for a message and receive it; None after `timeout` seconds without one."""
        patience = self.socket.gettimeout()
        self.socket.settimeout(timeout)
        try:
            self.socket.recv(1, socket.MSG_PEEK)
        except OSError:
            return None
        finally:
            self.socket.settimeout(patience)
        return self.receive()

    def shut(self) -> None:
        """End the connection. Blocked reads and writes return on both sides."""
        with suppress(OSError):  # it has already ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()


def check_token(token: str | None) -> None:
    """Raise ConfigError for a token that could be guessed."""
    if token is not None and len(token) < TOKEN_LENGTH:
        raise ConfigError(
            f"--node-token has {len(token)} characters; it must have at least {TOKEN_LENGTH}"
        )


def check_address(address: str | None) -> None:
    """Raise ConfigError for anything but an IP address; host names are not accepted."""
    with suppress(ValueError):
        if address is not None:
            ipaddress.ip_address(address)
        return
    raise ConfigError(f"--node-address is {address!r}; it must be an IP address of this node")


def read(sock: socket.socket, count: int) -> bytes:
    """Read exactly `count` bytes; return b"" if the connection ends or times out first."""
    parts: list[bytes] = []
    while count:
        try:
            part = sock.recv(min(count, 1 << 20))
        except OSError:  # reset, timed out, no route
            part = b""
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Handshake:
    """The listener's side of the handshake on a new connection, without blocking.

    Args:
        sock: the connection; it becomes non-blocking.
        token: the group's token.

    Attributes:
        socket: becomes readable when `advance` has something to do.
        deadline: end of the handshake, by time.monotonic().
    """

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self._token = token
        self._nonce = secrets.token_bytes(NONCE)
        self._received = b""
        sock.setblocking(False)
        with suppress(OSError):  # the peer has hung up; `advance` will notice
            sock.sendall(MAGIC + self._nonce)

    def advance(self) -> bool | None:
        """Read available bytes; return whether the peer knows the token, None while incomplete.

        Raises:
            OSError: the peer has hung up.
        """
        try:
            part = self.socket.recv(NONCE + PROOF - len(self._received))
        except BlockingIOError:
            return None
        if not part:
            raise ConnectionError("it has hung up")
        self._received += part
        if len(self._received) < NONCE + PROOF:
            return None
        theirs, proof = self._received[:NONCE], self._received[NONCE:]
        knows = hmac.compare_digest(proof, _proof(self._token, b"join", self._nonce, theirs))
        answer = _proof(self._token, b"listen", self._nonce, theirs) if knows else REJECTION
        self.socket.sendall(answer)
        return knows


def verify_peer(sock: socket.socket, token: str) -> bool:
    """Complete the handshake as the listener; return whether the peer knows the token."""
    handshake = Handshake(sock, token)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    with suppress(OSError):
        while (left := handshake.deadline - time.monotonic()) > 0:
            if poll.poll(1000 * left) and (knows := handshake.advance()) is not None:
                return knows
    return False


def prove_token(sock: socket.socket, token: str) -> None:
    """Complete the handshake as the joining node, and check the listener's proof.

    Raises:
        OSError: the listener does not answer.
        ConfigError: the listener is not weft, or it has another token.
    """
    sock.settimeout(HANDSHAKE_TIMEOUT)
    magic = read(sock, len(MAGIC))
    if not magic:
        raise ConnectionError("it has hung up")
    if not magic.startswith(PROTOCOL):
        raise ConfigError("the server there is not `weft` waiting for nodes")
    if magic != MAGIC:
        raise ConfigError(
            f"weft there speaks {_name(magic)}, and here {_name(MAGIC)}: install the same version "
            "on both nodes"
        )
    theirs, ours = read(sock, NONCE), secrets.token_bytes(NONCE)
    sock.sendall(ours + _proof(token, b"join", theirs, ours))
    proof = read(sock, PROOF)
    if not proof:
        raise ConnectionError("it has hung up")
    if not hmac.compare_digest(proof, _proof(token, b"listen", theirs, ours)):
        raise ConfigError("--node-token is not the token of that server")


def _proof(token: str, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + b"".join(nonces), "sha256")


def _name(magic: bytes) -> str:
    return magic.decode(errors="replace").strip()


def unmapped(address: str) -> str:
    """Convert an IPv4-mapped IPv6 address to plain IPv4; return others unchanged."""
    return address.removeprefix("::ffff:")
