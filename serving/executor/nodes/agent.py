"""A machine that takes part in serving a model which another machine controls: `weft join`.

    front                             agent
    Hello                  ◄──TCP──   joins, and stays
    Ping                   ──TCP──►   says Pong: it is there, and does what it is told
    Lend(engine, port)     ──TCP──►   connects to that engine core, too, in a thread of its own

    engine core                       that thread                    ranks of this machine
    Start, Meet, Step n    ──TCP──►   board, wakes  ──────────────►  run step n
    Said, Gone             ◄──TCP──   relays        ◄──socket──────  Loaded, Done, Failed
    Progress, every second ◄──TCP──   the board's counters

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
from weft.serving.executor.nodes.link import Link, present
from weft.serving.executor.nodes.messages import (
    Dump,
    End,
    Examine,
    Examined,
    Finding,
    Gone,
    Hello,
    Lend,
    Listen,
    Listening,
    Meet,
    NodeStep,
    Ping,
    Pong,
    Progress,
    Reach,
    Refused,
    Said,
    Start,
    Started,
    ToAgent,
    Unreachable,
    versions,
)
from weft.serving.executor.nodes.probe import answer, listen, reach
from weft.serving.executor.placement import Inventory
from weft.serving.executor.rank_messages import encoder
from weft.serving.executor.step_ring import slots

LOAD_MODEL = "weft.serving.executor.loading:load_model"

CONNECT = 5.0
"""Seconds for the head to answer."""

AGAIN = 1.0
"""Seconds between two attempts."""

ROOM = 0.001
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
    machine: int = 0,
    examine: Examiner = lambda config: [],
) -> None:
    """Take part in what the head at `host`:`port` serves, until interrupted.

    Args:
        host, port: where the head waits for machines.
        token: the group's.
        address: of this machine, at which the ranks of others reach its own; else the one from
            which it reaches the head.
        name: of this machine, for people; else the host's.
        once: return when the head has ended what this machine took part in.
        load_model: loads a rank's part of the model.
        node_ranks: most ranks that share this machine's cores.
        machine: its number, if it is known.
        examine: makes the findings that `weft doctor` asks for.

    Raises:
        ConfigError: the head has another token, or does not take this machine.
        EngineError: with `once`: the connection was lost.
        KeyboardInterrupt: the process was told to end; its ranks have ended.
    """
    offer = own_inventory(EngineConfig(node_ranks=node_ranks))
    while True:
        link = _connect(host, port, token)
        logger.info("joined %s:%d", host, port)
        name_here = name or socket.gethostname()
        guest = _Guest(host, token, address, name_here, load_model, offer, examine)
        try:
            with closing(link):
                ended = guest.take_part(link, machine)
            guest.wait()
        except KeyboardInterrupt:
            guest.leave()
            raise
        if once and ended:
            return
        if once:
            raise EngineError(f"{host}:{port} has hung up")
        logger.info("%s:%d has %s", host, port, "ended" if ended else "hung up")
        time.sleep(AGAIN)


def _connect(host: str, port: int, token: str) -> Link[ToAgent]:
    """Once the head is there; says what it waits for."""
    told = ""
    while True:
        try:
            return _link(host, port, token)
        except OSError as error:
            why = str(error.strerror or error)
        except ConfigError as error:
            raise ConfigError(f"{host}:{port}: {error}") from None
        if why != told:
            logger.info("waiting for %s:%d: %s", host, port, told := why)
        time.sleep(AGAIN)


def _link(host: str, port: int, token: str) -> Link[ToAgent]:
    """A connection on which both sides have proved that they know the token.

    Raises:
        ConfigError, OSError: as `present`, or nobody listens there.
    """
    sock = socket.create_connection((host, port), CONNECT)
    try:
        present(sock, token)
        return Link(sock, ToAgent)
    except BaseException:
        sock.close()
        raise


@dataclass
class _Guest:
    """What this machine is to a head that it has joined; see `join`."""

    host: str
    token: str
    address: str | None
    name: str
    load_model: str
    offer: Inventory
    examine: Examiner
    engines: dict[int, threading.Thread] = field(default_factory=dict)
    links: list[Link[ToAgent]] = field(default_factory=list)
    leaves: bool = False

    def take_part(self, link: Link[ToAgent], machine: int = 0) -> bool:
        """Do what the other side says until the connection ends; whether it ended it."""
        with suppress(OSError, msgspec.DecodeError):  # it has ended, or makes no sense
            address = self.address or link.own_address
            offer = replace(self.offer, where=f"{self.name} at {address}")
            link.send(Hello(self.name, address, versions(), offer, machine))
            while (message := link.wait()) is not None:
                match message:
                    case Refused(why):
                        raise ConfigError(why)
                    case Lend():
                        self._lend(message)
                    case Ping():
                        link.send(Pong())
                    case Start():
                        return self._serve(link, message, address)
                    case End():
                        return True
                    case Examine(config):
                        link.send(Examined(self.examine(config)))
                    case Listen():
                        _listen(link, address, self.token)
                    case Reach(host, port, seconds):
                        link.send(reach(host, port, self.token, seconds))
        return False

    def wait(self) -> None:
        """For all engines to end."""
        for thread in self.engines.values():
            if thread.ident is not None:  # else a signal came before it was started
                thread.join()

    def leave(self) -> None:
        """Hang up on all engines, and wait for the ranks of this machine to end."""
        self.leaves = True
        for link in list(self.links):
            link.shut()
        self.wait()

    def _lend(self, lend: Lend) -> None:
        before = self.engines.get(lend.engine)
        thread = threading.Thread(target=self._join_engine, args=(lend, before), daemon=True)
        self.engines[lend.engine] = thread
        thread.start()

    def _join_engine(self, lend: Lend, before: threading.Thread | None) -> None:
        """Have ranks of an engine, once those of the one that it replaces have ended."""
        if before is not None:
            before.join()
        try:
            link = _link(self.host, lend.port, self.token)
        except (OSError, ConfigError) as error:  # it waits in vain, and says so
            logger.warning("engine %d at port %d: %s", lend.engine, lend.port, error)
            return
        with closing(link):
            self.links.append(link)
            if not self.leaves:  # else nobody has shut it
                self.take_part(link, lend.machine)
            self.links.remove(link)

    def _serve(self, link: Link[ToAgent], start: Start, address: str) -> bool:
        if (engines := start.config.replica.engines) > 1:
            replica = replace(start.config.replica, memory=self.offer.memory // engines)
            config = replace(start.config, replica=replica)
            start = msgspec.structs.replace(start, config=config)
        try:
            agent = _Agent(link, start, address, self.load_model)
        except OSError as error:  # no memory, no more processes
            link.send(Said(start.first, encoder.encode(Failed.of(error))))
            return False
        return agent.run()


def _listen(link: Link[ToAgent], address: str, token: str) -> None:
    try:
        listener = listen(address)
    except OSError as error:
        link.send(Unreachable(f"{address} is not to be had there: {error.strerror}"))
        return
    link.send(Listening(listener.getsockname()[1]))
    answer(listener, token)


class _Agent:
    """One group's ranks on this machine, from their start to their end."""

    def __init__(self, link: Link[ToAgent], start: Start, address: str, load_model: str) -> None:
        self._link = link
        self._start = start
        self._steps: deque[bytes] = deque()
        self._step = 0
        self._beat = 0.0
        self._told = 0
        self._room = slots(start.config.pp)
        self._end: float | None = None
        link.set_patience(start.patience)
        self._machine = LocalNode(
            start.config,
            load_model,
            range(start.first, start.first + len(start.devices)),
            start.world_size,
            host=start.host,
            address=address,
            devices=start.devices,
        )

    def run(self) -> bool:
        """Until the ranks are gone; whether the controller has ended them."""
        machine = self._machine
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._link.socket, selectors.EVENT_READ)
                for channel in machine.channels:
                    selector.register(channel, selectors.EVENT_READ)
                self._link.send(Started(list(machine.pids)))
                while self._end is None or (self._steps and time.monotonic() < self._end):
                    self._turn(selector)
            machine.hang_up(0.0)
            return True
        except (EOFError, OSError, msgspec.DecodeError):
            return False
        finally:
            machine.wait(self._end or 0.0)
            machine.release()
            self._link.shut()  # which says that they are gone

    def _turn(self, selector: selectors.BaseSelector) -> None:
        beat = self._beat - time.monotonic()
        for key, _ in selector.select(ROOM if self._steps else max(0.0, beat)):
            channel = key.fileobj
            assert isinstance(channel, socket.socket)
            if channel is self._link.socket:
                self._obey(self._link.receive())
            else:
                self._relay(channel)
                if channel not in self._machine.channels:
                    selector.unregister(channel)
        while self._steps and self._machine.has_room(self._step + 1):
            self._step += 1
            self._machine.put(self._step, self._steps.popleft())
        # The controller waits for room, of which this is the measure (RemoteMachine.has_room).
        done = int(self._machine.counters[1].min())
        if time.monotonic() >= self._beat or done >= self._told + self._room:
            self._told = done
            self._say_progress()
            self._beat = time.monotonic() + self._start.heartbeat

    def _obey(self, message: ToAgent | None) -> None:
        match message:
            case NodeStep(data):
                self._steps.append(data)
            case Meet(port):
                self._machine.meet(port)
            case Dump():
                self._machine.dump()
            case End(grace):
                self._end = time.monotonic() + grace
            case None:
                raise EOFError
            case _:
                raise EOFError(f"{message} makes no sense here")

    def _relay(self, channel: socket.socket) -> None:
        rank, data = self._machine.receive_bytes(channel)
        if data is not None:
            self._link.send(Said(rank, data))
            return
        self._say_progress()
        self._link.send(Gone(rank, self._machine.how_ended(rank)))

    def _say_progress(self) -> None:
        machine = self._machine
        stopped = [rank for rank in machine.ranks if machine.is_stopped(rank)]
        self._link.send(Progress(machine.counters.tolist(), stopped))
