"""The ranks on another node, as the controller sees them through that node's agent."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.node import Channel
from weft.serving.executor.nodes.link import ENDED, Link
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
"""Maximum steps ahead of the slowest remote rank, in multiples of the ring's entries.

The agent reports its progress once per ring of steps. With a factor of 2 the engine could wait
forever. Larger multiples hide the network round trip.
"""


@dataclass(frozen=True, slots=True)
class JoinedNode:
    """A joined node, waiting for messages, and its library versions."""

    link: Link[FromAgent]
    hello: Hello
    versions: dict[str, str]

    @property
    def where(self) -> str:
        """The node's name and address."""
        return self.hello.where


class RemoteNode:
    """The ranks on another node; see Node. Their counters come from the agent's last report.

    Args:
        joined: connection to the node.
        config: settings of the engine.
        part: the node's part of the slice.
        ranks: numbers of the ranks.
        world_size: number of ranks on all nodes.
        rendezvous_host: address of rank 0's node.
        patience: seconds without a sign of life until the node counts as lost.

    Raises:
        OSError: the connection is lost.
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
        self.channels: list[Channel] = [*joined.link.sockets]
        self.lost: str | None = None
        self.where = joined.where
        self._link = link = joined.link
        self._patience = patience
        self.pids: Sequence[int] = []
        self._stopped: list[int] = []
        self._endings: dict[int, str] = {}
        self._window = RINGS_AHEAD * ring_entries(config.pp)
        # The agent measures its own node's free memory.
        replica = dataclasses.replace(config.replica, engines=part.engines, memory=None)
        config = dataclasses.replace(config, node_token=None, node_token_file=None, replica=replica)
        heartbeat = min(1.0, patience / 8)
        devices = tuple(devices_of_ranks(config, part))
        link.send(Start(config, ranks[0], devices, world_size, rendezvous_host, heartbeat))
        self._last_heard = time.monotonic()
        self._unsent: str | None = None

    def receive(self, channel: Channel) -> tuple[int, FromRank | None] | None:
        self._last_heard = time.monotonic()
        try:
            message = self._link.receive()
        except msgspec.DecodeError as error:
            return self._lose(f"it sent an invalid message: {error}")
        match message:
            case None if self._link.has_ended:
                return self._lose(ENDED)
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
        if self.lost is None and self._unsent is not None:
            return self._lose(self._unsent)
        if self.lost is None and now - self._last_heard > self._patience:
            return self._lose(f"it has said nothing for {self._patience:g} s")
        return None

    def _lose(self, reason: str) -> tuple[int, None]:
        self.lost = reason
        self.channels = []
        return self.ranks[0], None

    def set_rendezvous(self, port: int) -> None:
        self._send(Rendezvous(port))

    def has_room(self, step: int) -> bool:
        """Return whether the slowest remote rank is near enough, by the last report.

        The agent queues steps beyond its ring's size, so no step waits for a round trip.
        """
        return bool(self.counters[1].min() >= step - self._window)

    def put(self, step: int, data: bytes) -> None:
        self._send(NodeStep(data))

    def name(self, rank: int) -> str:
        index = rank - self.ranks[0]
        process = f"process {self.pids[index]} on " if self.pids else ""
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
        """End the connection. The agent then kills all remaining ranks."""
        self._link.close()

    def release(self) -> None:
        self._link.close()

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError as error:  # `check` reports it, unless `receive` does so earlier
            self._unsent = self._unsent or error.strerror
