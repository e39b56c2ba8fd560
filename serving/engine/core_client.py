"""One engine core as the front sees it: its process, its sockets, and the requests it has.

    spawn ──► load ──────► serve ──────► close
              "loading"    "ready"       "dead", or "stalled" before

It goes that way once; another core takes its place (engine.py). Nothing waits for ever: when the
core ends, fails or is stuck, each of its streams ends with an EngineError.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from weft.errors import ConfigError, EngineError, RequestError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_channel import MAX_PATH, addresses
from weft.serving.engine.core_process import Core, CoreProcess, CoreThread
from weft.serving.engine.grammar.compiler import ROOM, LruCache
from weft.serving.engine.protocol import (
    Abort,
    Add,
    Compiled,
    EngineInfo,
    EngineStats,
    FromCore,
    Outputs,
    Ready,
    Shutdown,
    ToCore,
    Waiting,
)
from weft.serving.engine.request_stream import RequestStream
from weft.serving.executor.child_process import Failed

END_GRACE = 1.0  # seconds for the sockets to be gone
ABORT_GRACE = 2.0  # seconds for a core to abort all requests and end
TURN = 32  # messages that are taken in before readers run: what has piled up reaches them merged
LAST_WORDS = 0.2  # seconds that messages of a core that has ended may take to arrive
STEADY = 60.0  # seconds after which a core that has had nothing to do counts as working

logger = logging.getLogger(__name__)


class CoreClient:
    """A core that is yet to be spawned.

    Args:
        config: of this core.

    Attributes:
        config: as given; until `spawn` it may change.
        name: in messages.
        status: see the module's text; "stalled" when no step was done for `stall_timeout` seconds
            with work at hand.
        info: of the model that it has loaded.
        stats: as of its last message; of one that has ended, what it counted.
        load_seconds: from `spawn` to "ready".
        latest: number of the last request that it was given.
    """

    info: EngineInfo

    def __init__(self, config: EngineConfig) -> None:
        self.name = "the engine" if config.dp == 1 else f"engine core {config.replica.number}"
        self.status: Literal["loading", "ready", "stalled", "dead"] = "loading"
        self.stats = EngineStats()
        self.load_seconds = 0.0
        self.latest = -1
        self.config = config
        self._core: Core | None = None
        self._directory: str | None = None
        self._streams: dict[str, RequestStream] = {}
        self._grammars: LruCache[bool] = LruCache(ROOM)  # those that the core keeps
        self._told_to_end = self._has_answered = False
        self._spawned = self._last_progress = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)

    # Its requests.

    @property
    def live(self) -> int:
        """Requests that it has."""
        return len(self._streams)

    def grammar_bytes(self, another: Compiled) -> int:
        """Bytes of the grammars that its requests have, with another one."""
        sizes = dict(s.grammar for s in self._streams.values() if s.grammar is not None)
        return sum((sizes | {another.key: len(another.data)}).values())

    def add(
        self, number: int, request: Add, stream: RequestStream, grammar: Compiled | None = None
    ) -> None:
        """Give it a request, which is the front's so manieth, with the grammar that it names."""
        if grammar is not None and self._grammars.get(grammar.key) is None:
            self._send(grammar)
            self._grammars.put(grammar.key, True, len(grammar.data))
        self._send(request)  # what cannot be sent is not there
        if not self._streams:
            self._last_progress = time.monotonic()
        self.latest = number
        self._streams[request.request_id] = stream

    def drop(self, request_id: str) -> None:
        """Nobody reads that stream any more."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort((request_id,)))

    def drop_all(self, error: EngineError) -> None:
        """End all streams with an error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        if streams:
            self._send(Abort(tuple(streams)))

    # Its life.

    async def spawn(self, load_model: str, *, in_process: bool = False) -> None:
        """Start it.

        Args:
            load_model: "module:function" that loads the model.
            in_process: in a thread instead of a process.
        """
        base = f"inproc://{uuid.uuid4().hex}"
        if not in_process:
            self._directory = tempfile.mkdtemp(prefix="weft-")  # only this user may enter it
            if len(self._directory) > MAX_PATH - len("/from-core"):
                raise ConfigError(f"TMPDIR is too long a path for a unix socket: {self._directory}")
            base = f"ipc://{self._directory}"
        to_core, from_core = addresses(base)
        self._outbox.bind(to_core)
        self._inbox.bind(from_core)
        self._spawned = time.monotonic()
        if in_process:
            self._core = CoreThread(self.config, load_model, base, self._context)
        else:
            self._core = await CoreProcess.start(self.config, load_model, base)

    async def load(self, lend: Callable[[int], None]) -> None:
        """Wait until it is ready.

        Args:
            lend: told at which port it waits for machines, if it does; may raise EngineError.

        Raises:
            ConfigError, ModelError: it says that it cannot load the model.
            EngineError: it ended.
        """
        message = await self._first_words()
        if isinstance(message, Waiting):
            lend(message.port)
            message = await self._first_words()
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Ready)
        self._remove_directory()  # the core is connected
        self.info = message.info
        self.load_seconds = time.monotonic() - self._spawned
        self.status = "ready"

    async def _first_words(self) -> FromCore:
        """What it says while it is loading; raises as `load`."""
        assert self._core is not None
        receive = self._receive()
        await asyncio.wait((receive, self._core.ended), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((receive,), timeout=LAST_WORDS)
        if not receive.done():
            how = self._core.ended.result() or "ended"
            raise EngineError(f"{self.name} {how} while it was loading")
        message: FromCore = self._decoder.decode(receive.result())
        return message

    async def serve(self) -> None:
        """Hand on what it sends, until it has been told to end and does.

        Raises:
            EngineError: it ended, failed or is stuck.
        """
        self._last_progress = time.monotonic()
        failure = EngineError(f"{self.name} has shut down")
        try:
            await self._relay()
        except EngineError as error:
            failure = error
            raise
        except Exception as error:
            failure = EngineError(f"{self.name}'s messages make no sense; see the log")
            logger.critical("a message from the engine", exc_info=error)
            raise failure from error
        finally:
            if self.status != "stalled":
                self.status = "dead"
            self.stats = self.stats.counted()
            self.drop_all(failure)

    @property
    def waited(self) -> float:
        """Seconds without a step, with work at hand."""
        return time.monotonic() - self._last_progress if self._streams else 0.0

    @property
    def works(self) -> bool:
        """Whether it has served, as far as one can tell, and not only loaded."""
        steady = self.load_seconds > 0 and self.age > self.load_seconds + STEADY
        return self._has_answered or steady

    @property
    def age(self) -> float:
        """Seconds since `spawn`."""
        return time.monotonic() - self._spawned

    async def shutdown(self, *, drain: bool, timeout: float) -> None:
        """Tell it to end, and see to it. May be called again, to be less patient.

        Args:
            drain: let requests finish; else they end with "abort".
            timeout: seconds until requests are aborted, and soon after it is ended by force.
        """
        self._told_to_end = True
        for patience, message in ((timeout, Shutdown(drain)), (ABORT_GRACE, Shutdown(False))):
            if self._core is not None and not self._core.ended.done():
                if drain and not message.drain and self.live:
                    logger.warning("requests cut off after %g s: %d", timeout, self.live)
                self._send(message)
                await asyncio.wait((self._core.ended,), timeout=patience)
        await self._kill()

    async def close(self) -> None:
        """End it by force if it still runs, and release everything; `serve` must have returned."""
        if self.status != "stalled":
            self.status = "dead"
        await self._kill()
        self._remove_directory()
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        if isinstance(self._core, CoreThread):
            self._core.leave()
        else:
            # ZeroMQ has been seen to wait for ever for a process that was killed; nobody else must.
            ending = threading.Thread(target=self._context.term, name="weft-zmq", daemon=True)
            ending.start()
            ending.join(END_GRACE)

    async def _kill(self) -> None:
        if self._core is not None and not self._core.ended.done():
            self._send(Shutdown(drain=False))  # all that a thread can be told
            await self._core.kill()

    async def _relay(self) -> None:
        """Hand on what it sends, until it ends or is stuck; raises as `serve`."""
        core = self._core
        assert core is not None
        tick = min(1.0, self.config.stall_timeout / 4)
        receive = self._receive()
        while True:
            if core.ended.done():
                await asyncio.wait((receive,), timeout=LAST_WORDS)
            else:
                before = time.monotonic()
                await asyncio.wait(
                    (receive, core.ended), timeout=tick, return_when=asyncio.FIRST_COMPLETED
                )
                # When this process does not get to run, nor may the core have (a paused machine).
                self._last_progress += max(0.0, time.monotonic() - before - tick)
            if receive.done():
                for _ in range(TURN):
                    message = self._decoder.decode(receive.result())
                    if isinstance(message, Failed):
                        raise EngineError(self._named(message.message))
                    assert isinstance(message, Outputs)
                    self._take(message)
                    receive = self._receive()
                    if not receive.done():
                        break
            elif core.ended.done():
                how = core.ended.result()
                if how is None and self._told_to_end:
                    return
                raise EngineError(f"{self.name} {how or 'ended by itself'}")
            # What has come and is not handled yet may well be progress.
            if not receive.done() and self._is_stalled():
                await self._give_up(core)

    def _named(self, message: str) -> str:
        return message if self.config.dp == 1 else f"{self.name}: {message}"

    def _receive(self) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self._inbox.recv())

    def _take(self, message: Outputs) -> None:
        if message.stats.steps != self.stats.steps or not self._streams:
            self._last_progress = time.monotonic()
        self.stats = message.stats
        for move in message.moves:
            if (moved := self._streams.get(move.request_id)) is not None:
                moved.timeline.moved(move.running, move.at)
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            try:
                complete = stream.push(output)
            except Exception:  # a fault of ours in making text of it, and no other request's
                logger.exception("request %s: its output cannot be taken in", output.request_id)
                self.drop(output.request_id)
                stream.fail(
                    RequestError(
                        "the answer could not be read; the server's log has the details",
                        code="generation_failed",
                        status=500,
                    )
                )
                continue
            if complete:
                del self._streams[output.request_id]
                self._has_answered |= output.finish_reason != "error"
                if output.finish_reason is None:  # a stop string: the core does not know
                    self._send(Abort((output.request_id,)))

    def _is_stalled(self) -> bool:
        return self.waited > self.config.stall_timeout

    async def _give_up(self, core: Core) -> None:
        """It is stuck: tell everyone, and end it, with its stacks on stderr."""
        error = EngineError(f"{self.name} is stuck: no step in {self.config.stall_timeout:g} s")
        self.status = "stalled"
        self.drop_all(error)
        await core.kill(dump=True)
        raise error

    def _send(self, message: ToCore) -> None:
        """Send without waiting; to a core that is gone, nothing (`serve` notices)."""
        if not self._outbox.closed:
            with suppress(zmq.Again):
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
