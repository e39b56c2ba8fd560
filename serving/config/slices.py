"""Slices: the devices that an engine asks for, and those that it is given.

executor/placement.py maps one to the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from weft.errors import ConfigError

Kind = Literal["cpu", "cuda", "tpu"]

HERE = "this node"


@dataclass(frozen=True, slots=True)
class NodeSlice:
    """The part of an engine's slice that is on one node.

    Attributes:
        node: its number.
        devices: by index, in the order of the mesh or of the ranks; see `devices_of_ranks`.
        engines: how many have a part of this node, and so share its cores and memory.
        where: the node's name and address.
    """

    node: int
    devices: tuple[int, ...]
    engines: int = 1
    where: str = HERE


Slice = tuple[NodeSlice, ...]
"""Of one engine; in the order of its ranks."""

RankDevices = tuple[int, ...]
"""By index, of one rank, on its node."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A virtual slice of one engine; see `parse`.

    Attributes:
        count: devices.
        islands: devices of each island, in the order of the ranks; None for any.
        kind: of the devices; None for any.
    """

    count: int
    islands: tuple[int, ...] | None = None
    kind: Kind | None = None


def parse(text: str) -> DeviceRequest:
    """What `--devices` asks for.

    | text | devices of each engine |
    | --- | --- |
    | 8 | any eight, of as few islands as have them |
    | 2x4 | of two islands four each |
    | 4+1 | four of an island, one of another; also 2x4+2 |
    | nvlink:8 | eight GPUs of one island; also nvlink:2x4 |

    Raises:
        ConfigError: it is none of these.
    """
    match = re.fullmatch(r"(nvlink:)?((?:\d+x)?\d+(?:\+(?:\d+x)?\d+)*)", text)
    islands: list[int] = []
    for part in match[2].split("+") if match else ():
        times, _, each = part.rpartition("x")
        islands += [int(each)] * min(int(times or 1), 4096)
    if match is None or not islands or not all(islands):
        raise ConfigError(f"--devices is {text!r}; it must be such as 8, 2x4, 4+1 or nvlink:8")
    if match[2].isdecimal() and match[1] is None:
        return DeviceRequest(islands[0])
    return DeviceRequest(sum(islands), tuple(islands), "cuda" if match[1] else None)
