"""The machines that serve with this one, as the front has them, for all its engines.

    weft join ──► front: Hello, what it has          once, and again when the connection is lost
    weft join ◄── front: Lend(engine, port)          for each engine whose slice has a part of it
    weft join ──► engine core: a connection          by which it gets its ranks (hosts.py)

Each machine has a number, in the order in which they came, and slices (resources.py) name
machines by it. When one is lost, the next that joins and has as many devices takes its number;
machines that come when all numbers are taken wait for that. The port stays open meanwhile.

    weft join ◄── front: Ping                        every second, while it is here
    weft join ──► front: Pong                        else it hangs, and is given up

A machine is given up here before an engine that has ranks on it says that it is lost (after half
of `stall_timeout`): so the engine that is started instead has another machine, or waits for one.
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
from weft.serving.executor.nodes.messages import End, Lend, Ping
from weft.serving.executor.nodes.multi_node_executor import check_nodes
from weft.serving.executor.placement import Inventory, can_replace
from weft.serving.executor.ranks import STUCK

if TYPE_CHECKING:
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.nodes.remote import JoinedNode

SILENT = 0.5
"""Of the time after which an engine says that a machine is lost: then it is given up here."""

LOOK = 1.0
"""Seconds between two looks whether machines are there, at most."""

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Member:
    """A machine that has joined, and when it was last heard of, by time.monotonic()."""

    joined: JoinedNode
    heard: float


class NodePool:
    """Waits for machines from now on; to be made on an event loop.

    Args:
        config: of all engines, with `nodes` above 1.

    Attributes:
        port: at which it waits.
        token: that machines must know.

    Raises:
        ConfigError: there are more machines than ranks, the port is not to be had, or the token is
            too short.
    """

    def __init__(self, config: EngineConfig) -> None:
        check_nodes(config)
        self._config = config
        self._patience = config.stall_timeout * STUCK * SILENT
        self._head = JoinListener(config)
        self.port, self.token = self._head.port, self._head.token
        self._numbers = range(1, config.nodes)
        self._members: list[_Member] = []
        self._numbered: dict[int, _Member] = {}
        self._offers: dict[int, Inventory] = {}
        self._shares: Sequence[EngineConfig] = ()
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._head.fileno(), self._admit)
        self._looking = self._loop.create_task(self._look())
        self._is_closed = False

    async def offers(self) -> list[Inventory]:
        """What the machines have, in the order of their numbers, once all are there."""
        self._head.invite(len(self._numbers))
        await self._until_there(self._numbers)
        return [self._offers[number] for number in self._numbers]

    def deal(self, shares: Sequence[EngineConfig]) -> None:
        """From now on, engines have these slices, of that kind of devices."""
        self._config = shares[0]
        self._shares = shares

    async def until_whole(self, engine: int) -> EngineConfig:
        """Wait until all machines of an engine's slice are there; its configuration, with them."""
        config = self._shares[engine]
        slice = config.replica.slice
        await self._until_there([share.machine for share in slice if share.machine])
        named = tuple(
            replace(share, where=self._offers[share.machine].where) if share.machine else share
            for share in slice
        )
        return replace(config, replica=replace(config.replica, slice=named))

    def lend(self, engine: int, port: int) -> None:
        """Have the machines of an engine's slice connect to it.

        Raises:
            EngineError: one of them has left.
        """
        for share in self._shares[engine].replica.slice:
            if not share.machine:
                continue
            member = self._numbered.get(share.machine)
            try:
                if member is None:
                    raise ConnectionError(0, "its connection has ended")
                member.joined.link.send(Lend(engine, port, share.machine))
            except OSError as error:
                where = self._offers[share.machine].where
                raise EngineError(f"{where} has left: {error.strerror}") from None

    def close(self) -> None:
        """Tell the machines that all has ended, and give the port back. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._looking.cancel()
        self._loop.remove_reader(self._head.fileno())
        self._head.close()
        for member in self._members:
            with suppress(OSError):  # it has left
                member.joined.link.send(End(0.0))
            self._hang_up(member)

    async def _until_there(self, numbers: Sequence[int]) -> None:
        while missing := [number for number in numbers if not self._is_there(number)]:
            names = [self._offers[number].where for number in missing if number in self._offers]
            if names:
                logger.warning("waiting for %s, or another machine", " and ".join(names))
            self._changed.clear()
            await self._changed.wait()

    def _is_there(self, number: int) -> bool:
        """Whether it is, also by what has come and was not looked at."""
        while (member := self._numbered.get(number)) and member.joined.link.has_come:
            self._hear(member)
        return member is not None

    def _admit(self) -> None:
        """Let a machine in, if one has become that."""
        joined = self._head.admit()
        if joined is None:
            return
        joined.link.set_patience(self._patience)
        member = _Member(joined, time.monotonic())
        self._members.append(member)
        self._loop.add_reader(joined.link.socket.fileno(), self._hear, member)
        self._fill()

    def _hear(self, member: _Member) -> None:
        """Take in what one says, of which all that matters is that it comes."""
        try:
            said = member.joined.link.receive()
        except msgspec.DecodeError:
            said = None
        if said is None:
            self._drop(member, "has left")
        else:
            member.heard = time.monotonic()

    async def _look(self) -> None:
        """Now and then, ask all whether they are there, and give up those that do not answer."""
        pause = min(LOOK, self._patience / 4)
        looked = time.monotonic()
        while True:
            await asyncio.sleep(pause)
            now = time.monotonic()
            late = max(0.0, now - looked - pause)
            looked = now
            self._admit()  # strangers that are silent cause no event
            for member in [*self._members]:
                # When this process does not get to run, nor may they have (a paused machine).
                member.heard += late
                if now - member.heard > self._patience:
                    silent = f"has said nothing for {self._patience:g} s, and is given up"
                    self._drop(member, silent)
                    continue
                with suppress(OSError):  # it has left, as is heard
                    member.joined.link.send(Ping())

    def _drop(self, member: _Member, why: str) -> None:
        if member not in self._members:  # it was, meanwhile
            return
        logger.warning("%s %s", member.joined.where, why)
        self._members.remove(member)
        self._hang_up(member)
        for number, other in list(self._numbered.items()):
            if other is member:
                del self._numbered[number]
        self._fill()

    def _hang_up(self, member: _Member) -> None:
        self._loop.remove_reader(member.joined.link.socket.fileno())
        member.joined.link.close()

    def _fill(self) -> None:
        """Give free numbers to machines that have none."""
        slices = [share.replica.slice for share in self._shares]
        spare = [each for each in self._members if each not in self._numbered.values()]
        for number in self._numbers:
            if number in self._numbered:
                continue
            for member in spare:
                offer = member.joined.hello.offer
                if can_replace(self._config, slices, number, offer):
                    spare.remove(member)
                    self._numbered[number], self._offers[number] = member, offer
                    break
        for member in spare:
            logger.info("%s waits: it is not needed, or has too few devices", member.joined.where)
        self._changed.set()
