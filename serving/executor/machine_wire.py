"""What the controller of all ranks and the agent of a machine tell each other (see link.py)."""

from __future__ import annotations

import platform
import socket

import msgspec

from weft.serving.config import EngineConfig
from weft.serving.finding import Finding
from weft.version import __version__


class Start(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: start ranks.

    Attributes:
        config: of the engine.
        first, count: which ranks.
        world_size: ranks of all machines.
        host: address of the first rank's machine.
        heartbeat: seconds between two `Progress`.
        patience: seconds without a sign of life after which a machine is lost.
    """

    config: EngineConfig
    first: int
    count: int
    world_size: int
    host: str
    heartbeat: float
    patience: float


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the port at which the first rank waits for the others."""

    port: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the next step, as ranks read it."""

    data: bytes


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: have the ranks write their stacks to stderr, and end."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: let the ranks end; kill what is left after so many seconds."""

    grace: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: this machine cannot take part."""

    why: str


class Examine(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: what `weft doctor` finds on this machine, of which so many ranks are."""

    config: EngineConfig
    ranks: int


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: wait for one connection at a free port (see reach.py)."""


class Reach(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to who listens there, and measure the way."""

    address: str
    port: int
    seconds: float


ToAgent = Start | Meet | Step | Dump | End | Refused | Examine | Listen | Reach


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, first of all.

    Attributes:
        name: of the machine.
        address: at which ranks of other machines reach those of this one.
        versions: of what must be the same on all machines.
    """

    name: str
    address: str
    versions: dict[str, str]

    @classmethod
    def of(cls, address: str, name: str | None = None) -> Hello:
        """This machine's."""
        return cls(name or socket.gethostname(), address, versions())


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
    """Agent -> controller, again and again: how far the ranks are.

    Attributes:
        counters: the board's.
        stopped: ranks that somebody has stopped.
    """

    counters: list[list[int]]
    stopped: list[int]


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


FromAgent = Hello | Started | Said | Gone | Progress | Examined | Listening | Speed | Unreachable


def versions() -> dict[str, str]:
    """Of what must be the same on all machines."""
    from importlib.metadata import version

    python = ".".join(platform.python_version_tuple()[:2])
    return {"weft": __version__, "torch": version("torch"), "Python": python}


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Versions that differ, in words."""
    return [
        f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} here"
        for name in ours
        if theirs.get(name) != ours[name]
    ]
