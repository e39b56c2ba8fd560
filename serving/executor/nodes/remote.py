"""The ranks of another node, as the controller sees them: through that node's agent."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.nodes.link import Link
from weft.serving.executor.nodes.messages import (
    Dump,
    End,
    FromAgent,
    Hello,
    NodeStep,
    RankEnded,
    RankMessage,
    RankProgress,
    Rendezvous,
    Start,
    Started,
)
from weft.serving.executor.placement import devices_of_ranks
from weft.serving.executor.rank_messages import FromRank, decode_rank_message
from weft.serving.executor.step_ring import COUNTERS, Int64, ring_entries

RINGS_AHEAD = 4
"""Times the slots of a ring: steps that another node is given before its slowest rank has done
the first of them. Its agent tells after each ring's slots of them, so that with two of these the
engine could wait for ever; with more it does not wait for messages to and fro."""


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A node that has joined this one, and waits to be own_config what to do."""

    link: Link[FromAgent]
    hello: Hello

    @property
    def where(self) -> str:
        """Its name and address."""
        return self.hello.where


class RemoteNode:
    """See Node. Its counters are as of the agent's last heartbeat.

    Args:
        joined: the node.
        config: of the engine.
        part: of the node, for these ranks.
        ranks: their numbers.
        world_size: how many there are on all nodes.
        rendezvous_host: address of the first rank's node.
        patience: seconds without a sign of life until the node is lost.

    Raises:
        OSError: the agent cannot be own_config to start them.
    """

    def __init__(
        self,
        joined: JoinedNode,
        config: EngineConfig,
        part: NodeSlice,
        ranks: range,
        world_size: int,
        *,
        rendezvous_host: str,
        patience: float,
    ) -> None:
        self.ranks = ranks
        self.counters: Int64 = np.zeros((COUNTERS, len(ranks)), np.int64)
        self.channels = [joined.link.socket]
        self.lost: str | None = None
        self.where = joined.where
        self._link = link = joined.link
        self._patience = patience
        self.pids: Sequence[int] = []
        self._stopped: list[int] = []
        self._endings: dict[int, str] = {}
        self._window = RINGS_AHEAD * ring_entries(config.pp)
        link.set_patience(patience)
        # What is free there, it knows itself.
        replica = dataclasses.replace(config.replica, engines=part.engines, memory=None)
        own_config = dataclasses.replace(config, node_token=None, replica=replica)
        heartbeat = min(1.0, patience / 8)
        devices = tuple(devices_of_ranks(config, part))
        link.send(
            Start(own_config, ranks[0], devices, world_size, rendezvous_host, heartbeat, patience)
        )
        self._last_heard = time.monotonic()

    def receive(self, channel: socket.socket) -> tuple[int, FromRank | None] | None:
        self._last_heard = time.monotonic()
        try:
            message = self._link.receive()
        except msgspec.DecodeError as error:
            return self._lose(f"what it says makes no sense: {error}")
        match message:
            case None:
                return self._lose("its connection has ended")
            case RankMessage(rank, data):
                return rank, decode_rank_message(data)
            case RankEnded(rank, how):
                self._endings[rank] = how
                return rank, None
            case RankProgress(counters, stopped):
                self.counters[:] = counters
                self._stopped = stopped
            case Started(pids):
                self.pids = pids
        return None

    def check(self, pause: float) -> tuple[int, FromRank | None] | None:
        now = time.monotonic()
        self._last_heard = min(now, self._last_heard + pause)
        if self.lost is None and now - self._last_heard > self._patience:
            return self._lose(f"it has said nothing for {self._patience:g} s")
        return None

    def _lose(self, why: str) -> tuple[int, None]:
        self.lost = why
        self.channels = []
        self._link.shut()
        return self.ranks[0], None

    def meet(self, port: int) -> None:
        self._send(Rendezvous(port))

    def has_room(self, step: int) -> bool:
        """Whether the slowest rank there is near enough, as far as its agent has told: that keeps
        what the ranks have no room for yet, so that no step waits for a message to and fro.
        """
        return bool(self.counters[1].min() >= step - self._window)

    def put(self, step: int, data: bytes) -> None:
        self._send(NodeStep(data))

    def name(self, rank: int) -> str:
        place = rank - self.ranks[0]
        process = f"process {self.pids[place]} on " if self.pids else ""
        return f"rank {rank} ({process}{self.where})"

    def is_stopped(self, rank: int) -> bool:
        return rank in self._stopped

    def how_ended(self, rank: int) -> str:
        return self._endings.get(rank, "ended")

    def dump(self) -> None:
        self._send(Dump())

    def hang_up(self, grace: float) -> None:
        self._send(End(grace))

    def wait(self, deadline: float) -> None:
        """Its agent ends the connection when its ranks have ended, and kills them when it is
        ended here.
        """
        self._link.shut()

    def release(self) -> None:
        self._link.close()

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError:  # it is gone, as whoever receives sees; half a message may have been sent
            self._link.shut()
