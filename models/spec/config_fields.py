"""Typed access to config.json fields; errors name file, field and value.

A field with the value null counts as absent, as in Hugging Face configs. Reading never runs code
from the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

from weft.errors import ModelError, shown

MAX_SIZE = 2**31 - 1
MAX_PARTS = 4096
"""Limit on layers, and on experts: each is described by objects of its own."""
SIMILAR = 0.9
"""Minimum similarity of a misspelt field and a field's name."""


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields in a config.json, or in an object inside it.

    Attributes:
        values: the JSON object.
        source: the file, for messages.
        prefix: put before field names in messages, for an object inside the file.
    """

    values: dict[str, Any]
    source: Path
    prefix: str = ""

    def error(self, name: str, wanted: str) -> ModelError:
        """Return the error for an unsupported value; it names the value and the supported ones."""
        value = shown(self.values[name]) if name in self.values else self._missing(name)
        return ModelError(f"{self.source}: {self.prefix}{name} is {value}; supported is {wanted}")

    def has(self, name: str) -> bool:
        """Tell whether the field is present and not null."""
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_SIZE
    ) -> int:
        """Read a whole number from `low` to `high`; required unless there is a default."""
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise self.error(name, f"a whole number of at least {low}")
        if value > high:
            raise self.error(name, f"at most {high:,}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a finite number above 0; required unless there is a default."""
        value = self._get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < inf:
            raise self.error(name, "a number above 0")
        try:
            return float(value)
        except OverflowError:
            raise self.error(name, "a number that floating point can hold") from None

    def flag(self, name: str, default: bool) -> bool:
        """Read a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str) -> str:
        """Read one of the strings in `allowed`."""
        value = self._get(name, default)
        if value not in allowed:
            raise self.error(name, " or ".join(map(repr, allowed)))
        return str(value)

    def array(self, name: str) -> list[Any]:
        """Read a list; empty if the field is absent."""
        value = self._get(name, [])
        if not isinstance(value, list):
            raise self.error(name, "a list")
        return value

    def section(self, name: str) -> Fields:
        """Read an object; empty if the field is absent."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, self.source, f"{self.prefix}{name}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source}: {self.prefix}{name} is {self._missing(name)}")
        return value

    def _missing(self, name: str) -> str:
        """Return the word "missing", with a question if a field's name resembles this one."""
        others = [other for other in self.values if other != name]
        near = get_close_matches(name, others, n=1, cutoff=SIMILAR)
        return f"missing; {near[0]} is there: did you mean {name}?" if near else "missing"
