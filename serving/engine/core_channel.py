"""The two sockets between the API process and the engine core, and what makes them private.

One carries messages to the core, one from it. Between processes they are unix
sockets in a directory that only this user may enter; within a process they
are queues of one ZeroMQ context. Messages are msgspec's MessagePack, decoded
into the declared types only: no message can name code.
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

LINGER = 2000  # ms that the core's last messages get to leave
MAX_PATH = 100  # a unix socket's path has at most 107 bytes


def addresses(base: str) -> tuple[str, str]:
    """ZeroMQ addresses to the core and from it. `base` is inproc://NAME or ipc://DIRECTORY."""
    return f"{base}/to-core", f"{base}/from-core"


class CoreChannel:
    """The core's end. As a context manager it tells the front of what makes the core fail."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], base: str) -> None:
        import zmq

        to_core, from_core = addresses(base)
        self._inbox = context.socket(zmq.PULL)
        self._outbox = context.socket(zmq.PUSH)
        # The front reads all the time and merges what its clients leave unread: no limit here.
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._inbox.connect(to_core)
        self._outbox.connect(from_core)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToCore)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with suppress(EngineError):  # nobody to tell
                self.send(Failed.of(error))
        self._inbox.close(linger=0)
        self._outbox.close(linger=LINGER)

    def receive(self, timeout: float) -> list[ToCore]:
        """All messages that have come; waits up to `timeout` seconds for the first one."""
        messages: list[ToCore] = []
        while self._inbox.poll(0 if messages else int(timeout * 1000)):
            messages.append(self._decoder.decode(self._inbox.recv()))
        return messages

    def send(self, message: FromCore) -> None:
        """Send without waiting.

        Raises:
            EngineError: the front's end is gone; ZeroMQ would wait for another one.
        """
        import zmq

        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again as gone:
            raise EngineError("nobody listens to the engine any more") from gone
