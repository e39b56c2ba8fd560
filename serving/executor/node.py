"""The ranks of one node, as the controller of all ranks sees them.

`LocalNode` are processes here, which read their steps from a ring (ring.py) and say on a
socket each what they have to say. remote.py has those of another node, whose agent
(agent.py) owns a LocalNode there.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor.child_process import how_it_ended, python_module
from weft.serving.executor.loading import LOOPBACK
from weft.serving.executor.nodes.link import read
from weft.serving.executor.rank_messages import FromRank, decode_rank_message
from weft.serving.executor.rank_process import RankOrders
from weft.serving.executor.step_ring import Int64, StepRing

EXIT_GRACE = 1.0
"""Seconds for the process of a rank that has hung up to be gone."""


class Node(Protocol):
    """The ranks of one node.

    Attributes:
        ranks: their numbers.
        pids: of their processes.
        counters: int64 [COUNTERS, ranks]; as of Board.
        channels: sockets that can be read when there is something to receive.
        where: its name and address; empty of the controller's own.
        lost: why nothing more can be known of the node.
    """

    ranks: range
    pids: Sequence[int]
    counters: Int64
    channels: list[socket.socket]
    where: str
    lost: str | None

    def receive(self, channel: socket.socket) -> tuple[int, FromRank | None] | None:
        """What a rank says, with its number; None instead if it has ended.

        A channel that has ended is taken from `channels`. None if what has come says nothing
        of a rank. A node that is lost ends with its first rank.
        """

    def check(self, pause: float) -> tuple[int, FromRank | None] | None:
        """As `receive`, when nothing has come; this process did not run for `pause` seconds."""

    def meet(self, port: int) -> None:
        """Tell the ranks where the first of all has opened a meeting place."""

    def has_room(self, step: int) -> bool:
        """Whether step `step` may be put."""

    def put(self, step: int, data: bytes) -> None:
        """Give a step to all ranks."""

    def name(self, rank: int) -> str:
        """Which process a rank is, in words."""

    def is_stopped(self, rank: int) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""

    def how_ended(self, rank: int) -> str:
        """How a rank has ended, in words that follow its name."""

    def dump(self) -> None:
        """Have all ranks write their stacks to stderr, and end."""

    def hang_up(self, grace: float) -> None:
        """Let the ranks end once they have run what they were given, within so many seconds."""

    def wait(self, deadline: float) -> None:
        """Wait for them until then, by time.monotonic(), and kill those that are left."""

    def release(self) -> None:
        """Give back what is held; the ranks have ended."""


class LocalNode:
    """Owns processes of this node, and their ring; See Node.

    Args:
        config: of the engine.
        load_model: "module:function" that loads a rank's part of the model.
        ranks: numbers of the ranks.
        world_size: how many there are on all nodes.
        rendezvous_host, address: of the first rank's node and of this one, for the ranks to meet.
        devices: of each rank; else one each, the node's first ones.
    """

    where = ""
    lost: str | None = None

    def __init__(
        self,
        config: EngineConfig,
        load_model: str,
        ranks: range,
        world_size: int,
        *,
        rendezvous_host: str = LOOPBACK,
        address: str = LOOPBACK,
        devices: Sequence[RankDevices] = (),
    ) -> None:
        self.ranks = ranks
        self._ring = StepRing(len(ranks), stages=config.pp)
        self.counters = self._ring.counters
        self._ranks: list[_Rank] = []
        try:
            stage_size = world_size // config.pp
            devices = devices or [(index,) for index in range(len(ranks))]
            for number, own in zip(ranks, devices, strict=True):
                copy, place = divmod(number % stage_size, stage_size // config.copies)
                orders = RankOrders(
                    config,
                    load_model,
                    number,
                    world_size,
                    copy=copy,
                    sends_output=place == 0 and number >= world_size - stage_size,
                    first_on_node=ranks[0],
                    ranks_on_node=len(ranks),
                    rendezvous_host=rendezvous_host,
                    address=address,
                    devices=own,
                )
                self._ranks.append(_Rank.start(orders, self._ring))
        except BaseException:
            self.wait(0.0)
            self.release()
            raise
        self._by_channel = {rank.channel: rank for rank in self._ranks}
        self.channels = list(self._by_channel)
        self.pids: Sequence[int] = [rank.process.pid for rank in self._ranks]

    def receive(self, channel: socket.socket) -> tuple[int, FromRank | None] | None:
        number, data = self.receive_bytes(channel)
        return number, None if data is None else decode_rank_message(data)

    def receive_bytes(self, channel: socket.socket) -> tuple[int, bytes | None]:
        """As `receive`, not decoded."""
        rank = self._by_channel[channel]
        header = read(channel, 8)
        data = read(channel, int.from_bytes(header, "little")) if header else b""
        if not data:
            self.channels.remove(channel)
        return rank.number, data or None

    def check(self, pause: float) -> tuple[int, FromRank | None] | None:
        return None

    def meet(self, port: int) -> None:
        for rank in self._ranks:
            if rank.number:
                with suppress(OSError):  # it is gone, and what it has said comes next
                    rank.channel.sendall(port.to_bytes(8, "little"))

    def has_room(self, step: int) -> bool:
        return self._ring.has_room(step)

    def put(self, step: int, data: bytes) -> None:
        self._ring.write(step, data)
        for rank in self._ranks:
            rank.wake()

    def name(self, rank: int) -> str:
        return f"rank {rank} (process {self._process(rank).pid})"

    def is_stopped(self, rank: int) -> bool:
        with suppress(OSError):  # it is gone
            status = Path(f"/proc/{self._process(rank).pid}/status").read_text()
            return "\nState:\tT" in status or "\nState:\tt" in status
        return False

    def how_ended(self, rank: int) -> str:
        process = self._process(rank)
        with suppress(subprocess.TimeoutExpired):
            return how_it_ended(process.wait(EXIT_GRACE)) or "ended"
        process.kill()
        return how_it_ended(process.wait()) or "ended"

    def dump(self) -> None:
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks

    def hang_up(self, grace: float) -> None:
        for rank in self._ranks:
            rank.hang_up()

    def wait(self, deadline: float) -> None:
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()

    def release(self) -> None:
        self._ring.close()
        for rank in self._ranks:
            rank.channel.close()
            if rank.process.stdin is not None:
                rank.process.stdin.close()

    def _process(self, rank: int) -> subprocess.Popen[bytes]:
        return self._ranks[rank - self.ranks[0]].process


class _Rank:
    """A rank's process, and this end of its socket."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], channel: socket.socket
    ) -> None:
        self.number = number
        self.process = process
        self.channel = channel

    @classmethod
    def start(cls, orders: RankOrders, ring: StepRing) -> _Rank:
        """Start it; its stdin stays open for as long as this process lives."""
        own, other = socket.socketpair()
        command, environment = python_module("weft.serving.executor.rank_process")
        with other:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=2,  # stdout belongs to the parent's output; stray prints go to stderr
                pass_fds=(other.fileno(), ring.fd),
            )
            given = msgspec.structs.replace(orders, socket=other.fileno(), ring=ring.fd)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(given) + b"\n")
        process.stdin.flush()
        return cls(orders.rank, process, own)

    def wake(self) -> None:
        """Tell it that there is one more step."""
        with suppress(OSError):  # it is gone, as the receiver sees
            self.channel.send(b"\0")

    def hang_up(self) -> None:
        """Let it end once it has run what it was woken for."""
        with suppress(OSError):  # it is gone
            self.channel.shutdown(socket.SHUT_WR)
