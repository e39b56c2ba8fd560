"""Agent of a node that serves part of a model for a controller elsewhere: `weft join`.

    API process                     agent
    Hello                  ◄─────   joins (see link.py), and stays connected
    Ping                   ─────►   answers Pong as a sign of life
    JoinEngine(port)       ─────►   joins that engine core, too, on a separate thread

    engine core                     that thread                    ranks of this node
    Start, Rendezvous      ─────►   starts the ranks
    NodeStep               ─────►   step ring, wakes ranks ─────►  run the step
    RankMessage, RankEnded ◄─────   forwards      ◄──socket──────  Loaded, Done, Failed
    RankProgress           ◄─────   counters of the ring, every second

The agent tries to join until the API process accepts it. When the connection to an engine ends, for
whatever reason, the agent kills the remaining ranks of that engine. When the connection to the API
process ends, it waits for its engines to end, then starts over. On SIGTERM or SIGINT it ends all
connections itself. The agent runs only code of its own installation: no message names code. (Ray
actors and tests connect to an engine core directly.)
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from math import ceil

import msgspec
import zmq

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.child_process import Failed
from weft.serving.executor.node import LocalNode
from weft.serving.executor.nodes.curve import derive_keys
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.nodes.join_client import JoinClient
from weft.serving.executor.nodes.link import Link
from weft.serving.executor.nodes.messages import (
    CheckResults,
    Dump,
    End,
    Finding,
    Hello,
    JoinEngine,
    Listen,
    NodeStep,
    Ping,
    Pong,
    Probe,
    RankEnded,
    RankMessage,
    RankProgress,
    Rendezvous,
    RunChecks,
    Start,
    Started,
    ToAgent,
    Unreachable,
)
from weft.serving.executor.nodes.probe import answer_probe, listen, probe_link
from weft.serving.executor.placement import Inventory
from weft.serving.executor.rank_messages import encoder
from weft.serving.executor.step_ring import ring_entries

LOAD_MODEL = "weft.serving.executor.loading:load_model"

REJOIN_PAUSE = 1.0
"""Seconds between the end of a controller and the next attempt to join."""

ROOM_POLL = 0.001
"""Seconds between two checks for room in the step ring."""

logger = logging.getLogger(__name__)

Examiner = Callable[[EngineConfig], list[Finding]]


def join(
    host: str,
    port: int,
    token: str,
    *,
    address: str | None = None,
    name: str | None = None,
    once: bool = False,
    load_model: str = LOAD_MODEL,
    node_ranks: int | None = None,
    node: int = 0,
    examine: Examiner = lambda config: [],
) -> None:
    """Join the controller at `host`:`port` and run ranks for it, until interrupted.

    Args:
        host, port: address of the controller's join listener.
        token: the group's token.
        address: address of this node for ranks on other nodes; by default the one that the
            connection to the controller uses.
        name: name of this node for people; by default the host name.
        once: return when the controller dismisses this node.
        load_model: "module:function" that loads a rank's part of the model.
        node_ranks: maximum number of ranks on the CPU cores.
        node: number of this node, if the controller has assigned one.
        examine: runs the checks of `weft doctor`.

    Raises:
        ConfigError: the controller has another token, or it refuses this node.
        EngineError: with `once`, the connection was lost.
        KeyboardInterrupt: the process was told to end. Its ranks have ended.
    """
    inventory = own_inventory(EngineConfig(node_ranks=node_ranks))
    own_name = name or socket.gethostname()
    client = JoinClient(zmq.Context(), host, derive_keys(token), own_name)
    try:
        while True:
            link = client.join_as_soon_as_possible(port)
            logger.info("joined %s:%d", host, port)
            session = _JoinSession(client, address, load_model, inventory, examine)
            try:
                with closing(link):
                    dismissed = session.serve(link, node)
                session.wait()
            except KeyboardInterrupt:
                session.close()
                raise
            if once and dismissed:
                return
            if once:
                raise EngineError(f"{host}:{port} has hung up")
            logger.info("%s:%d has %s", host, port, "ended" if dismissed else "hung up")
            time.sleep(REJOIN_PAUSE)
    finally:
        client.context.term()  # waits for the last messages to leave


@dataclass
class _JoinSession:
    """The time from joining a controller until it is gone; see `join`."""

    client: JoinClient
    address: str | None
    load_model: str
    inventory: Inventory
    examine: Examiner
    engines: dict[int, threading.Thread] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # When `close` shuts one end, the other one is readable in all engine threads.
        self._closing, self._interrupt = socket.socketpair()

    def serve(
        self, link: Link[ToAgent], node: int = 0, interrupts: Sequence[socket.socket] = ()
    ) -> bool:
        """Follow the controller's messages; return True on `End`, False on a lost connection.

        It also returns False when any of `interrupts` is readable.
        """
        with suppress(OSError, msgspec.DecodeError):  # connection lost, or invalid message
            address = self.address or link.own_address
            inventory = replace(self.inventory, where=f"{self.client.name} at {address}")
            link.send(Hello(self.client.name, address, inventory, node))
            while (message := link.wait(interrupts=interrupts)) is not None:
                match message:
                    case JoinEngine():
                        self._start_engine_thread(message)
                    case Ping():
                        link.send(Pong())
                    case Start():
                        return self._run_ranks(link, message, address, interrupts)
                    case End():
                        return True
                    case RunChecks(config):
                        link.send(CheckResults(self.examine(config)))
                    case Listen():
                        _listen(link, address)
                    case Probe(host, port, ticket, seconds):
                        link.send(probe_link(host, port, ticket, seconds))
        return False

    def wait(self) -> None:
        """Wait until all engines have ended."""
        for thread in self.engines.values():
            if thread.ident is not None:  # else a signal came before the thread was started
                thread.join()
        self._closing.close()
        self._interrupt.close()

    def close(self) -> None:
        """Hang up on all engines, and wait until the ranks of this node have ended."""
        self._closing.close()
        self.wait()

    def _start_engine_thread(self, request: JoinEngine) -> None:
        before = self.engines.get(request.engine)
        thread = threading.Thread(target=self._join_engine, args=(request, before), daemon=True)
        self.engines[request.engine] = thread
        thread.start()

    def _join_engine(self, request: JoinEngine, before: threading.Thread | None) -> None:
        """Run ranks for an engine core, once the ranks of its previous core have ended."""
        if before is not None:
            before.join()
        try:
            link = self.client.join(request.port)
        except (OSError, ConfigError) as error:  # the core waits in vain, and reports that
            logger.warning("engine %d at port %d: %s", request.engine, request.port, error)
            return
        with closing(link):
            self.serve(link, request.node, (self._interrupt,))

    def _run_ranks(
        self,
        link: Link[ToAgent],
        start: Start,
        address: str,
        interrupts: Sequence[socket.socket],
    ) -> bool:
        if (engines := start.config.replica.engines) > 1:
            replica = replace(start.config.replica, memory=self.inventory.memory // engines)
            config = replace(start.config, replica=replica)
            start = msgspec.structs.replace(start, config=config)
        try:
            group = _RankGroup(link, start, address, self.load_model)
        except OSError as error:  # no memory, or too many processes
            link.send(RankMessage(start.first, encoder.encode(Failed.of(error))))
            return False
        return group.run(interrupts)


def _listen(link: Link[ToAgent], address: str) -> None:
    try:
        listener, listening = listen(address)
    except OSError as error:
        link.send(Unreachable(f"{address} is not available there: {error.strerror}"))
        return
    link.send(listening)
    answer_probe(listener, listening.ticket)


class _RankGroup:
    """The ranks of one engine on this node, from their start to their end."""

    def __init__(self, link: Link[ToAgent], start: Start, address: str, load_model: str) -> None:
        self._link = link
        self._start = start
        self._steps: deque[bytes] = deque()
        self._step = 0
        self._next_heartbeat = 0.0
        self._reported = 0
        self._report_every = ring_entries(start.config.pp)
        self._deadline: float | None = None
        self._node = LocalNode(
            start.config,
            load_model,
            range(start.first, start.first + len(start.devices)),
            start.world_size,
            rendezvous_host=start.rendezvous_host,
            address=address,
            devices=start.devices,
        )

    def run(self, interrupts: Sequence[socket.socket]) -> bool:
        """Run until the ranks have ended; return whether the controller has ended them.

        When any of `interrupts` is readable, kill the ranks and return False.
        """
        node = self._node
        poller = zmq.Poller()
        for each in (*self._link.sockets, *interrupts, *node.channels):
            poller.register(each, zmq.POLLIN)
        channels = {channel.fileno(): channel for channel in node.channels}
        try:
            self._link.send(Started(list(node.pids)))
            while self._deadline is None or (self._steps and time.monotonic() < self._deadline):
                self._run_once(poller, channels)
            node.hang_up(0.0)
            return True
        except (EOFError, OSError, msgspec.DecodeError):
            return False
        finally:
            node.wait(self._deadline or 0.0)
            node.release()

    def _run_once(self, poller: zmq.Poller, channels: dict[int, socket.socket]) -> None:
        pause = max(0.0, self._next_heartbeat - time.monotonic())
        for each, _ in poller.poll(ceil(1000 * (ROOM_POLL if self._steps else pause))):
            if each in self._link.sockets:
                self._handle(self._link.receive())
            elif each not in channels:
                raise EOFError("interrupted")
            elif self._forward(channels[each]):
                poller.unregister(channels.pop(each))
        while self._steps and self._node.has_room(self._step + 1):
            self._step += 1
            self._node.put(self._step, self._steps.popleft())
        # The controller needs this report to see room for more steps (RemoteNode.has_room).
        done = int(self._node.counters[1].min())
        if time.monotonic() >= self._next_heartbeat or done >= self._reported + self._report_every:
            self._reported = done
            self._send_progress()
            self._next_heartbeat = time.monotonic() + self._start.heartbeat

    def _handle(self, message: ToAgent | None) -> None:
        match message:
            case NodeStep(data):
                self._steps.append(data)
            case Rendezvous(port):
                self._node.set_rendezvous(port)
            case Dump():
                self._node.dump()
            case End(grace):
                self._deadline = time.monotonic() + grace
            case None:
                if self._link.has_ended:
                    raise EOFError
            case _:
                raise EOFError(f"unexpected message: {message}")

    def _forward(self, channel: socket.socket) -> bool:
        """Pass a rank's message on; return True if the rank has ended instead."""
        rank, data = self._node.receive_bytes(channel)
        if data is not None:
            self._link.send(RankMessage(rank, data))
            return False
        self._send_progress()
        self._link.send(RankEnded(rank, self._node.how_ended(rank)))
        return True

    def _send_progress(self) -> None:
        node = self._node
        stopped = [rank for rank in node.ranks if node.is_stopped(rank)]
        self._link.send(RankProgress(node.counters.tolist(), stopped))
