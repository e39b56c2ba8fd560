"""Compiles requests' grammars in a child process, with a deadline and a cache.

The process (worker.py) starts with the first grammar. If a grammar takes too long, the process is
killed and the request is rejected; the next grammar starts a new process. If the process dies by
itself, a new process tries the same grammar once more, because the grammar may be innocent.

The cache also keeps rejections, so that a bad grammar costs its time once. It does not keep
timeouts, because a busy node may have caused them. When the last waiting request leaves, its
grammar is dropped. If compilation has begun, it may continue for as long as a new process takes to
start.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.retry_after import FinishRate
from weft.serving.engine.sampling_params import Grammar
from weft.serving.executor.child_process import how_it_ended, python_module

ROOM = 256 << 20
"""Bytes of compiled grammars to keep. Each engine core keeps the same grammars as this process."""
HEAD = 4
"""Bytes of the length in front of each message."""
PLACE = "{field}"
"""Placeholder for the request's field in cached errors."""
OVERHEAD = 256
"""Bytes of a cache entry, beside the grammar or error itself."""
MAX_DEATHS = 2
"""Number of processes that may die over one grammar before the grammar is rejected."""

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


class Vocabulary(msgspec.Struct, frozen=True):
    """The first message to the process.

    Attributes:
        config: settings that name the tokenizer.
        size: number of columns of the model's logits.
    """

    config: EngineConfig
    size: int


class Answer(msgspec.Struct, frozen=True):
    """The reply to each message; the first reply means "ready".

    Attributes:
        data: the compiled grammar as xgrammar serializes it.
        error: reason for rejecting the grammar.
        fault: failure that the grammar did not cause.
    """

    data: bytes = b""
    error: str | None = None
    fault: str | None = None


class _Job:
    """A grammar with waiting requests.

    Attributes:
        waiting: number of callers that wait.
        deaths: number of processes that died over it.
        done: the result; a text is the reason for a rejection, with PLACE as the field.
    """

    def __init__(self, key: bytes, grammar: Grammar) -> None:
        self.key = key
        self.grammar = msgspec.structs.replace(grammar, param=PLACE)
        self.waiting = 0
        self.deaths = 0
        self.done: asyncio.Future[Compiled | str | EngineError] = asyncio.Future()


