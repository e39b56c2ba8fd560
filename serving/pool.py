"""The machines that serve with this one, as the front has them, for all its engines.

    weft join ──► front: Hello, what it has          once, and again when the connection is lost
    weft join ◄── front: Lend(engine, port)          for each engine whose slice has a part of it
    weft join ──► engine core: a connection          by which it gets its ranks (hosts.py)

Each machine has a number, in the order in which they came, and slices (resources.py) name
machines by it. When one is lost, the next that joins and has as many devices takes its number;
machines that come when all numbers are taken wait for that. The port stays open meanwhile.

A thread lets machines in, and notices when they leave. All else is on the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from weft.errors import EngineError
from weft.serving.executor.hosts import Head, check_nodes
from weft.serving.executor.machine_wire import End, Lend
from weft.serving.executor.processes import STUCK
from weft.serving.resources import Offer, can_replace

if TYPE_CHECKING:
    from weft.serving.config import EngineConfig
    from weft.serving.executor.remote import Joined
    from weft.serving.resources import Slice

logger = logging.getLogger(__name__)


class Pool:
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
        self._head = Head(config)
        self.port, self.token = self._head.port, self._head.token
        self._loop = asyncio.get_running_loop()
        self._numbers = range(1, config.nodes)
        self._joined: dict[int, Joined] = {}
        self._spare: list[Joined] = []
        self._offers: dict[int, Offer] = {}
        self._slices: Sequence[Slice] = ()
        self._changed = asyncio.Event()
        self._end, end = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, args=(end,), name="weft-pool")
        self._thread.daemon = True  # it waits for strangers
        self._thread.start()

    async def offers(self) -> list[Offer]:
        """What the machines have, in the order of their numbers, once all are there."""
        self._head.invite(len(self._numbers))
        await self._until_there(self._numbers)
        return [self._offers[number] for number in self._numbers]

    def deal(self, shares: Sequence[EngineConfig]) -> None:
        """From now on, engines have these slices, of that kind of devices."""
        self._config = shares[0]
        self._slices = [share.replica.slice for share in shares]

    async def until_whole(self, engine: int) -> None:
        """Wait until all machines of an engine's slice are there."""
        await self._until_there([share.machine for share in self._slices[engine] if share.machine])

    def lend(self, engine: int, port: int) -> None:
        """Have the machines of an engine's slice connect to it.

        Raises:
            EngineError: one of them has left.
        """
        for share in self._slices[engine]:
            if not share.machine:
                continue
            joined = self._joined.get(share.machine)
            try:
                if joined is None:
                    raise ConnectionError(0, "its connection has ended")
                joined.link.send(Lend(engine, port, share.machine))
            except OSError as error:
                where = self._offers[share.machine].where
                raise EngineError(f"{where} has left: {error.strerror}") from None

    async def close(self) -> None:
        """Tell the machines that all has ended, and give the port back."""
        with suppress(OSError):  # it has been
            self._end.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self._thread.join)
        self._end.close()

    async def _until_there(self, numbers: Sequence[int]) -> None:
        while missing := [number for number in numbers if not self._is_there(number)]:
            names = [self._offers[number].where for number in missing if number in self._offers]
            if names:
                logger.warning("waiting for %s, or another machine", " and ".join(names))
            self._changed.clear()
            await self._changed.wait()

    def _is_there(self, number: int) -> bool:
        joined = self._joined.get(number)
        return joined is not None and not joined.link.has_come  # which is its end

    def _take(self, joined: Joined) -> None:
        self._spare.append(joined)
        self._fill()

    def _drop(self, joined: Joined) -> None:
        joined.link.close()  # here, where it is asked whether it is there
        if joined in self._spare:
            self._spare.remove(joined)
        for number, other in list(self._joined.items()):
            if other is joined:
                del self._joined[number]
        self._fill()

    def _fill(self) -> None:
        """Give free numbers to machines that have none."""
        for number in self._numbers:
            if number in self._joined:
                continue
            for joined in self._spare:
                offer = joined.hello.offer
                if can_replace(self._config, self._slices, number, offer):
                    self._spare.remove(joined)
                    self._joined[number], self._offers[number] = joined, offer
                    break
        for joined in self._spare:
            logger.info("%s waits: it is not needed, or has too few devices", joined.where)
        self._changed.set()

    def _watch(self, end: socket.socket) -> None:
        """Let machines in, and notice those that leave, until `close`."""
        links: dict[int, Joined] = {}
        with self._head, end, selectors.DefaultSelector() as selector:
            selector.register(self._head, selectors.EVENT_READ)
            selector.register(end, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is end:
                        for left in links.values():
                            with suppress(OSError):  # it has left
                                left.link.send(End(0.0))
                            left.link.close()
                        return
                    if key.data is not None:  # it has nothing to say
                        logger.warning("%s has left", key.data.where)
                        selector.unregister(key.fileobj)
                        del links[key.fd]
                        self._tell(self._drop, key.data)
                    elif (joined := self._head.admit()) is not None:
                        joined.link.set_patience(self._config.stall_timeout * STUCK)
                        links[joined.link.socket.fileno()] = joined
                        selector.register(joined.link.socket, selectors.EVENT_READ, joined)
                        logger.info("%s has joined", joined.where)
                        self._tell(self._take, joined)

    def _tell(self, what: Callable[[Joined], None], joined: Joined) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(what, joined)
