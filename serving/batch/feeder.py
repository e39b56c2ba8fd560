"""Rows of a batch go into the engine as that has room for what they ask for.

A row begins, in its turn, when there is room for one answer. Each of its answers then waits for
room of its own, so one that asks for many gets on however busy the engine is, and nobody waits
until there is room for all of them at once. Answers that wait take memory: no row begins while
those of the rows before that wait would fill the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from weft.errors import EngineError
from weft.serving.batch.job import EngineEnded, LeftOut
from weft.serving.engine.admission import POLL, Admission

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine


class Server(Protocol):
    """What batches need of the server whose routes answer their rows.

    Attributes:
        model: the model's name in the API.
        draining: the server was told to end: no row begins any more.
    """

    model: str
    draining: bool

    async def answer_row(
        self, path: str, body: bytes, admitted: Callable[[], Awaitable[None]]
    ) -> tuple[int, bytes]:
        """The status and body of the API's response; each answer first awaits `admitted`.

        Raises:
            EngineError: the engine cannot serve, or has failed with all its requests.
        """


class Feeder:
    """See the module's text.

    Args:
        server: whose routes answer the rows.
        engine: of the server.
        most: requests that the engine may have when another answer goes there.
    """

    def __init__(self, server: Server, engine: AsyncEngine, most: int) -> None:
        self._server = server
        self._engine = engine
        self._most = most
        self._admission = Admission(engine, most)
        self._turn = asyncio.Lock()
        self._waiting = 0  # answers, of rows that have begun

    async def post(
        self, path: str, body: bytes, answers: int, begun: Callable[[], None]
    ) -> tuple[int, bytes]:
        """The API's answer to a row, which asks for so many answers; see `Job.run`.

        Raises:
            LeftOut: the server ends.
            EngineEnded: the engine has ended.
            EngineError: it has failed with this row, and may serve again.
        """
        await self._until_it_may_begin()
        self._waiting += answers
        left = answers

        async def admitted() -> None:
            nonlocal left
            await self._admission.wait()
            begun()
            if left:
                left -= 1
                self._waiting -= 1

        try:
            return await self._server.answer_row(path, body, admitted)
        except EngineError:
            if self._server.draining:
                raise LeftOut from None
            raise
        finally:
            self._waiting -= left

    async def _until_it_may_begin(self) -> None:
        async with self._turn:
            while self._waiting >= self._most or not self._admission.open:
                if self._server.draining:
                    raise LeftOut
                if self._engine.status in ("dead", "stalled"):
                    why = self._engine.failure or f"the engine is {self._engine.status}"
                    raise EngineEnded(str(why))
                await asyncio.sleep(POLL)
