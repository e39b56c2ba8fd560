"""The ranks of one node, as seen by the controller of all ranks.

A `LocalNode` starts rank processes on this machine. They read steps from a ring (step_ring.py) and
report over one socket each. A `RemoteNode` (nodes/remote.py) stands for the ranks of another
machine, where an agent (nodes/agent.py) owns a LocalNode.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor.child_process import how_it_ended, python_module, read
from weft.serving.executor.loading import LOOPBACK
from weft.serving.executor.rank_messages import FromRank, decode_rank_message
from weft.serving.executor.rank_process import RankOrders
from weft.serving.executor.step_ring import Int64, StepRing

Channel = socket.socket | zmq.Socket[bytes]

EXIT_GRACE = 1.0
"""Maximum seconds between the end of a rank's socket and the end of its process."""


class Node(Protocol):
    """The ranks of one node.

    Attributes:
        ranks: numbers of the ranks.
        pids: process ids of the ranks.
        counters: int64 [COUNTERS, ranks]; see StepRing.
        where: name and address of the node; empty for the controller's own node.
        lost: reason why the node counts as lost, or None.
    """

    ranks: range
    pids: Sequence[int]
    counters: Int64
    where: str
    lost: str | None

    @property
    def channels(self) -> Sequence[Channel]:
        """Sockets; one becomes readable when there is a message."""

    def receive(self, channel: Any) -> tuple[int, FromRank | None] | None:
        """Receive from a channel: a rank's number, and its message or None if it has ended.

        Returns None if the received message does not concern a single rank. A closed channel is
        removed from `channels`. A lost node reports the end of its first rank.
        """

    def check(self, pause: float) -> tuple[int, FromRank | None] | None:
        """Check for timeouts when nothing was received; returns as `receive` does.

        Args:
            pause: seconds in which this process did not run, to be forgiven.
        """

    def set_rendezvous(self, port: int) -> None:
        """Tell the ranks the port that rank 0 has opened for the rendezvous."""

    def has_room(self, step: int) -> bool:
        """Return whether step `step` can be put now."""

    def put(self, step: int, data: bytes) -> None:
        """Give an encoded step to all ranks."""

    def name(self, rank: int) -> str:
        """Describe a rank's process in words."""

    def is_stopped(self, rank: int) -> bool:
        """Return whether a rank's process is stopped (by SIGSTOP or a debugger)."""

    def how_ended(self, rank: int) -> str:
        """Describe how a rank ended, as a verb phrase."""

    def dump(self) -> None:
        """Make all ranks write their stacks to stderr and end."""

    def hang_up(self, grace: float) -> None:
        """Let the ranks finish their steps and end, within `grace` seconds."""

    def wait(self, deadline: float) -> None:
        """Wait for the ranks until `deadline` (time.monotonic()), then kill the rest."""

    def release(self) -> None:
        """Release all resources. The ranks have ended."""


class LocalNode:
    """Rank processes on this machine, with their step ring; see Node.

    Args:
        config: settings of the engine.
        load_model: "module:function" that loads a rank's part of the model.
        ranks: numbers of the ranks.
        world_size: number of ranks on all nodes.
        rendezvous_host, address: addresses of rank 0's node and of this node; see RankContext.
        devices: devices for each rank; by default one each, starting with the first.
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
            group_size = stage_size // config.attention_groups
            devices = devices or [(index,) for index in range(len(ranks))]
            for number, own in zip(ranks, devices, strict=True):
                group, rank_in_group = divmod(number % stage_size, group_size)
                in_last_stage = number >= world_size - stage_size
                orders = RankOrders(
                    config,
                    load_model,
                    number,
                    world_size,
                    group=group,
                    sends_output=rank_in_group == 0 and in_last_stage,
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
        """Receive as `receive` does, without decoding."""
        rank = self._by_channel[channel]
        header = read(channel, 8)
        data = read(channel, int.from_bytes(header, "little")) if header else b""
        if not data:
            self.channels.remove(channel)
        return rank.number, data or None

    def check(self, pause: float) -> tuple[int, FromRank | None] | None:
        return None

    def set_rendezvous(self, port: int) -> None:
        for rank in self._ranks:
            if rank.number:
                with suppress(OSError):  # the rank has ended; its last message comes next
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
        with suppress(OSError):  # the process has ended
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
    """A rank's process, with this end of its socket."""

    def __init__(
        self, number: int, process: subprocess.Popen[bytes], channel: socket.socket
    ) -> None:
        self.number = number
        self.process = process
        self.channel = channel

    @classmethod
    def start(cls, orders: RankOrders, ring: StepRing) -> _Rank:
        """Start the process. Its stdin stays open until this process ends."""
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
        """Announce one more step."""
        with suppress(OSError):  # the rank has ended, as the receiver will notice
            self.channel.send(b"\0")

    def hang_up(self) -> None:
        """Let the rank end once it has run all announced steps."""
        with suppress(OSError):  # the rank has ended
            self.channel.shutdown(socket.SHUT_WR)
