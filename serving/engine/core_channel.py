"""The two private sockets between the API process and the engine core.

One socket carries messages to the core, the other one from it. Between processes they are unix
sockets in a directory that only this user may enter. Within a process they are queues of one
ZeroMQ context. Messages are MessagePack, and msgspec decodes them into the declared types only, so
no message can name code.
"""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from weft.errors import EngineError
from weft.serving.engine.protocol import FromCore, ToCore
from weft.serving.executor.child_process import Failed

if TYPE_CHECKING:
    import zmq

LINGER = 2000  # ms for the core's last messages to leave
MAX_PATH = 100  # a unix socket's path may have 107 bytes

_decoder = msgspec.msgpack.Decoder(ToCore)


def addresses(base: str) -> tuple[str, str]:
    """Return the addresses of the sockets to the core and from it.

    Args:
        base: inproc://NAME or ipc://DIRECTORY.
    """
    return f"{base}/to-core", f"{base}/from-core"


class CoreChannel:
    """The core's end. As a context manager it reports errors to the other end."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], base: str) -> None:
        import zmq

        to_core, from_core = addresses(base)
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        # No limit: the API process always reads, and merges outputs for slow clients.
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._inbox.connect(to_core)
        self._outbox.connect(from_core)
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with suppress(EngineError):  # the other end is gone
                self.send(Failed.of(error))
        self._inbox.close(linger=0)
        self._outbox.close(linger=LINGER)

    def receive(self, timeout: float) -> list[ToCore]:
        """Return all messages that have arrived; waits up to `timeout` seconds for the first."""
        messages: list[ToCore] = []
        while self._inbox.poll(0 if messages else int(timeout * 1000)):
            messages.append(_decoder.decode(self._inbox.recv()))
        return messages

    def send(self, message: FromCore) -> None:
        """Send without waiting.

        Raises:
            EngineError: the other end is gone; ZeroMQ would wait for a new one.
        """
        import zmq

        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as gone:
            raise EngineError("the API process no longer listens to the engine") from gone
