"""Compiles the grammars of requests, in a child process, with a deadline and a cache.

The process (grammar_worker.py) starts with the first grammar. It is killed when one takes too
long, and another takes its place with the next one; the request is refused either way. What
is refused is remembered too, so that it costs its time once.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from typing import Any

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.child import how_it_ended
from weft.serving.config import EngineConfig
from weft.serving.messages import Compiled
from weft.serving.recent import Recent
from weft.serving.sampling_params import Grammar

ROOM = 256 << 20
"""Bytes of compiled grammars that are kept: here, and in each engine core, which keeps the same."""
HEAD = 4
"""Bytes of a message's length, which precede it."""
PLACE = "{field}"
"""Stands for the request's field in errors that are kept."""
OVERHEAD = 256
"""Bytes of what is kept, beside the grammar or error itself."""

logger = logging.getLogger(__name__)


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message to the process.

    Attributes:
        config: names the tokenizer.
        size: columns of the model's logits.
    """

    config: EngineConfig
    size: int


class Answer(msgspec.Struct, frozen=True):
    """To each message; to the first one, once grammars can be compiled.

    Attributes:
        data: the compiled grammar, as xgrammar writes it.
        error: why there is none.
    """

    data: bytes = b""
    error: str | None = None


class GrammarCompiler:
    """Runs on one event loop.

    Args:
        config: of the engine.
        vocab_size: columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._done: Recent[Compiled | str] = Recent(ROOM)
        self._under_way: dict[bytes, asyncio.Task[Compiled | str]] = {}
        self._turn = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None

    async def compile(self, grammar: Grammar) -> Compiled:
        """A grammar as the engine core takes it.

        Raises:
            RequestError: it cannot be compiled, or not in time.
            EngineError: there is no process to do it.
        """
        key = hashlib.sha256(
            f"{grammar.kind} {grammar.before} {grammar.instead} {grammar.text}".encode()
        ).digest()
        done = self._done.get(key)
        if done is None:
            task = self._under_way.get(key)
            if task is None:
                task = asyncio.create_task(self._do(key, grammar))
                self._under_way[key] = task
                task.add_done_callback(lambda task: self._forget(key, task))
            done = await asyncio.shield(task)  # others may wait for it
        if isinstance(done, str):
            message = done.replace(PLACE, grammar.param)
            raise RequestError(message, param=grammar.param, code="invalid_grammar")
        return done

    async def close(self) -> None:
        """End the process, and with it what is under way."""
        tasks = tuple(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._kill()

    def _forget(self, key: bytes, task: asyncio.Task[Compiled | str]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # whoever waits for it is told

    async def _do(self, key: bytes, grammar: Grammar) -> Compiled | str:
        """What comes of a grammar, once it is its turn; an error names PLACE as the field."""
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                await self._kill()
                await self._start()
            answer = await self._compile(msgspec.structs.replace(grammar, param=PLACE))
        done = Compiled(key, answer.data) if answer.error is None else answer.error
        size = len(answer.data) if answer.error is None else len(answer.error)
        self._done.put(key, done, size + OVERHEAD)
        return done

    async def _compile(self, grammar: Grammar) -> Answer:
        patience = self._config.grammar_timeout
        try:
            async with asyncio.timeout(patience):
                return await self._ask(grammar)
        except TimeoutError:
            await self._kill()
            return Answer(error=f"{PLACE} took longer than {patience:g} s to compile")
        except EngineError as error:
            await self._kill()
            logger.warning("a grammar was too much: %s", error)
            return Answer(error=f"{PLACE} is too much to compile")

    async def _start(self) -> None:
        """Start the process, and wait until it takes grammars; EngineError if that fails."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "weft.serving.grammar_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        patience = self._config.load_stall_timeout
        try:
            async with asyncio.timeout(patience):
                await self._ask(Vocabulary(self._config, self._vocab_size))
        except TimeoutError:
            await self._kill()
            raise EngineError(f"the grammar compiler did not start within {patience:g} s") from None
        except BaseException:
            await self._kill()
            raise

    async def _ask(self, message: Any) -> Answer:
        """The process's answer; EngineError if it dies over it."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(framed(message))
            await process.stdin.drain()
            head = await process.stdout.readexactly(HEAD)
            data = await process.stdout.readexactly(int.from_bytes(head, "little"))
        except (asyncio.IncompleteReadError, ConnectionError):
            how = how_it_ended(await process.wait()) or "has ended"
            raise EngineError(f"the grammar compiler {how}") from None
        return msgspec.msgpack.decode(data, type=Answer)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()


def framed(message: Any) -> bytes:
    """A message as it goes through a pipe: its length, and MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD, "little") + data
