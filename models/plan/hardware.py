"""Machines: the devices in a slice such as h100:2x8 or v5e:2x4, and the links between them.

The figures come from kernels/devices.py, or from a TOML file with the user's own:

    [H100]                  # a known device with other numbers
    price = 1.99

    [mine]                  # a new device; it is like a known one in all other numbers
    like = "H200"
    memory = 96e9
    link = { bandwidth = 200e9 }
    reached = { flops = 0.5 }
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.kernels.devices import DEVICES, DTYPES, Device, Link, Reached

MAX_NODES = 1024
OWN = 'describe your own in a TOML file: [NAME], like = "H100", then the numbers that differ'


@dataclass(frozen=True, slots=True)
class Axis:
    """Devices in a row that exchange data: a torus axis, or one level of switches.

    Attributes:
        size: number of devices.
        link: each device's connection along the axis.
        wraps: the last device is a neighbour of the first.
        both_ways: data travel in both directions around the torus at once.
    """

    size: int
    link: Link
    wraps: bool = False
    both_ways: bool = True


@dataclass(frozen=True, slots=True)
class Slice:
    """Devices to serve a model with.

    Attributes:
        device: their kind.
        shape: (nodes, devices in each), or the sides of a torus in chips.
    """

    device: Device
    shape: tuple[int, ...]

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.shape) * self.device.per_chip

    @property
    def axes(self) -> list[Axis]:
        """The axes with two devices or more. Those with the fastest links come first."""
        device = self.device
        if not device.shapes:
            nodes, each = self.shape
            axes = [Axis(each, device.link), Axis(nodes, device.network)]
        else:
            axes = [Axis(2, device.inside)] if device.inside else []
            axes += [Axis(side, device.link, self._wraps(side)) for side in self.shape]
        return [axis for axis in axes if axis.size > 1]

    def _wraps(self, side: int) -> bool:
        """Tell if an axis closes to a ring.

        v5e and v6e: a side of 16 does ("How to Scale Your Model", part 2). The 3-D chips: all sides
        do in slices of whole 4x4x4 cubes (Google Cloud's pages on v4 and v5p).
        """
        ring = self.device.ring
        whole = len(self.shape) < 3 or all(other % ring == 0 for other in self.shape)
        return whole and side % ring == 0

    def __str__(self) -> str:
        shape = self.shape[1:] if not self.device.shapes and self.shape[0] == 1 else self.shape
        return f"{self.device.name}:{'x'.join(map(str, shape))}"


def read_slice(text: str, devices: Mapping[str, Device] = DEVICES) -> Slice:
    """Parse a slice: h100:8 is one node, h100:2x8 two nodes with 8 each, v5e:2x4 a torus.

    Args:
        text: the slice; case does not matter.
        devices: the known devices by name.

    Raises:
        ConfigError: the device is unknown, or the slice does not exist.
    """
    if not text:
        raise ConfigError("--for has an empty entry; leave out the comma")
    name, colon, shape = text.partition(":")
    device = _find(name, devices)
    if device is None:
        raise ConfigError(
            f"--for is {text!r}: the device {name!r} is unknown; it must be one of "
            f"{', '.join(devices)}, or {OWN}"
        )
    numbers = re.fullmatch(r"[0-9]{1,5}(x[0-9]{1,5})*", shape)
    if not colon or numbers is None:
        raise ConfigError(f"--for is {text!r}; it must be like {_example(device)}")
    sides = tuple(map(int, shape.split("x")))
    if device.shapes:
        _check_torus(text, device, sides)
    else:
        sides = (1, *sides) if len(sides) == 1 else sides
        _check_nodes(text, device, sides)
    return Slice(device, sides)


def _find(name: str, devices: Mapping[str, Device]) -> Device | None:
    """Find a device by its name in any case."""
    return next((each for key, each in devices.items() if key.lower() == name.lower()), None)


def _example(device: Device) -> str:
    name = device.name
    if device.shapes:
        return f"{name}:{device.shapes[2]}"
    return f"{name}:{device.node} or {name}:2x{device.node} (two nodes)"


def _check_nodes(text: str, device: Device, sides: tuple[int, ...]) -> None:
    if len(sides) > 2:
        raise ConfigError(f"--for is {text!r}; it must be like {_example(device)}")
    nodes, each = sides
    if not 1 <= each <= device.node:
        raise ConfigError(
            f"--for is {text!r}: a node has 1 to {device.node} {device.name}, not {each}; "
            f"for two nodes, write {device.name}:2x{device.node}"
        )
    if not 1 <= nodes <= MAX_NODES:
        raise ConfigError(f"--for is {text!r}: it must have 1 to {MAX_NODES} nodes, not {nodes}")


def _check_torus(text: str, device: Device, sides: tuple[int, ...]) -> None:
    if "x".join(map(str, sides)) in device.shapes:
        return
    cubes = len(device.shapes[0].split("x")) == 3
    ordered = len(sides) == 3 and list(sides) == sorted(sides) and sides[0] > 0
    whole = ordered and all(side % device.ring == 0 for side in sides)
    if cubes and whole and math.prod(sides) * device.per_chip <= device.node:
        return
    larger = f", or ascending multiples of {device.ring}, such as 4x4x8" if cubes else ""
    raise ConfigError(
        f"--for is {text!r}: no such slice; {device.name} has {', '.join(device.shapes)}{larger}, "
        f"with up to {device.node // device.per_chip} chips"
    )


def read_devices(path: Path) -> dict[str, Device]:
    """Return the known devices together with those in a TOML file.

    Raises:
        ConfigError: the file cannot be read, or a device's number is unknown or impossible.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    devices = dict(DEVICES)
    for name, table in tables.items():
        device = _read_device(path, name, table)
        devices[device.name] = device
    return devices


MIN_SHARE, MAX_SHARE = 1e-3, 2.0  # of a peak; a measured peak may be a little too low
SHARES = [each.name for each in fields(Reached)]
MOST = 1e21
FIXED = {"name", "sources", "shapes", "ring", "inside", "like", "overlaps", "vector", "cpu"}
CHANGEABLE = [each.name for each in fields(Device) if each.name not in FIXED]


def _read_device(path: Path, name: str, table: Any) -> Device:
    where = f"{path}: {name}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table: [{name}]")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(
            f"{where}: a name has letters, digits, dots, hyphens and underscores only"
        )
    numbers = dict(table)
    like = numbers.pop("like", name)
    base = _find(str(like), DEVICES)
    if base is None and "like" not in table:
        raise ConfigError(
            f"{where}: like is missing; a new device has all other numbers of a known one: like = "
            f"one of {', '.join(DEVICES)}"
        )
    if base is None:
        raise ConfigError(f"{where}: like is {like!r}; it must be one of {', '.join(DEVICES)}")
    values: dict[str, Any] = {}
    for key, value in numbers.items():
        if key not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            raise ConfigError(f"{where}: unknown key {key!r}; known are like, {known}")
        at, old = f"{where}: {key}", getattr(base, key)
        if key == "flops":
            values[key] = old | _numbers(at, value, DTYPES)
        elif isinstance(old, Link):
            new = {"bandwidth": old.bandwidth, "hop": old.hop}
            new |= _numbers(at, value, ("bandwidth", "hop"))
            values[key] = Link(new["bandwidth"], new["hop"], old.reach)
        elif isinstance(old, Reached):
            shares = _numbers(at, value, SHARES, MIN_SHARE, MAX_SHARE)
            values[key] = replace(old, **shares)
        else:
            number = _number(at, value, 0 if key in ("launch", "host", "price", "copy") else 1)
            values[key] = int(number) if isinstance(old, int) else number
    known_as = _find(name, DEVICES)
    sources = base.sources | dict.fromkeys(values, str(path))
    if known_as is None:
        values |= {"name": name, "like": base.name}
    else:
        values["name"] = known_as.name
    return replace(base, sources=sources, **values)


def _numbers(
    where: str, table: Any, known: Sequence[str], least: float = 1, most: float = MOST
) -> dict[str, float]:
    if not isinstance(table, dict):
        raise ConfigError(f"{where} is {table!r}; it must be a table with {', '.join(known)}")
    if unknown := [key for key in table if key not in known]:
        raise ConfigError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    return {
        key: _number(f"{where}.{key}", each, 0 if key == "hop" else least, most)
        for key, each in table.items()
    }


def _number(where: str, value: Any, least: float, most: float = MOST) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{where} is {value!r}; it must be a number")
    if not least <= value <= most:
        bounds = f"from {least:g} to {most:g}" if value >= least else f"{least:g} or more"
        raise ConfigError(f"{where} is {value!r}; it must be {bounds}")
    return float(value)
