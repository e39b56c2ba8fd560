"""What the controller of all ranks and the agent of a machine tell each other (see link.py)."""

from __future__ import annotations

import platform
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import msgspec

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor.placement import Inventory
from weft.version import __version__


class Start(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: start ranks.

    Attributes:
        config: of the engine; `replica` is its share of this machine, but for the memory.
        first: of the ranks.
        devices: of each of them.
        world_size: ranks of all machines.
        host: address of the first rank's machine.
        heartbeat: seconds between two `Progress`.
        patience: seconds without a sign of life after which a machine is lost.
    """

    config: EngineConfig
    first: int
    devices: tuple[RankDevices, ...]
    world_size: int
    host: str
    heartbeat: float
    patience: float


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the port at which the first rank waits for the others."""

    port: int


class NodeStep(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the next step, as ranks read it."""

    data: bytes


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: have the ranks write their stacks to stderr, and end."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: let the ranks end; kill what is left after so many seconds."""

    grace: float


class Lend(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to an engine, too, and run ranks for that.

    Attributes:
        engine: its number. When it asks again, what it had before has ended.
        port: at which it waits, on the controller's machine.
        machine: the number of the agent's, to be said there.
    """

    engine: int
    port: int
    machine: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: say that you are there."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: this machine cannot take part."""

    why: str


class Examine(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: what `weft doctor` finds on this machine."""

    config: EngineConfig


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: wait for one connection at a free port (see reach.py)."""


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to who listens there, and measure the way."""

    address: str
    port: int
    seconds: float


ToAgent = Start | Meet | NodeStep | Dump | End | Lend | Ping | Refused | Examine | Listen | Reach


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, first of all.

    Attributes:
        name: of the machine.
        address: at which ranks of other machines reach those of this one.
        versions: of what must be the same on all machines.
        offer: what it has for ranks.
        machine: the number that the controller has given it; 0 if none.
    """

    name: str
    address: str
    versions: dict[str, str]
    offer: Inventory
    machine: int = 0

    @property
    def where(self) -> str:
        """The machine, in words."""
        return f"{self.name} at {self.address}"


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the answer to `Ping`."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the processes of the ranks, in their order."""

    pids: list[int]


class Said(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: what a rank has said, as in wire.py."""

    rank: int
    data: bytes


class Gone(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: a rank has ended; how, in words that follow its name."""

    rank: int
    how: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, every heartbeat and every so many steps: how far the ranks are.

    Attributes:
        counters: the board's.
        stopped: ranks that somebody has stopped.
    """

    counters: list[list[int]]
    stopped: list[int]


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check of `weft doctor` saw; `advice` says what to do unless the status is "ok".

    Attributes:
        name: of the check.
        machine: where, if not on this one.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    seen: str
    advice: str = ""
    machine: str = ""


class Examined(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: what has been found."""

    findings: list[Finding]


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: at which port."""

    port: int


class Speed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: of a way from one machine to another.

    Attributes:
        round_trip: seconds for a byte to and fro, the median.
        bandwidth: bytes per second; 0 if it was not measured.
    """

    round_trip: float
    bandwidth: float


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: there is no such way."""

    why: str


FromAgent = (
    Hello | Pong | Started | Said | Gone | Progress | Examined | Listening | Speed | Unreachable
)


def versions() -> dict[str, str]:
    """Of what must be the same on all machines."""
    from importlib.metadata import PackageNotFoundError, version

    python = ".".join(platform.python_version_tuple()[:2])
    found = {"weft": __version__, "torch": version("torch"), "Python": python}
    with suppress(PackageNotFoundError):
        found["jax"] = version("jax")
    return found


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Versions that differ, in words; not all machines need jax."""
    return [
        f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} here"
        for name in ours
        if theirs.get(name) != ours[name] and (name != "jax" or name in theirs)
    ]
