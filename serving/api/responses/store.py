"""Stored responses, in this server process's memory.

Each entry has the whole conversation up to its answer, so no entry depends on another.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

from msgspec import Struct

from weft.errors import RequestError

_OVERHEAD = 1024  # bytes for an entry, beside its texts
_PER_ID = 256  # bytes for an item's id in the index


class Stored(Struct, frozen=True):
    """A response and its input.

    Attributes:
        body: the response, as JSON.
        items: all input items as a JSON list.
    """

    body: bytes
    items: bytes

    def input(self) -> list[dict[str, Any]]:
        """Return the input items."""
        items: list[dict[str, Any]] = json.loads(self.items)
        return items

    def conversation(self) -> list[dict[str, Any]]:
        """Return the input items and the answer."""
        return [*self.input(), *json.loads(self.body)["output"]]


class ResponseStore:
    """Stored responses for all API keys, bounded by size; the least recently used go first.

    Args:
        room: maximum bytes for all entries; 0 stores none.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._size = 0
        self._entries: OrderedDict[tuple[str, str], tuple[Stored, tuple[str, ...]]] = OrderedDict()
        self._places: dict[tuple[str, str], str] = {}  # owner and item -> the last response with it

    @property
    def keeps(self) -> bool:
        """True if the store has any room."""
        return self._room > 0

    def put(self, owner: str, response: str, stored: Stored, items: tuple[str, ...]) -> None:
        """Add a response, unless it is larger than the whole room.

        Args:
            owner: the API key's digest, or "" without keys.
            response: the response's id.
            stored: the response and its input.
            items: ids for clients' references to items in `stored`.
        """
        if (size := _size(stored, items)) > self._room:
            return
        self._entries[owner, response] = stored, items
        self._places.update(dict.fromkeys(((owner, item) for item in items), response))
        self._size += size
        while self._size > self._room:
            self._remove(*next(iter(self._entries)))

    def get(self, owner: str, response: str) -> Stored:
        """Return a response, and count it as used; RequestError with status 404 if it is gone."""
        if (found := self._entries.get((owner, response))) is None:
            raise RequestError(
                f"there is no response {response!r}: it was not stored, or it is no longer stored",
                param="response_id",
                code="response_not_found",
                status=404,
            )
        self._entries.move_to_end((owner, response))
        return found[0]

    def delete(self, owner: str, response: str) -> None:
        """Remove a response; raises as `get`."""
        self.get(owner, response)
        self._remove(owner, response)

    def with_item(self, owner: str, item: str) -> Stored:
        """Return a response with an item; RequestError with status 404 if there is none."""
        if (response := self._places.get((owner, item))) is None:
            raise RequestError(
                f"input refers to the item {item!r}, which is not stored, or no longer stored",
                param="input",
                code="item_not_found",
                status=404,
            )
        return self.get(owner, response)

    def _remove(self, owner: str, response: str) -> None:
        stored, items = self._entries.pop((owner, response))
        self._size -= _size(stored, items)
        for item in items:
            if self._places.get((owner, item)) == response:
                del self._places[owner, item]


def _size(stored: Stored, items: tuple[str, ...]) -> int:
    return len(stored.body) + len(stored.items) + _PER_ID * len(items) + _OVERHEAD
