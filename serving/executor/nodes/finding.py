"""What a check of `weft doctor` saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check saw; `advice` says what to do unless the status is "ok".

    Attributes:
        name: of the check.
        machine: where, if not on this one.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    seen: str
    advice: str = ""
    machine: str = ""
