"""A config that tells what is read of it."""

from __future__ import annotations

from typing import Any


class Recorder(dict[str, Any]):
    """A JSON object that records which names are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def __or__(self, other: dict[str, Any]) -> Recorder:  # type: ignore[override]
        return self._recording({**self, **other})

    def __ror__(self, other: dict[str, Any]) -> Recorder:  # type: ignore[override]
        return self._recording({**other, **self})

    def _recording(self, values: dict[str, Any]) -> Recorder:
        """Return an object with other values, and with the same record."""
        merged = Recorder(values)
        merged.names = self.names
        return merged

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)