class GrammarCompiler:
    """Compiles one grammar at a time. Runs on one event loop.

    Args:
        config: the engine's settings.
        vocab_size: number of columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._done: LruCache[Compiled | str] = LruCache(ROOM)
        self._jobs: dict[bytes, _Job] = {}  # the first is being compiled
        self._worker: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._start_seconds = 0.0
        self._limit: asyncio.Timeout | None = None  # for the grammar that is being compiled
        self._until = 0.0
        self._pace = FinishRate()
        self._closed = False

    async def compile(self, grammar: Grammar) -> Compiled:
        """Return a grammar in the form for the engine core. Cancel the call to stop waiting.

        Raises:
            RequestError: the grammar cannot be compiled, or not in time. With status 429, too many
                grammars wait now.
            EngineError: the compiler process cannot run.
        """
        parts = (grammar.kind, grammar.before, grammar.header, grammar.instead, grammar.text)
        text = " ".join(parts)
        key = hashlib.sha256(text.encode()).digest()
        done: Compiled | str | EngineError | None = self._done.get(key)
        if done is None:
            done = await self._wait(self._jobs.get(key) or self._enqueue(key, grammar))
        if isinstance(done, EngineError):
            raise done
        if isinstance(done, str):
            message = done.replace(PLACE, grammar.param)
            raise RequestError(message, param=grammar.param, code="invalid_grammar")
        return done

    async def close(self) -> None:
        """End the process and all jobs."""
        self._closed = True
        for job in self._jobs.values():
            _settle(job, EngineError("the engine is shutting down"))
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._kill()

    def _enqueue(self, key: bytes, grammar: Grammar) -> _Job:
        if self._closed:
            raise EngineError("the engine is shutting down")
        if len(self._jobs) >= self._config.max_queue:
            raise RequestError(
                f"{len(self._jobs)} grammars are being compiled or waiting; the maximum is "
                f"{self._config.max_queue}; try again later",
                param=grammar.param,
                code="queue_full",
                status=429,
                retry_after=self._pace.retry_after(),
            )
        job = self._jobs[key] = _Job(key, grammar)
        self._pace.began()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return job

    async def _wait(self, job: _Job) -> Compiled | str | EngineError:
        job.waiting += 1
        self._set_limit(job)
        try:
            return await asyncio.shield(job.done)
        finally:
            job.waiting -= 1
            self._set_limit(job)

    def _set_limit(self, job: _Job) -> None:
        """Shorten a job's deadline if nobody waits for it, or drop the job before it begins.

        The job may still finish in the time that a new process would take to start.
        """
        limit = self._limit
        if self._first() is job:
            if limit is not None and not limit.expired():
                soon = asyncio.get_running_loop().time() + self._start_seconds
                limit.reschedule(self._until if job.waiting else min(self._until, soon))
        elif not job.waiting and self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._pace.ended()

    def _first(self) -> _Job | None:
        return next(iter(self._jobs.values()), None)

    async def _work(self) -> None:
        """Compile jobs until the queue is empty."""
        while (job := self._first()) is not None:
            try:
                done = await self._compile(job)
            except EngineError as error:
                done = error
            except Exception as error:  # a bug here must not end other jobs
                logger.exception("a grammar cannot be compiled")
                done = EngineError(f"the grammar compiler failed: {error!r}")
            finally:
                del self._jobs[job.key]
                self._pace.ended()
            _settle(job, done)

    async def _compile(self, job: _Job) -> Compiled | str | EngineError:
        """Return a job's result, and cache it unless the job was given up."""
        if self._process is None or self._process.returncode is not None:
            await self._kill()
            await self._start()
        patience = self._config.grammar_timeout
        try:
            async with asyncio.timeout(patience) as self._limit:
                self._until = self._limit.when() or 0.0
                self._set_limit(job)  # callers may have left
                try:
                    answer = await self._ask(job.grammar)
                finally:
                    self._limit = None
        except TimeoutError:
            await self._kill()
            if job.waiting and asyncio.get_running_loop().time() < self._until:
                return await self._compile(job)  # it was given up, and then requested again
            return f"{PLACE} took longer than {patience:g} s to compile"
        except EngineError as error:
            await self._kill()
            logger.warning("while compiling a grammar: %s", error)
            job.deaths += 1
            answer = Answer(error=f"{PLACE} is too much to compile")
            if job.deaths < MAX_DEATHS:
                return await self._compile(job) if job.waiting else error
        if answer.fault is not None:
            return EngineError(f"the grammar compiler failed: {answer.fault}")
        done = Compiled(job.key, answer.data) if answer.error is None else answer.error
        size = len(answer.data) if answer.error is None else len(answer.error)
        self._done.put(job.key, done, size + OVERHEAD)
        return done

    async def _start(self) -> None:
        """Start the process and wait until it is ready; raises EngineError if that fails."""
        began = time.monotonic()
        command, environment = python_module("weft.serving.engine.grammar.worker")
        self._process = await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        patience = self._config.load_stall_timeout
        try:
            async with asyncio.timeout(patience):
                await self._ask(Vocabulary(self._config, self._vocab_size))
            self._start_seconds = time.monotonic() - began
        except TimeoutError:
            await self._kill()
            raise EngineError(f"the grammar compiler did not start within {patience:g} s") from None
        except BaseException:
            await self._kill()
            raise

    async def _ask(self, message: Any) -> Answer:
        """Return the process's answer; raises EngineError if the process dies."""
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


def _settle(job: _Job, done: Compiled | str | EngineError) -> None:
    if not job.done.done():
        job.done.set_result(done)


def framed(message: Any) -> bytes:
    """Return a message for the pipe: its length, then MessagePack."""
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(HEAD, "little") + data


class LruCache(Generic[Value]):
    """A cache of the most recently used entries, bounded by their total size.

    Two caches with the same calls have the same entries.

    Args:
        room: maximum sum of sizes. The newest entry stays even if it is larger.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._entries: OrderedDict[Hashable, tuple[Value, int]] = OrderedDict()
        self._size = 0

    def get(self, key: Hashable) -> Value | None:
        """Return an entry's value and count it as used; None if there is no such entry."""
        if key not in self._entries:
            return None
        self._entries.move_to_end(key)
        return self._entries[key][0]

    def put(self, key: Hashable, value: Value, size: int) -> None:
        """Add or replace an entry, and drop the least recently used ones if room is short."""
        if key in self._entries:
            self._size -= self._entries.pop(key)[1]
        self._entries[key] = value, size
        self._size += size
        while self._size > self._room and len(self._entries) > 1:
            self._size -= self._entries.popitem(last=False)[1][1]
