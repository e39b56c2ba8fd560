"""Messages between the controller and a node's agent (see link.py)."""

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


class Knock(msgspec.Struct, frozen=True, tag=True):
    """Agent -> join port: the first message. It never changes, so any two versions understand it.

    Attributes:
        name: the node's name.
        versions: library versions, the same on all nodes.
    """

    name: str
    versions: dict[str, str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Join port -> agent: connect to another port, and send `Hello` there.

    Attributes:
        port: port for this node alone.
        patience: silent seconds until the connection counts as lost.
    """

    port: int
    patience: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Join port -> agent: this node cannot join."""

    reason: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: start ranks.

    Attributes:
        config: settings of the engine. `replica` holds the engine's share of this node, except
            for the memory.
        first: number of the first rank on this node.
        devices: devices for each rank on this node.
        world_size: number of ranks on all nodes.
        rendezvous_host: address of rank 0's node.
        heartbeat: seconds between two `RankProgress` messages.
    """

    config: EngineConfig
    first: int
    devices: tuple[RankDevices, ...]
    world_size: int
    rendezvous_host: str
    heartbeat: float


class Rendezvous(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the port where rank 0 waits for the other ranks."""

    port: int


class NodeStep(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: the next step, encoded for the ranks."""

    data: bytes


class Dump(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: make the ranks write their stacks to stderr and end."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: let the ranks end; kill the rest after `grace` seconds."""

    grace: float


class JoinEngine(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to an engine core and run ranks for it.

    Attributes:
        engine: number of the engine. If it repeats, the engine's previous core has ended.
        port: port of the engine core on the controller's machine.
        node: number of the agent's node, for its `Hello` to the core.
    """

    engine: int
    port: int
    node: int


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: answer with `Pong`."""


class RunChecks(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: run the checks of `weft doctor` on this node."""

    config: EngineConfig


class Listen(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: accept one connection on a free port (see probe.py)."""


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Controller -> agent: connect to a listening node and measure the link; see `Listening`."""

    address: str
    port: int
    ticket: bytes
    seconds: float


ToAgent = (
    Start | Rendezvous | NodeStep | Dump | End | JoinEngine | Ping | RunChecks | Listen | Probe
)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the first message at the node's own port.

    Attributes:
        name: name of the node.
        address: address where ranks on other nodes reach the ranks of this node.
        inventory: devices and memory of the node.
        node: number that the controller has assigned to the node; 0 if none.
    """

    name: str
    address: str
    inventory: Inventory
    node: int = 0

    @property
    def where(self) -> str:
        """The node's name and address, for messages."""
        return f"{self.name} at {self.address}"


class Pong(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the answer to `Ping`."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the ranks' process ids, in rank order."""

    pids: list[int]


class RankMessage(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: a message from a rank, encoded as in rank_messages.py."""

    rank: int
    data: bytes


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: a rank has ended; `how` is a verb phrase."""

    rank: int
    how: str


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller, every heartbeat and every few steps: the ranks' progress.

    Attributes:
        counters: counters of the step ring.
        stopped: ranks whose process is stopped.
    """

    counters: list[list[int]]
    stopped: list[int]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result from one check by `weft doctor`.

    Attributes:
        name: name of the check.
        seen: what the check saw.
        advice: what to do, unless the status is "ok".
        machine: node of the check; empty for this node.
    """

    name: str
    status: Literal["ok", "warn", "fail"]
    seen: str
    advice: str = ""
    machine: str = ""


class CheckResults(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the answer to `RunChecks`."""

    findings: list[Finding]


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the answer to `Listen`.

    Attributes:
        ticket: random bytes for the other node to send first.
    """

    port: int
    ticket: bytes


class LinkSpeed(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: a link's measured speed.

    Attributes:
        round_trip: median round-trip time of one byte, in seconds.
        bandwidth: bytes per second; 0 if it was not measured.
    """

    round_trip: float
    bandwidth: float


class Unreachable(msgspec.Struct, frozen=True, tag=True):
    """Agent -> controller: the other node cannot be reached."""

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
    """Return the library versions that must be the same on all nodes."""
    from importlib.metadata import PackageNotFoundError, version

    python = ".".join(platform.python_version_tuple()[:2])
    found = {"weft": __version__, "torch": version("torch"), "Python": python}
    with suppress(PackageNotFoundError):
        found["jax"] = version("jax")
    return found


def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """Describe different versions. A node without jax is accepted."""
    return [
        f"{name} is {theirs.get(name, 'missing')} there and {ours[name]} here"
        for name in ours
        if theirs.get(name) != ours[name] and (name != "jax" or name in theirs)
    ]
