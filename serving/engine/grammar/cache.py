"""A cache for the most recently used entries, with a bound on their total size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """A cache for the most recently used entries, bounded by their total size.

    Two caches with the same calls have the same entries.

    Args:
        room: maximum total size. The newest entry stays even if it is larger.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable) -> Value | None:
        """Return an entry's value and count it as used; None if there is no such entry."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Add or replace an entry, and drop the least recently used ones if room is short."""
        if key in self._entries:
            self._size -= self._entries.pop(key)[1]
        self._entries[key] = value, size
        self._size += size
        while self._size > self._room and len(self._entries) > 1:
            self._size -= self._entries.popitem(last=False)[1][1]
