"""A connection between two nodes that serve one model.

Messages are MessagePack in declared types, each behind its length in 8 bytes. Before the first
one each side proves that it knows the group's token, which itself is never sent:

    head                                    node that joins
    MAGIC, nonce a                  ──►
                                    ◄──     nonce b, HMAC(token, "join" a b)
    HMAC(token, "head" a b)         ──►

(HMAC with SHA-256, FIPS 198-1.) What follows is neither encrypted nor signed, as little as what
ranks tell each other: it is for a network that others cannot reach.
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
"""To be raised with every change of what nodes tell each other before they compare versions."""

NONCE = 32
PROOF = 32
REJECTION = bytes(PROOF)
"""Instead of a proof, to who has shown a wrong one."""

HANDSHAKE_TIMEOUT = 5.0
"""Seconds that the other side gets to prove itself, and to say what it is."""

MAX_PATIENCE = 100_000.0
"""Seconds; a quarter of them is less than the most that TCP takes for a probe, 32,767."""

PATIENCE = 30.0
"""Seconds without any sign of life of the other node, until a connection is lost."""

TOKEN_LENGTH = 16
"""Characters of a token, at least: who sees a proof can try guesses against it."""

Message = TypeVar("Message")


class Link(Generic[Message]):
    """One end of a connection that has been authenticated.

    A node that vanishes is noticed by the kernel: it probes a connection that is silent.

    Args:
        sock: the connection.
        receives: type of the messages that come.

    Attributes:
        socket: can be read when there is something to receive.
    """

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        self.socket = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(receives)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_patience(PATIENCE)

    def set_patience(self, seconds: float) -> None:
        """After how long without a sign of life the connection is lost."""
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
        """This node's, at which the other one has it."""
        return unmapped(self.socket.getsockname()[0])

    @property
    def address(self) -> str:
        """The other node's, as seen from here."""
        return unmapped(self.socket.getpeername()[0])

    @property
    def has_come(self) -> bool:
        """Whether there is something to receive, if only that the connection has ended."""
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
        """The next message, when it has begun to come; None if the connection has ended.

        Raises:
            msgspec.DecodeError: it is none of the declared ones.
        """
        header = read(self.socket, 8)
        data = read(self.socket, int.from_bytes(header, "little")) if header else b""
        return self._decoder.decode(data) if data else None

    def wait(self, timeout: float | None = None) -> Message | None:
        """As `receive`, and waits for a message to begin; None also if none comes in time."""
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
        """End the connection; whoever reads or writes here or there is told."""
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()


def check_token(token: str | None) -> None:
    """Refuse a token that could be guessed; ConfigError."""
    if token is not None and len(token) < TOKEN_LENGTH:
        raise ConfigError(
            f"--node-token has {len(token)} characters; it must have at least {TOKEN_LENGTH}"
        )


def check_address(address: str | None) -> None:
    """Refuse what is no address, a name above all; ConfigError."""
    with suppress(ValueError):
        if address is not None:
            ipaddress.ip_address(address)
        return
    raise ConfigError(f"--node-address is {address!r}; it must be an IP address of this node")


def read(sock: socket.socket, count: int) -> bytes:
    """So many bytes, or none if they will not come."""
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
    """Who has connected to the head, until it has proved that it knows the token.

    Nobody waits for it: it has until `deadline`, and what it has said by then is taken in as it
    comes.

    Args:
        sock: the connection, which from now on does not block.
        token: the group's.

    Attributes:
        socket: can be read when there is something to take in.
        deadline: by time.monotonic().
    """

    def __init__(self, sock: socket.socket, token: str) -> None:
        self.socket = sock
        self.deadline = time.monotonic() + HANDSHAKE_TIMEOUT
        self._token = token
        self._nonce = secrets.token_bytes(NONCE)
        self._received = b""
        sock.setblocking(False)
        with suppress(OSError):  # it has hung up, as is seen next
            sock.sendall(MAGIC + self._nonce)

    def advance(self) -> bool | None:
        """Take in what has come; None while that is not all.

        Raises:
            OSError: it has hung up.
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
        self.socket.sendall(
            _proof(self._token, b"listen", self._nonce, theirs) if knows else REJECTION
        )
        return knows


def verify_peer(sock: socket.socket, token: str) -> bool:
    """Head: wait until who has connected has shown whether it knows the token."""
    handshake = Handshake(sock, token)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    with suppress(OSError):
        while (left := handshake.deadline - time.monotonic()) > 0:
            if poll.poll(1000 * left) and (knows := handshake.advance()) is not None:
                return knows
    return False


def prove_token(sock: socket.socket, token: str) -> None:
    """Node that joins: prove to the head that the token is known, and have it do so.

    Raises:
        OSError: it does not answer.
        ConfigError: it is no weft, or has another token.
    """
    sock.settimeout(HANDSHAKE_TIMEOUT)
    magic = read(sock, len(MAGIC))
    if not magic:
        raise ConnectionError("it has hung up")
    if not magic.startswith(PROTOCOL):
        raise ConfigError("what listens there is not `weft` that waits for nodes")
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
        raise ConfigError("--node-token is not the one that is in force there")


def _proof(token: str, side: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), side + b"".join(nonces), "sha256")


def _name(magic: bytes) -> str:
    return magic.decode(errors="replace").strip()


def unmapped(address: str) -> str:
    """An IPv4 address that a socket for both families shows as IPv6, as such."""
    return address.removeprefix("::ffff:")
