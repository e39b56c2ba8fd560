"""The nodes that serve with this one, as the front has them, for all its engines.

    weft join ──► front: Hello, what it has          once, and again when the connection is lost
    weft join ◄── front: JoinEngine(engine, port)    for each engine whose slice has a part of it
    weft join ──► engine core: a connection          by which it gets its ranks (hosts.py)

Each node has a number, in the order in which they came, and slices (resources.py) name
nodes by it. When one is lost, the next that joins and has as many devices takes its number;
nodes that come when all numbers are taken wait for that. The port stays open meanwhile.

    weft join ◄── front: Ping                        every second, while it is here
    weft join ──► front: Pong                        else it hangs, and is given up

A node is given up here before an engine that has ranks on it says that it is lost (after half
of `stall_timeout`): so the engine that is started instead has another node, or waits for one.
All is on the event loop, and nothing waits for who has connected.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from weft.errors import EngineError
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.messages import End, JoinEngine, Ping
from weft.serving.executor.nodes.multi_node_executor import check_nodes
from weft.serving.executor.placement import Inventory, can_replace
from weft.serving.executor.ranks import STUCK_FRACTION

if TYPE_CHECKING:
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.nodes.remote import JoinedNode

SILENCE_FRACTION = 0.5
"""Of the time after which an engine says that a node is lost: then it is given up here."""

HEARTBEAT = 1.0
"""Seconds between two looks whether nodes are there, at most."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _PoolNode:
    """A node that has joined, and when it was last heard of, by time.monotonic()."""

    joined: JoinedNode
    last_heard: float


class NodePool:
    """Waits for nodes from now on; to be made on an event loop.

    Args:
        config: of all engines, with `nodes` above 1.

    Attributes:
        port: at which it waits.
        token: that nodes must know.

    Raises:
        ConfigError: there are more nodes than ranks, the port is not to be had, or the token is
            too short.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_nodes(config)
        self._config = config
        self._patience = config.stall_timeout * STUCK_FRACTION * SILENCE_FRACTION
        self._listener = JoinListener(config)
        self.port, self.token = self._listener.port, self._listener.token
        self._numbers = range(1, config.nodes)
        self._entries: list[_PoolNode] = []
        self._numbered: dict[int, _PoolNode] = {}
        self._inventories: dict[int, Inventory] = {}
        self._configs: Sequence[EngineConfig] = ()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self._accept)
        self._heartbeats = self._loop.create_task(self._send_heartbeats())
        self._is_closed = False

    async def inventories(self) -> list[Inventory]:
        """What the nodes have, in the order of their numbers, once all are there."""
        self._listener.log_join_command(len(self._numbers))
        await self._wait_until_present(self._numbers)
        return [self._inventories[number] for number in self._numbers]

    def assign(self, configs: Sequence[EngineConfig]) -> None:
        """From now on, engines have these slices, of that kind of devices."""
        self._config = configs[0]
        self._configs = configs

    async def wait_for_slice(self, engine: int) -> EngineConfig:
        """Wait until all nodes of an engine's slice are there; its configuration, with them."""
        config = self._configs[engine]
        slice = config.replica.slice
        await self._wait_until_present([part.node for part in slice if part.node])
        named = tuple(
            replace(part, where=self._inventories[part.node].where) if part.node else part
            for part in slice
        )
        return replace(config, replica=replace(config.replica, slice=named))

    def connect_nodes(self, engine: int, port: int) -> None:
        """Have the nodes of an engine's slice connect to it.

        Raises:
            EngineError: one of them has left.
        """
        for part in self._configs[engine].replica.slice:
            if not part.node:
                continue
            entry = self._numbered.get(part.node)
            try:
                if entry is None:
                    raise ConnectionError(0, "its connection has ended")
                entry.joined.link.send(JoinEngine(engine, port, part.node))
            except OSError as error:
                where = self._inventories[part.node].where
                raise EngineError(f"{where} has left: {error.strerror}") from None

    def close(self) -> None:
        """Tell the nodes that all has ended, and give the port back. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._heartbeats.cancel()
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        for entry in self._entries:
            with suppress(OSError):  # it has left
                entry.joined.link.send(End(0.0))
            self._hang_up(entry)

    async def _wait_until_present(self, numbers: Sequence[int]) -> None:
        while missing := [number for number in numbers if not self._is_present(number)]:
            names = [
                self._inventories[number].where for number in missing if number in self._inventories
            ]
            if names:
                logger.warning("waiting for %s, or another node", " and ".join(names))
            self._changed.clear()
            await self._changed.wait()

    def _is_present(self, number: int) -> bool:
        """Whether it is, also by what has come and was not looked at."""
        while (entry := self._numbered.get(number)) and entry.joined.link.has_come:
            self._receive(entry)
        return entry is not None

    def _accept(self) -> None:
        """Let a node in, if one has become that."""
        joined = self._listener.accept()
        if joined is None:
            return
        joined.link.set_patience(self._patience)
        entry = _PoolNode(joined, time.monotonic())
        self._entries.append(entry)
        self._loop.add_reader(joined.link.socket.fileno(), self._receive, entry)
        self._assign_numbers()

    def _receive(self, entry: _PoolNode) -> None:
        """Take in what one says, of which all that matters is that it comes."""
        try:
            message = entry.joined.link.receive()
        except msgspec.DecodeError:
            message = None
        if message is None:
            self._remove(entry, "has left")
        else:
            entry.last_heard = time.monotonic()

    async def _send_heartbeats(self) -> None:
        """Now and then, ask all whether they are there, and give up those that do not answer."""
        pause = min(HEARTBEAT, self._patience / 4)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            late = max(0.0, now - looked - pause)
            looked = now
            self._accept()  # strangers that are reason cause no event
            for entry in [*self._entries]:
                # When this process does not get to run, nor may they have (a paused node).
                entry.last_heard += late
                if now - entry.last_heard > self._patience:
                    reason = f"has message nothing for {self._patience:g} s, and is given up"
                    self._remove(entry, reason)
                    continue
                with suppress(OSError):  # it has left, as is heard
                    entry.joined.link.send(Ping())

    def _remove(self, entry: _PoolNode, why: str) -> None:
        if entry not in self._entries:  # it was, meanwhile
            return
        logger.warning("%s %s", entry.joined.where, why)
        self._entries.remove(entry)
        self._hang_up(entry)
        for number, other in list(self._numbered.items()):
            if other is entry:
                del self._numbered[number]
        self._assign_numbers()

    def _hang_up(self, entry: _PoolNode) -> None:
        self._loop.remove_reader(entry.joined.link.socket.fileno())
        entry.joined.link.close()

    def _assign_numbers(self) -> None:
        """Give free numbers to nodes that have none."""
        slices = [part.replica.slice for part in self._configs]
        spare = [each for each in self._entries if each not in self._numbered.values()]
        for number in self._numbers:
            if number in self._numbered:
                continue
            for entry in spare:
                inventory = entry.joined.hello.inventory
                if can_replace(self._config, slices, number, inventory):
                    spare.remove(entry)
                    self._numbered[number], self._inventories[number] = entry, inventory
                    break
        for entry in spare:
            logger.info("%s waits: it is not needed, or has too few devices", entry.joined.where)
        self._changed.set()
