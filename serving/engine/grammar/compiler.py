"""Compiles requests' grammars in other processes, with limits and a cache.

The compiler process (worker.py) starts with the first grammar. It forks a process for each attempt,
so an attempt can take no more than its processor time, and its end costs nothing. The lanes
(lanes.py) decide which grammar is next. If an attempt dies, the grammar gets one more, because it
may be innocent. If the compiler process itself dies, a new one takes over.

The cache also keeps rejections, so that a bad grammar costs its time once. When the last waiting
request leaves, its grammar is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from itertools import count
from typing import Any

import msgspec

from weft.errors import EngineError, RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.grammar.cache import LruCache
from weft.serving.engine.grammar.lanes import PLACE, Job, Lane
from weft.serving.engine.grammar.messages import HEAD, Answer, Start, Stop, Vocabulary, framed
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.retry_after import FinishRate
from weft.serving.engine.sampling_params import Grammar
from weft.serving.executor.child_process import how_it_ended, python_module

ROOM = 256 << 20
"""Bytes of compiled grammars to keep. Each engine core keeps the same grammars as this process."""
OVERHEAD = 256
"""Bytes of a cache entry, beside the grammar or error itself."""
MAX_DEATHS = 2
"""Number of processes that may die over one grammar before the grammar is rejected."""
LANES = (0.0075, 0.03, 0.15, 1.0)
"""Processor time in each lane, as a part of `--grammar-timeout`."""
NICE = 3
"""Reduction of the priority in all lanes but the first: half of the processor time under load."""
PATIENCE = 2.0
"""Time that a request waits for its grammar, in units of `--grammar-timeout`."""
SHARE = 4
"""A key may have 1 / SHARE of the waiting grammars."""

_answer = msgspec.msgpack.Decoder(Answer)

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars, one in each lane. Runs on one event loop.

    Args:
        config: the engine's settings.
        vocab_size: number of columns of the model's logits.
    """

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._done: LruCache[Compiled | str] = LruCache(ROOM)
        self._jobs: dict[bytes, Job] = {}
        self._owners: Counter[str] = Counter()  # their job counts
        self._lanes = [Lane(config.grammar_timeout * part) for part in LANES]
        self._numbers = count(1)
        self._serving: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None  # once it is ready
        self._pace = FinishRate()
        self._closed = False

    async def compile(self, grammar: Grammar, owner: str = "") -> Compiled:
        """Return a grammar in the form for the engine core. Cancel the call to stop waiting.

        Args:
            grammar: the grammar.
            owner: the client's API key, in any form; owners take turns. "" without keys.

        Raises:
            RequestError: the grammar cannot be compiled. With status 429, too many grammars wait
                now.
            EngineError: the compiler process cannot run.
        """
        parts = (grammar.kind, grammar.before, grammar.header, grammar.instead, grammar.text)
        text = " ".join(parts)
        key = hashlib.sha256(text.encode()).digest()
        done: Compiled | str | EngineError | None = self._done.get(key)
        if done is None:
            job = self._jobs.get(key) or self._enqueue(key, grammar, owner)
            done = await self._wait(job, grammar.param)
        if isinstance(done, EngineError):
            raise done
        if isinstance(done, str):
            message = done.replace(PLACE, grammar.param)
            raise RequestError(message, param=grammar.param, code="invalid_grammar")
        return done

    async def close(self) -> None:
        """End the process and all jobs."""
        self._closed = True
        for job in list(self._jobs.values()):
            self._settle(job, EngineError("the engine is shutting down"))
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    def _enqueue(self, key: bytes, grammar: Grammar, owner: str) -> Job:
        if self._closed:
            raise EngineError("the engine is shutting down")
        most = self._config.max_queue
        if len(self._jobs) >= most:
            raise self._busy(
                grammar.param,
                f"{len(self._jobs)} grammars are being compiled or waiting; the maximum is {most}",
            )
        share = max(1, most // SHARE)
        if owner and self._owners[owner] >= share:
            raise self._busy(
                grammar.param,
                f"this API key has {self._owners[owner]} grammars being compiled or waiting; "
                f"the maximum is {share}",
            )
        job = self._jobs[key] = Job(key, grammar, owner)
        self._owners[owner] += 1
        self._lanes[0].put(job)
        self._pace.began()
        self._fill()
        return job

    def _busy(self, param: str, why: str) -> RequestError:
        return RequestError(
            f"{why}; try again later",
            param=param,
            code="queue_full",
            status=429,
            retry_after=self._pace.retry_after(),
        )

    async def _wait(self, job: Job, param: str) -> Compiled | str | EngineError:
        patience = PATIENCE * self._config.grammar_timeout
        if self._process is None:
            patience += self._config.load_stall_timeout  # the process is starting
        job.waiting += 1
        try:
            async with asyncio.timeout(patience):
                return await asyncio.shield(job.done)
        except TimeoutError:
            raise self._busy(param, f"{param} was not compiled within {patience:g} s") from None
        finally:
            job.waiting -= 1
            if not job.waiting and not job.done.done():
                self._drop(job)

    def _drop(self, job: Job) -> None:
        """Give up a job, because nobody waits for it."""
        self._forget(job)
        lane = self._lanes[job.lane]
        if lane.job is not job:
            lane.discard(job)
            return
        lane.job = None
        if self._process is not None:
            self._send(Stop(job.number))
        self._fill()

    def _forget(self, job: Job) -> None:
        if self._jobs.pop(job.key, None) is not None:
            self._owners[job.owner] -= 1
            self._owners += Counter()  # drops owners without jobs
            self._pace.ended()

    def _settle(self, job: Job, done: Compiled | str | EngineError) -> None:
        """Give a job's result to its callers, and cache it unless it is an EngineError."""
        self._forget(job)
        if not isinstance(done, EngineError):
            size = len(done) if isinstance(done, str) else done.size
            self._done.put(job.key, done, size + OVERHEAD)
        if not job.done.done():
            job.done.set_result(done)

    # The process.

    def _fill(self) -> None:
        """Give each free lane its next grammar. Start the process if there is none."""
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        elif self._process is not None:
            for i, lane in enumerate(self._lanes):
                if (job := lane.take()) is not None:
                    job.number = next(self._numbers)
                    nice = NICE if i else 0
                    self._send(Start(job.number, job.grammar, lane.seconds, nice))

    async def _serve(self) -> None:
        """Run the process, and another if it dies, while there are jobs."""
        while self._jobs and not self._closed:
            process = None
            try:
                process = await self._start()
                self._process = process
                self._fill()
                while True:
                    self._end(await _receive(process))
            except EngineError as error:
                logger.warning("%s", error)
                self._recover(error)
            except Exception as error:  # a bug here must not leave requests waiting
                logger.exception("grammars cannot be compiled")
                self._fail(EngineError(f"the grammar compiler failed: {error!r}"))
            finally:
                self._process = None
                if process is not None:
                    await _kill(process)

    def _recover(self, error: EngineError) -> None:
        """Put back a dead process's jobs; all jobs fail if it never was ready."""
        if self._process is None:
            self._fail(error)
        for lane in self._lanes:
            job, lane.job = lane.job, None
            if job is None:
                continue
            job.deaths += 1
            if job.deaths < MAX_DEATHS:
                lane.put(job)
            else:
                self._settle(job, error)

    def _fail(self, error: EngineError) -> None:
        self._lanes = [Lane(lane.seconds) for lane in self._lanes]
        for job in list(self._jobs.values()):
            self._settle(job, error)

    def _end(self, answer: Answer) -> None:
        """Take an attempt's result."""
        for lane in self._lanes:
            job = lane.job
            if job is not None and job.number == answer.number:  # else nobody waits for it now
                lane.job = None
                done = self._result(job, answer)
                if done is None:
                    self._lanes[job.lane].put(job)
                else:
                    self._settle(job, done)
        self._fill()

    def _result(self, job: Job, answer: Answer) -> Compiled | str | EngineError | None:
        """Return a job's result; None if it needs another attempt."""
        if answer.fault is not None:
            return EngineError(f"the grammar compiler failed: {answer.fault}")
        if answer.late:
            job.lane += 1
            if job.lane < len(self._lanes):
                return None
            seconds = self._config.grammar_timeout
            return f"{PLACE} took more than {seconds:g} s of processor time to compile; simplify it"
        if answer.died is not None:
            logger.warning("while compiling a grammar: the process %s", answer.died)
            job.deaths += 1
            return None if job.deaths < MAX_DEATHS else f"{PLACE} is too much to compile"
        return answer.error or Compiled(job.key, answer.tag, answer.size, answer.slow)

    async def _start(self) -> asyncio.subprocess.Process:
        """Start the process and wait until it is ready; raises EngineError if that fails."""
        command, environment = python_module("weft.serving.engine.grammar.worker")
        process = await asyncio.create_subprocess_exec(
            *command,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},  # it forks, so it must be one thread
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        patience = self._config.load_stall_timeout
        try:
            async with asyncio.timeout(patience):
                _write(process, Vocabulary(self._config, self._vocab_size))
                await _receive(process)
        except TimeoutError:
            await _kill(process)
            raise EngineError(f"the grammar compiler did not start within {patience:g} s") from None
        except BaseException:
            await _kill(process)
            raise
        return process

    def _send(self, message: Start | Stop) -> None:
        assert self._process is not None
        _write(self._process, message)


def _write(process: asyncio.subprocess.Process, message: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(framed(message))  # if the process has died, `_receive` says so


async def _receive(process: asyncio.subprocess.Process) -> Answer:
    """Return the process's next answer; raises EngineError if the process dies."""
    assert process.stdout is not None
    try:
        head = await process.stdout.readexactly(HEAD)
        data = await process.stdout.readexactly(int.from_bytes(head, "little"))
    except (asyncio.IncompleteReadError, ConnectionError):
        how = how_it_ended(await process.wait()) or "has ended"
        raise EngineError(f"the grammar compiler {how}") from None
    return _answer.decode(data)


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
