"""The nodes joined to the API process, shared by all its engines.

    weft join ──► API process: Hello with its inventory     once, and after each lost connection
    weft join ◄── API process: JoinEngine(engine, port)     for each engine with a part of the node
    weft join ──► engine core: joins it, too                and gets its ranks from it

Each node has a number, in the order of joining, and slices (placement.py) refer to nodes by it. If
a node is lost, the next joining node with enough devices takes over its number. Nodes that join
while all numbers are taken wait in reserve. The port stays open all the time.

    weft join ◄── API process: Ping                         every second
    weft join ──► API process: Pong                         else it hangs, and is dropped

The pool drops a silent node before an engine with ranks on it reports the loss (after half of
`stall_timeout`). The restarted engine therefore gets another node, or waits for one. Everything
runs in one task on the event loop, and a slow peer never blocks it.
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
import zmq
import zmq.asyncio

from weft.errors import ConfigError, EngineError
from weft.serving.executor.nodes.curve import Context
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import ENDED, LINGER, Link
from weft.serving.executor.nodes.messages import End, FromAgent, JoinEngine, Ping
from weft.serving.executor.nodes.multi_node_executor import check_nodes
from weft.serving.executor.placement import Inventory, can_replace
from weft.serving.executor.ranks import STUCK_FRACTION

if TYPE_CHECKING:
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.nodes.remote import JoinedNode

SILENCE_FRACTION = 0.5
"""Fraction of an engine's patience with a silent node after which the pool drops the node."""

