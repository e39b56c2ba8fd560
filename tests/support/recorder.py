"""A TCP proxy that records both directions, as an eavesdropper on the network would."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class Recorder:
    """Proxy for one connection to a local port.

    Attributes:
        port: the proxy's port.
        sent: recorded bytes from the client.
        answered: recorded bytes to the client.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.sent, self.answered = bytearray(), bytearray()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError):  # nobody has connected
            client, _ = self._listener.accept()
            with client, socket.create_connection(("127.0.0.1", self._target)) as server:
                back = threading.Thread(target=_pass, args=(server, client, self.answered))
                back.start()
                _pass(client, server, self.sent)
                back.join()

    def close(self) -> None:
        """Stop listening, and wait for the connection's end."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(60)
        self._listener.close()


def _pass(source: socket.socket, target: socket.socket, record: bytearray) -> None:
    with suppress(OSError):  # one side has ended
        while data := source.recv(1 << 16):
            record += data
            target.sendall(data)
    for each in (source, target):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


@contextmanager
def recorder(target: int) -> Iterator[Recorder]:
    """Record one connection to a local port."""
    made = Recorder(target)
    try:
        yield made
    finally:
        made.close()
