"""A cache of what was used last, bounded by the sizes of what is in it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Two of these that are told the same hold the same.

    Args:
        room: that sizes may take in all; what was put in last stays, however large.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._taken = 0

    def get(self, key: Hashable) -> Value | None:
        """What was put in, which counts as used; None if it is no more there."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Put it in the place of what has the same key, and drop what was not used for longest."""
        if key in self._entries:
            self._taken -= self._entries.pop(key)[1]
        self._entries[key] = value, size
        self._taken += size
        while self._taken > self._room and len(self._entries) > 1:
            self._taken -= self._entries.popitem(last=False)[1][1]
