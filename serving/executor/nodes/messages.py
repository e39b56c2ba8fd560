"""What the controller of all ranks and the agent of a node tell each other (see link.py)."""

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
        config: of the engine; `replica` is its share of this node, but for the memory.
        first: of the ranks.
        devices: of each of them.
        world_size: ranks of all nodes.
        host: address of the first rank's node.
        heartbeat: seconds between two `RankProgress`.
        patience: seconds without a sign of life after which a node is lost.
    """

    config: EngineConfig
    first: int
    devices: tuple[RankDevices, ...]
    world_size: int
    rendezvous_host: str
    heartbeat: float
    patience: float


class Rendezvous(msgspec.Struct, frozen=True, tag=True):
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


class JoinEngine(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to an engine, too, and run ranks for that.

    Attributes:
        engine: its number. When it asks again, what it had before has ended.
        port: at which it waits, on the controller's node.
        node: the number of the agent's, to be said there.
    """

    engine: int
    port: int
    node: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: say that you are there."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: this node cannot take part."""

    reason: str


class RunChecks(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: what `weft doctor` finds on this node."""

    config: EngineConfig


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: wait for one connection at a free port (see reach.py)."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to who listens there, and measure the way."""

    address: str
    port: int
    seconds: float


ToAgent = (
    Start
    | Rendezvous
    | NodeStep
    | Dump
    | End
    | JoinEngine
    | Ping
    | Refused
    | RunChecks
    | Listen
    | Probe
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, first of all.

    Attributes:
        name: of the node.
        address: at which ranks of other nodes reach those of this one.
        versions: of what must be the same on all nodes.
        inventory: what it has for ranks.
        node: the number that the controller has given it; 0 if none.
    """

    name: str
    address: str
    versions: dict[str, str]
    inventory: Inventory
    node: int = 0

    @property
    def where(self) -> str:
        """The node, in words."""
        return f"{self.name} at {self.address}"


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the answer to `Ping`."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the processes of the ranks, in their order."""

    pids: list[int]


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: what a rank has said, as in wire.py."""

    rank: int
    data: bytes


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: a rank has ended; how, in words that follow its name."""

    rank: int
    how: str


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, every heartbeat and every so many steps: how far the ranks are.

    Attributes:
        counters: the ring's.
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


class CheckResults(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: what has been found."""

    findings: list[Finding]


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: at which port."""

    port: int


class LinkSpeed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: of a way from one node to another.

    Attributes:
        round_trip: seconds for a byte to and fro, the median.
        bandwidth: bytes per second; 0 if it was not measured.
    """

    round_trip: float
    bandwidth: float


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: there is no such way."""

    reason: str


FromAgent = (
    Hello
    | Pong
    | Started
    | RankMessage
    | RankEnded
    | RankProgress
    | CheckResults
    | Listening
    | LinkSpeed
    | Unreachable
)


def versions() -> dict[str, str]:
    """Of what must be the same on all nodes."""
    from importlib.metadata import PackageNotFoundError, version

    python = ".".join(platform.python_version_tuple()[:2])
    found = {"weft": __version__, "torch": version("torch"), "Python": python}
    with suppress(PackageNotFoundError):
        found["jax"] = version("jax")
    return found


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Versions that differ, in words; not all nodes need jax."""
    return [
        f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} here"
        for name in ours
        if theirs.get(name) != ours[name] and (name != "jax" or name in theirs)
    ]
