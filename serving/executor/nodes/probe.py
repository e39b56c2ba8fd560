"""Probes of the links between nodes: reachability, latency and bandwidth, at ports as ranks use.

One node listens at a free port of its address for a single connection. The other one connects,
sends some bytes back and forth, then sends as much as it can for a while. First it sends a ticket,
random bytes from the controller: another program there would not echo them. Like the traffic
between ranks, all this is plain TCP.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import permutations
from typing import Protocol

from weft.serving.config.slices import HERE
from weft.serving.executor.child_process import read
from weft.serving.executor.nodes.messages import LinkSpeed, Listen, Listening, Probe, Unreachable
from weft.serving.executor.nodes.remote import JoinedNode

WAIT = 5.0
"""Seconds for the other side to connect, and to answer."""

CHUNK = 1 << 20
PINGS = 20
TICKET = 32


def listen(address: str) -> tuple[socket.socket, Listening]:
    """Open a socket for one connection; return it with its port and ticket."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    listener.settimeout(WAIT)
    return listener, Listening(listener.getsockname()[1], secrets.token_bytes(TICKET))


def answer_probe(listener: socket.socket, ticket: bytes) -> None:
    """Let one other node, with the ticket, measure the link to this one."""
    with closing(listener):
        try:
            sock, _ = listener.accept()
        except OSError:
            return  # the other node reports the reason
    with sock:
        sock.settimeout(WAIT)
        if not hmac.compare_digest(read(sock, TICKET), ticket):
            return
        sock.sendall(ticket)
        for _ in range(PINGS):
            if not (ping := read(sock, 1)):
                return
            sock.sendall(ping)
        while sock.recv(CHUNK):
            pass
        sock.sendall(b"\0")


def probe_link(address: str, port: int, ticket: bytes, seconds: float) -> LinkSpeed | Unreachable:
    """Measure the link to a listening node.

    Args:
        address, port, ticket: where it listens, and its ticket.
        seconds: how long to send data.
    """
    try:
        with socket.create_connection((address, port), WAIT) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(ticket)
            if read(sock, TICKET) != ticket:
                raise ConnectionError("another program answers there")
            times = []
            for _ in range(PINGS):
                begin = time.perf_counter()
                sock.sendall(b"\0")
                if not read(sock, 1):
                    raise ConnectionError("it has hung up")
                times.append(time.perf_counter() - begin)
            begin, sent = time.perf_counter(), 0
            chunk = bytes(CHUNK)
            while time.perf_counter() - begin < seconds:
                sock.sendall(chunk)
                sent += CHUNK
            sock.shutdown(socket.SHUT_WR)
            if not read(sock, 1):
                raise ConnectionError("it has hung up")
            bandwidth = sent / (time.perf_counter() - begin)
    except OSError as error:
        return Unreachable(str(error.strerror or error))
    return LinkSpeed(sorted(times)[PINGS // 2], bandwidth)


class _Endpoint(Protocol):
    """One end of a link.

    Attributes:
        where: name and address of the node.
        address: address to listen at.
    """

    where: str
    address: str

    def listen(self) -> Listening | Unreachable:
        """Wait for one connection in the background; return the port and the ticket."""

    def probe(self, address: str, listening: Listening, seconds: float) -> LinkSpeed | Unreachable:
        """See `probe_link`."""


class _LocalEndpoint:
    where = HERE

    def __init__(self, address: str) -> None:
        self.address = address

    def listen(self) -> Listening | Unreachable:
        try:
            listener, listening = listen(self.address)
        except OSError as error:
            return Unreachable(str(error.strerror))
        arguments = (listener, listening.ticket)
        threading.Thread(target=answer_probe, args=arguments, daemon=True).start()
        return listening

    def probe(self, address: str, listening: Listening, seconds: float) -> LinkSpeed | Unreachable:
        return probe_link(address, listening.port, listening.ticket, seconds)


class _RemoteEndpoint:
    def __init__(self, joined: JoinedNode) -> None:
        self.where, self.address = joined.where, joined.hello.address
        self._link = joined.link

    def listen(self) -> Listening | Unreachable:
        match self._ask(Listen(), WAIT):
            case Listening() | Unreachable() as answer:
                return answer
        return Unreachable("it does not answer")

    def probe(self, address: str, listening: Listening, seconds: float) -> LinkSpeed | Unreachable:
        question = Probe(address, listening.port, listening.ticket, seconds)
        match self._ask(question, 4 * WAIT + seconds):
            case LinkSpeed() | Unreachable() as result:
                return result
        return Unreachable("it does not answer")

    def _ask(self, question: object, timeout: float) -> object:
        try:
            self._link.send(question)
        except OSError as error:
            return Unreachable(str(error.strerror or error))
        return self._link.wait(timeout)


def measure_links(
    own: str | None, others: list[JoinedNode], seconds: float
) -> Iterator[tuple[str, str, LinkSpeed | Unreachable]]:
    """Measure the links between all nodes, in both directions: source, target and result.

    Args:
        own: this node's address; None if it has no ranks.
        others: the other nodes.
        seconds: how long to send data over each link.
    """
    ends: list[_Endpoint] = [_RemoteEndpoint(joined) for joined in others]
    if own is not None:
        ends.insert(0, _LocalEndpoint(own))
    for source, target in permutations(ends, 2):
        listening = target.listen()
        if isinstance(listening, Unreachable):
            yield source.where, target.where, listening
        else:
            yield source.where, target.where, source.probe(target.address, listening, seconds)
