"""Room for large bodies: a bound on the memory for all arriving or unread bodies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.errors import RequestError

LARGE = 1 << 15
"""Bytes; smaller bodies always have room, because the number of connections is bounded."""
ROOM = 256 * 1024 * 1024
"""Bytes of all bodies together; eight times the largest body."""


class ArrivingBody:
    """A request's body with its place in the room.

    Attributes:
        chunks: the arrived parts.
        size: their bytes.
    """

    def __init__(self, room: BodyRoom) -> None:
        self.chunks: list[bytes] = []
        self.size = 0
        self._room = room
        self._gave_way = False

    def add(self, chunk: bytes) -> None:
        """Take a part; RequestError (429) if this body must give way to others."""
        if not self._gave_way and self.size + len(chunk) > LARGE:
            self._gave_way = not self._room.make(len(chunk), self)
        if self._gave_way:
            raise RequestError(
                "the body is large, and the bodies of other requests take the memory for it; try "
                "again",
                code="too_many_large_bodies",
                status=429,
                retry_after=1,
            )
        self.chunks.append(chunk)
        self.size += len(chunk)
        self._room.left -= len(chunk)

    def give_way(self) -> None:
        """Free the memory; the next `add` raises."""
        self._room.left += self.size
        self._gave_way = True
        self.chunks.clear()
        self.size = 0


class BodyRoom:
    """The room for one server's bodies.

    If the room is full, the largest arriving body gives way. So a few clients with huge, slow
    bodies cannot keep out the others.

    Args:
        size: bytes.
    """

    def __init__(self, size: int = ROOM) -> None:
        self.left = size
        self._arriving: set[ArrivingBody] = set()

    @contextmanager
    def place(self) -> Iterator[ArrivingBody]:
        """Yield a new body's place, and free it at the end."""
        body = ArrivingBody(self)
        self._arriving.add(body)
        try:
            yield body
        finally:
            self._arriving.discard(body)
            self.left += body.size

    def make(self, size: int, body: ArrivingBody) -> bool:
        """Make room for a body's next part; False if no larger body can give way."""
        while self.left < size:
            largest = max(self._arriving, key=lambda each: each.size)
            if largest.size <= body.size + size:
                return False
            largest.give_way()
        return True

    def arrived(self, body: ArrivingBody) -> None:
        """Keep a complete body until it has been read."""
        self._arriving.discard(body)
