"""Rows of a server's batches go into its engine while that has room beyond what is kept for others.

Of eight places one stays free, and a row takes as many as it asks for answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.api.errors import describe
from weft.serving.batch.job import EngineEnded, LeftOut
from weft.serving.batch.local import LocalApi

if TYPE_CHECKING:
    from weft.serving.api.state import ServerState
    from weft.serving.engine import AsyncEngine

POLL = 0.02  # seconds between two looks at whether the engine has room


class Feeder:
    """See the module's text.

    Attributes:
        workers: answers at once.
    """

    def __init__(self, server: ServerState, engine: AsyncEngine) -> None:
        from weft.serving.api.app import local_app

        places = engine.config.dp * engine.info.max_num_seqs
        self.workers = max(1, places - max(1, places // 8))
        self._server = server
        self._engine = engine
        self._api = LocalApi(local_app(server))
        self._turn = asyncio.Lock()
        self._mine = 0  # answers that are asked for, in the engine or on the way there

    async def post(self, path: str, body: bytes, answers: int) -> tuple[int, bytes]:
        """The answer to a row, which is a 400 when it asks for too many answers.

        Raises:
            LeftOut: the server ends.
            EngineEnded: the engine has ended.
            EngineError: it has failed with this row, and may serve again.
        """
        if answers > self.workers:
            return self._too_many(answers)
        await self._until_there_is_room(answers)
        self._mine += answers
        try:
            return await self._api.post(path, body)
        except EngineError:
            if self._server.draining:
                raise LeftOut from None
            raise
        finally:
            self._mine -= answers

    def _too_many(self, answers: int) -> tuple[int, bytes]:
        message = (
            f"the row asks for {answers} answers at once; on this server at most {self.workers} "
            "of a batch run at a time: share them out among rows"
        )
        status, body = describe(RequestError(message, param="n", code="too_many_answers"))
        return status, msgspec.json.encode(body)

    async def _until_there_is_room(self, answers: int) -> None:
        async with self._turn:
            while self._engine.status != "ready" or answers > self._room():
                if self._server.draining:
                    raise LeftOut
                if self._engine.status in ("dead", "stalled"):
                    raise EngineEnded
                await asyncio.sleep(POLL)
            await asyncio.sleep(0)  # the row before is now counted

    def _room(self) -> int:
        return self.workers - max(self._engine.live, self._mine)
