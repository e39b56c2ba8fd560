"""A node that takes part in serving a model which another node controls: `weft join`.

    front                             agent
    Hello                  ◄──TCP──   joins, and stays
    Ping                   ──TCP──►   says Pong: it is there, and does what it is told
    JoinEngine(engine, port) ──TCP──►   connects to that engine core, too, in a thread of its own

    engine core                       that thread                    ranks of this node
    Start, Rendezvous, Step n    ──TCP──►   ring, wakes  ──────────────►  run step n
    RankMessage, RankEnded     ◄──TCP──   relays        ◄──socket──────  Loaded, Done, Failed
    RankProgress, every second ◄──TCP──   the ring's counters

The agent asks the front to take it, again and again until it does. When the connection to an
engine ends, whatever the reason, what is left of its ranks is killed; when that to the front
does, it waits for the engines to end and begins anew. Told to end (SIGTERM, SIGINT), it ends those
connections itself. What it imports and runs is its own: no message names code. (Ray's actors and
tests connect to an engine core at once.)
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

import msgspec

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.child_process import Failed
from weft.serving.executor.node import LocalNode
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.nodes.link import Link, prove_token
from weft.serving.executor.nodes.messages import (
    CheckResults,
    Dump,
    End,
    Finding,
    Hello,
    JoinEngine,
    Listen,
    Listening,
    NodeStep,
    Ping,
    Pong,
    Probe,
    RankEnded,
    RankMessage,
    RankProgress,
    Refused,
    Rendezvous,
    RunChecks,
    Start,
    Started,
    ToAgent,
    Unreachable,
    versions,
)
from weft.serving.executor.nodes.probe import answer_probe, listen, probe_link
from weft.serving.executor.placement import Inventory
from weft.serving.executor.rank_messages import encoder
from weft.serving.executor.step_ring import ring_entries

LOAD_MODEL = "weft.serving.executor.loading:load_model"

CONNECT_TIMEOUT = 5.0
"""Seconds for the head to answer."""

RETRY_PAUSE = 1.0
"""Seconds between two attempts."""

ROOM_POLL = 0.001
"""Seconds between two looks whether the slowest rank has read an old step."""

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
    """Take part in what the head at `host`:`port` serves, until interrupted.

    Args:
        host, port: where the head waits for nodes.
        token: the group's.
        address: of this node, at which the ranks of others reach its own; else the one from
            which it reaches the head.
        name: of this node, for people; else the host's.
        once: return when the head has ended what this node took part in.
        load_model: loads a rank's part of the model.
        node_ranks: most ranks that share this node's cores.
        node: its number, if it is known.
        examine: makes the findings that `weft doctor` asks for.

    Raises:
        ConfigError: the head has another token, or does not take this node.
        EngineError: with `once`: the connection was lost.
        KeyboardInterrupt: the process was logged to end; its ranks have ended.
    """
    inventory = own_inventory(EngineConfig(node_ranks=node_ranks))
    while True:
        link = _connect(host, port, token)
        logger.info("joined %s:%d", host, port)
        name_here = name or socket.gethostname()
        session = _JoinSession(host, token, address, name_here, load_model, inventory, examine)
        try:
            with closing(link):
                ended = session.serve(link, node)
            session.wait()
        except KeyboardInterrupt:
            session.close()
            raise
        if once and ended:
            return
        if once:
            raise EngineError(f"{host}:{port} has hung up")
        logger.info("%s:%d has %s", host, port, "ended" if ended else "hung up")
        time.sleep(RETRY_PAUSE)


def _connect(host: str, port: int, token: str) -> Link[ToAgent]:
    """Once the head is there; says what it waits for."""
    logged = ""
    while True:
        try:
            return _link(host, port, token)
        except OSError as error:
            why = str(error.strerror or error)
        except ConfigError as error:
            raise ConfigError(f"{host}:{port}: {error}") from None
        if why != logged:
            logger.info("waiting for %s:%d: %s", host, port, logged := why)
        time.sleep(RETRY_PAUSE)


def _link(host: str, port: int, token: str) -> Link[ToAgent]:
    """A connection on which both sides have proved that they know the token.

    Raises:
        ConfigError, OSError: as `present`, or nobody listens there.
    """
    sock = socket.create_connection((host, port), CONNECT_TIMEOUT)
    try:
        prove_token(sock, token)
        return Link(sock, ToAgent)
    except BaseException:
        sock.close()
        raise


@dataclass
class _JoinSession:
    """What this node is to a head that it has joined; see `join`."""

    host: str
    token: str
    address: str | None
    name: str
    load_model: str
    inventory: Inventory
    examine: Examiner
    engines: dict[int, threading.Thread] = field(default_factory=dict)
    links: list[Link[ToAgent]] = field(default_factory=list)
    is_closing: bool = False

    def serve(self, link: Link[ToAgent], node: int = 0) -> bool:
        """Do what the other side says until the connection ends; whether it ended it."""
        with suppress(OSError, msgspec.DecodeError):  # it has ended, or makes no sense
            address = self.address or link.own_address
            inventory = replace(self.inventory, where=f"{self.name} at {address}")
            link.send(Hello(self.name, address, versions(), inventory, node))
            while (message := link.wait()) is not None:
                match message:
                    case Refused(reason):
                        raise ConfigError(reason)
                    case JoinEngine():
                        self._start_engine_thread(message)
                    case Ping():
                        link.send(Pong())
                    case Start():
                        return self._run_ranks(link, message, address)
                    case End():
                        return True
                    case RunChecks(config):
                        link.send(CheckResults(self.examine(config)))
                    case Listen():
                        _listen(link, address, self.token)
                    case Probe(host, port, seconds):
                        link.send(probe_link(host, port, self.token, seconds))
        return False

    def wait(self) -> None:
        """For all engines to end."""
        for thread in self.engines.values():
            if thread.ident is not None:  # else a signal came before it was started
                thread.join()

    def close(self) -> None:
        """Hang up on all engines, and wait for the ranks of this node to end."""
        self.is_closing = True
        for link in list(self.links):
            link.shut()
        self.wait()

    def _start_engine_thread(self, request: JoinEngine) -> None:
        before = self.engines.get(request.engine)
        thread = threading.Thread(target=self._join_engine, args=(request, before), daemon=True)
        self.engines[request.engine] = thread
        thread.start()

    def _join_engine(self, request: JoinEngine, before: threading.Thread | None) -> None:
        """Have ranks of an engine, once those of the one that it replaces have ended."""
        if before is not None:
            before.join()
        try:
            link = _link(self.host, request.port, self.token)
        except (OSError, ConfigError) as error:  # it waits in vain, and says so
            logger.warning("engine %d at port %d: %s", request.engine, request.port, error)
            return
        with closing(link):
            self.links.append(link)
            if not self.is_closing:  # else nobody has shut it
                self.serve(link, request.node)
            self.links.remove(link)

    def _run_ranks(self, link: Link[ToAgent], start: Start, address: str) -> bool:
        if (engines := start.config.replica.engines) > 1:
            replica = replace(start.config.replica, memory=self.inventory.memory // engines)
            config = replace(start.config, replica=replica)
            start = msgspec.structs.replace(start, config=config)
        try:
            group = _RankGroup(link, start, address, self.load_model)
        except OSError as error:  # no memory, no more processes
            link.send(RankMessage(start.first, encoder.encode(Failed.of(error))))
            return False
        return group.run()


def _listen(link: Link[ToAgent], address: str, token: str) -> None:
    try:
        listener = listen(address)
    except OSError as error:
        link.send(Unreachable(f"{address} is not to be had there: {error.strerror}"))
        return
    link.send(Listening(listener.getsockname()[1]))
    answer_probe(listener, token)


class _RankGroup:
    """One group's ranks on this node, from their start to their end."""

    def __init__(self, link: Link[ToAgent], start: Start, address: str, load_model: str) -> None:
        self._link = link
        self._start = start
        self._steps: deque[bytes] = deque()
        self._step = 0
        self._next_heartbeat = 0.0
        self._reported = 0
        self._report_every = ring_entries(start.config.pp)
        self._deadline: float | None = None
        link.set_patience(start.patience)
        self._node = LocalNode(
            start.config,
            load_model,
            range(start.first, start.first + len(start.devices)),
            start.world_size,
            rendezvous_host=start.rendezvous_host,
            address=address,
            devices=start.devices,
        )

    def run(self) -> bool:
        """Until the ranks are gone; whether the controller has ended them."""
        node = self._node
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link.socket, selectors.EVENT_READ)
                for channel in node.channels:
                    selector.register(channel, selectors.EVENT_READ)
                self._link.send(Started(list(node.pids)))
                while self._deadline is None or (self._steps and time.monotonic() < self._deadline):
                    self._run_once(selector)
            node.hang_up(0.0)
            return True
        except (EOFError, OSError, msgspec.DecodeError):
            return False
        finally:
            node.wait(self._deadline or 0.0)
            node.release()
            self._link.shut()  # which says that they are gone

    def _run_once(self, selector: selectors.BaseSelector) -> None:
        pause = self._next_heartbeat - time.monotonic()
        for key, _ in selector.select(ROOM_POLL if self._steps else max(0.0, pause)):
            channel = key.fileobj
            assert isinstance(channel, socket.socket)
            if channel is self._link.socket:
                self._handle(self._link.receive())
            else:
                self._forward(channel)
                if channel not in self._node.channels:
                    selector.unregister(channel)
        while self._steps and self._node.has_room(self._step + 1):
            self._step += 1
            self._node.put(self._step, self._steps.popleft())
        # The controller waits for room, of which this is the measure (RemoteNode.has_room).
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
                self._node.meet(port)
            case Dump():
                self._node.dump()
            case End(grace):
                self._deadline = time.monotonic() + grace
            case None:
                raise EOFError
            case _:
                raise EOFError(f"{message} makes no sense here")

    def _forward(self, channel: socket.socket) -> None:
        rank, data = self._node.receive_bytes(channel)
        if data is not None:
            self._link.send(RankMessage(rank, data))
            return
        self._send_progress()
        self._link.send(RankEnded(rank, self._node.how_ended(rank)))

    def _send_progress(self) -> None:
        node = self._node
        stopped = [rank for rank in node.ranks if node.is_stopped(rank)]
        self._link.send(RankProgress(node.counters.tolist(), stopped))
