"""Agent of a node that serves part of a model for a controller elsewhere: `weft join`.

    API process                       agent
    Hello                  ◄──TCP──   joins, and stays connected
    Ping                   ──TCP──►   answers Pong as a sign of life
    JoinEngine(port)       ──TCP──►   connects to that engine core, too, on a separate thread

    engine core                       that thread                    ranks of this node
    Start, Rendezvous      ──TCP──►   starts the ranks
    NodeStep               ──TCP──►   step ring, wakes ranks ─────►  run the step
    RankMessage, RankEnded ◄──TCP──   forwards      ◄──socket──────  Loaded, Done, Failed
    RankProgress           ◄──TCP──   counters of the ring, every second

The agent tries to join until the API process accepts it. When the connection to an engine ends, for
whatever reason, the agent kills the remaining ranks of that engine. When the connection to the API
process ends, it waits for its engines to end, then starts over. On SIGTERM or SIGINT it ends all
connections itself. The agent runs only code of its own installation: no message names code. (Ray
actors and tests connect to an engine core directly.)
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
"""Seconds to wait for a connection to the controller."""

RETRY_PAUSE = 1.0
"""Seconds between two attempts to join."""

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
    while True:
        link = _connect_with_retries(host, port, token)
        logger.info("joined %s:%d", host, port)
        own_name = name or socket.gethostname()
        session = _JoinSession(host, token, address, own_name, load_model, inventory, examine)
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
        time.sleep(RETRY_PAUSE)


def _connect_with_retries(host: str, port: int, token: str) -> Link[ToAgent]:
    """Connect as soon as the controller listens; log why it fails until then."""
    logged = ""
    while True:
        try:
            return _connect(host, port, token)
        except OSError as error:
            reason = str(error.strerror or error)
        except ConfigError as error:
            raise ConfigError(f"{host}:{port}: {error}") from None
        if reason != logged:
            logger.info("waiting for %s:%d: %s", host, port, logged := reason)
        time.sleep(RETRY_PAUSE)


def _connect(host: str, port: int, token: str) -> Link[ToAgent]:
    """Open a connection and complete the handshake.

    Raises:
        OSError: nobody listens there, or the handshake failed.
        ConfigError: see `prove_token`.
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
    """The time from joining a controller until it is gone; see `join`."""

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
        """Follow the controller's messages; return True on `End`, False on a lost connection."""
        with suppress(OSError, msgspec.DecodeError):  # connection lost, or invalid message
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
        """Wait until all engines have ended."""
        for thread in self.engines.values():
            if thread.ident is not None:  # else a signal came before the thread was started
                thread.join()

    def close(self) -> None:
        """Hang up on all engines, and wait until the ranks of this node have ended."""
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
        """Run ranks for an engine core, once the ranks of its previous core have ended."""
        if before is not None:
            before.join()
        try:
            link = _connect(self.host, request.port, self.token)
        except (OSError, ConfigError) as error:  # the core waits in vain, and reports that
            logger.warning("engine %d at port %d: %s", request.engine, request.port, error)
            return
        with closing(link):
            self.links.append(link)
            if not self.is_closing:  # else `close` may have missed this link
                self.serve(link, request.node)
            self.links.remove(link)

    def _run_ranks(self, link: Link[ToAgent], start: Start, address: str) -> bool:
        if (engines := start.config.replica.engines) > 1:
            replica = replace(start.config.replica, memory=self.inventory.memory // engines)
            config = replace(start.config, replica=replica)
            start = msgspec.structs.replace(start, config=config)
        try:
            group = _RankGroup(link, start, address, self.load_model)
        except OSError as error:  # no memory, or too many processes
            link.send(RankMessage(start.first, encoder.encode(Failed.of(error))))
            return False
        return group.run()


def _listen(link: Link[ToAgent], address: str, token: str) -> None:
    try:
        listener = listen(address)
    except OSError as error:
        link.send(Unreachable(f"{address} is not available there: {error.strerror}"))
        return
    link.send(Listening(listener.getsockname()[1]))
    answer_probe(listener, token)


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
        """Run until the ranks have ended; return whether the controller has ended them."""
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
            self._link.shut()  # tells the controller that the ranks have ended

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
                raise EOFError
            case _:
                raise EOFError(f"unexpected message: {message}")

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