HEARTBEAT = 1.0
"""Maximum seconds between two heartbeats."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _PoolNode:
    """A joined node, and when it last sent a message (time.monotonic())."""

    joined: JoinedNode
    last_heard: float


class NodePool:
    """Listener for nodes, and owner of all joined nodes. Create it on an event loop.

    Args:
        config: settings of all engines, with `nodes` above 1.

    Attributes:
        port: port where nodes join.
        token: token that nodes must know.

    Raises:
        ConfigError: there are more nodes than ranks, the port is not available, or the token is
            too short.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_nodes(config)
        self._config = config
        self._patience = config.stall_timeout * STUCK_FRACTION * SILENCE_FRACTION
        self._context: Context = zmq.Context()
        try:
            self._listener = JoinListener(self._context, config, patience=self._patience)
        except ConfigError:
            self._context.term()
            raise
        self.port, self.token = self._listener.port, self._listener.token
        self._numbers = range(1, config.nodes)
        self._nodes: list[_PoolNode] = []
        self._ended: list[Link[FromAgent]] = []
        self._by_number: dict[int, _PoolNode] = {}
        self._inventories: dict[int, Inventory] = {}
        self._engine_configs: Sequence[EngineConfig] = ()
        self._changed = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._follow_nodes())
        self._is_closed = False

    async def inventories(self) -> list[Inventory]:
        """Wait for all nodes; return their inventories in node order."""
        self._listener.log_join_command(len(self._numbers))
        await self._wait_until_present(self._numbers)
        return [self._inventories[number] for number in self._numbers]

    def assign(self, configs: Sequence[EngineConfig]) -> None:
        """Set the configuration of each engine, with its slice."""
        self._config = configs[0]
        self._engine_configs = configs

    async def wait_for_slice(self, engine: int) -> EngineConfig:
        """Wait for all nodes in an engine's slice; return its configuration with their names."""
        config = self._engine_configs[engine]
        slice = config.replica.slice
        await self._wait_until_present([part.node for part in slice if part.node])
        named = tuple(
            replace(part, where=self._inventories[part.node].where) if part.node else part
            for part in slice
        )
        return replace(config, replica=replace(config.replica, slice=named))

    def connect_nodes(self, engine: int, port: int) -> None:
        """Make the nodes in an engine's slice connect to its core.

        Args:
            engine: number of the engine.
            port: port where the core waits for them.

        Raises:
            EngineError: one of them has left.
        """
        for part in self._engine_configs[engine].replica.slice:
            if not part.node:
                continue
            node = self._by_number.get(part.node)
            try:
                if node is None:
                    raise ConnectionError(0, ENDED)
                node.joined.link.send(JoinEngine(engine, port, part.node))
            except OSError as error:
                where = self._inventories[part.node].where
                raise EngineError(f"{where} has left: {error.strerror}") from None

    async def close(self) -> None:
        """Dismiss all nodes and close the port. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._task.cancel()
        await asyncio.wait([self._task])
        self._listener.close()
        for link in self._ended:
            link.close(0)
        for node in self._nodes:
            with suppress(OSError):  # the node has left
                node.joined.link.send(End(0.0))
            node.joined.link.close()
        self._context.destroy(LINGER)  # the last messages have left then

    async def _wait_until_present(self, numbers: Sequence[int]) -> None:
        while missing := [number for number in numbers if not self._is_present(number)]:
            lost = [number for number in missing if number in self._inventories]
            if lost:
                names = " and ".join(self._inventories[number].where for number in lost)
                logger.warning("waiting for %s, or another node", names)
            self._changed.clear()
            await self._changed.wait()

    def _is_present(self, number: int) -> bool:
        """Return whether a node is present, after processing its unread messages."""
        if (node := self._by_number.get(number)) is not None:
            self._receive(node)
        return number in self._by_number

    async def _follow_nodes(self) -> None:
        """Receive from all nodes, ping them regularly, and drop silent ones."""
        pause = min(HEARTBEAT, self._patience / 4)
        last = time.monotonic()
        while True:
            await self._wait_for_input(last + pause - time.monotonic())
            while (joined := self._listener.accept()) is not None:
                logger.info("%s has joined", joined.where)
                self._nodes.append(_PoolNode(joined, time.monotonic()))
                self._assign_numbers()
            for node in [*self._nodes]:
                self._receive(node)
            now = time.monotonic()
            if now >= last + pause:
                self._send_heartbeats(now, late=now - last - pause)
                last = now

    async def _wait_for_input(self, timeout: float) -> None:
        """Wait until a socket is readable, or for `timeout` seconds."""
        for link in self._ended:
            link.close(0)
        self._ended.clear()
        links = (each for node in self._nodes for each in node.joined.link.sockets)
        poller = zmq.asyncio.Poller()
        for each in (*self._listener.sockets, *links):
            poller.register(each, zmq.POLLIN)
        await poller.poll(round(1000 * max(0.0, timeout)))

    def _receive(self, node: _PoolNode) -> None:
        """Receive all messages from a node. Any message is a sign of life."""
        link = node.joined.link
        try:
            while link.receive() is not None:
                node.last_heard = time.monotonic()
            is_lost = link.has_ended
        except msgspec.DecodeError:
            is_lost = True
        if is_lost:
            self._remove(node, "has left")

    def _send_heartbeats(self, now: float, late: float) -> None:
        """Ping all nodes, and drop silent ones.

        Args:
            now: time.monotonic().
            late: this heartbeat's delay in seconds.
        """
        for node in [*self._nodes]:
            # While this process was paused, the other machine may have been paused as well.
            node.last_heard += late
            if now - node.last_heard > self._patience:
                self._remove(node, f"has said nothing for {self._patience:g} s; dropped")
                continue
            with suppress(OSError):  # the node has left, as `_receive` will notice
                node.joined.link.send(Ping())

    def _remove(self, node: _PoolNode, reason: str) -> None:
        if node not in self._nodes:  # already removed
            return
        logger.warning("%s %s", node.joined.where, reason)
        self._nodes.remove(node)
        self._ended.append(node.joined.link)  # `_follow_nodes` may be waiting for it just now
        for number, other in list(self._by_number.items()):
            if other is node:
                del self._by_number[number]
        self._assign_numbers()

    def _assign_numbers(self) -> None:
        """Give free numbers to suitable nodes in reserve."""
        slices = [config.replica.slice for config in self._engine_configs]
        reserve = [node for node in self._nodes if node not in self._by_number.values()]
        for number in self._numbers:
            if number in self._by_number:
                continue
            for node in reserve:
                inventory = node.joined.hello.inventory
                if can_replace(self._config, slices, number, inventory):
                    reserve.remove(node)
                    self._by_number[number], self._inventories[number] = node, inventory
                    break
        for node in reserve:
            where = node.joined.where
            logger.info("%s is kept in reserve: not needed, or too few devices", where)
        self._changed.set()
