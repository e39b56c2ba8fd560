"""Slices: the devices that an engine requests, and the devices assigned to it.

executor/placement.py maps requests to devices.
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
    """The part of an engine's slice on one node.

    Attributes:
        node: number of the node; 0 is the controller's node.
        devices: device indexes in the order of the mesh or of the ranks; see `devices_of_ranks`.
        engines: number of engines that share the cores and the memory of the node.
        where: name and address of the node.
    """

    node: int
    devices: tuple[int, ...]
    engines: int = 1
    where: str = HERE


Slice = tuple[NodeSlice, ...]
"""Devices assigned to one engine, in the order of its ranks."""

RankDevices = tuple[int, ...]
"""Devices of one rank, by index on its node."""


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """A virtual slice requested for one engine; see `parse`.

    Attributes:
        count: number of devices.
        islands: number of devices on each island, in rank order; None for any islands.
        kind: kind of devices; None for any kind.
    """

    count: int
    islands: tuple[int, ...] | None = None
    kind: Kind | None = None


def parse(text: str) -> DeviceRequest:
    """Parse the value of `--devices`.

    | text | devices for each engine |
    | --- | --- |
    | 8 | any eight, on as few islands as possible |
    | 2x4 | four on each of two islands |
    | 4+1 | four on one island, one on another; also 2x4+2 |
    | nvlink:8 | eight GPUs on one island; also nvlink:2x4 |

    Raises:
        ConfigError: the text has none of these forms.
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
