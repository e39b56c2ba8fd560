"""The API process's client of one engine core: the core's process, sockets and requests.

    spawn ──► load ──────► serve ──────► close
              "loading"    "ready"       "dead", or "stalled" before

A client passes through these states once; supervisor.py replaces it by a new one. Nothing waits
forever: if the core ends, fails or is stuck, each of its streams ends with an EngineError.
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
from weft.serving.engine.grammar.cache import LruCache
from weft.serving.engine.grammar.compiler import ROOM
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

END_GRACE = 1.0  # seconds for the sockets to close
ABORT_GRACE = 2.0  # seconds for a core to abort all requests and end
TURN = 32  # messages handled before readers run, so that piled-up outputs reach them merged
LAST_WORDS = 0.2  # seconds for the last messages after a core has ended
STEADY = 60.0  # seconds after which an idle core counts as working

_decoder = msgspec.msgpack.Decoder(FromCore)

logger = logging.getLogger(__name__)


class CoreClient:
    """Starts one engine core and talks to it.

    Args:
        config: this core's settings.

    Attributes:
        config: as given; it may change until `spawn`.
        name: the core's name in messages.
        status: see the module's text; "stalled" if no step finished for `stall_timeout` seconds
            while there was work.
        info: properties of the loaded model.
        stats: statistics from the last message; counts alone once the core has ended.
        load_seconds: seconds from `spawn` to "ready".
        latest: number of the last request that the core received.
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
        self._grammars: LruCache[bool] = LruCache(ROOM)  # grammars that the core keeps
        self._shutting_down = self._has_answered = False
        self._spawned = self._last_progress = time.monotonic()
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)

    # Requests.

    @property
    def live(self) -> int:
        """Number of requests in the core."""
        return len(self._streams)

    def grammar_bytes(self, another: Compiled) -> int:
        """Return how many bytes the grammars of its requests and another one take together."""
        sizes = dict(s.grammar for s in self._streams.values() if s.grammar is not None)
        return sum((sizes | {another.key: another.size}).values())

    def add(
        self, number: int, request: Add, stream: RequestStream, grammar: Compiled | None = None
    ) -> None:
        """Send a request to the core.

        Args:
            number: the request's number in this API process.
            request: the message to send.
            stream: receives the outputs.
            grammar: the compiled grammar that the request names.
        """
        if grammar is not None and self._grammars.get(grammar.key) is None:
            self._send(grammar)
            self._grammars.put(grammar.key, True, grammar.size)
        self._send(request)  # before the stream is registered: an unsent request must not be live
        if not self._streams:
            self._last_progress = time.monotonic()
        self.latest = number
        self._streams[request.request_id] = stream

    def drop(self, request_id: str) -> None:
        """Abort a request, because nobody reads its stream any more."""
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort((request_id,)))

    def drop_all(self, error: EngineError) -> None:
        """End all streams with an error."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        if streams:
            self._send(Abort(tuple(streams)))

    # Life cycle.

    async def spawn(self, load_model: str, *, in_process: bool = False) -> None:
        """Start the core.

        Args:
            load_model: "module:function" that loads the model.
            in_process: start a thread instead of a process.
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

    async def load(self, announce_port: Callable[[int], None]) -> None:
        """Wait until the core is ready.

        Args:
            announce_port: called with the port where the core waits for other nodes, if it does;
                it may raise EngineError.

        Raises:
            ConfigError, ModelError: the core cannot load the model.
            EngineError: the core ended.
        """
        message = await self._loading_message()
        if isinstance(message, Waiting):
            announce_port(message.port)
            message = await self._loading_message()
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Ready)
        self._remove_directory()  # the core is connected
        self.info = message.info
        self.load_seconds = time.monotonic() - self._spawned
        self.status = "ready"

    async def _loading_message(self) -> FromCore:
        """Return the next message of a core that is loading; raises the errors of `load`."""
        assert self._core is not None
        receive = self._receive()
        await asyncio.wait((receive, self._core.ended), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((receive,), timeout=LAST_WORDS)
        if not receive.done():
            how = self._core.ended.result() or "ended"
            raise EngineError(f"{self.name} {how} while it was loading")
        message: FromCore = _decoder.decode(receive.result())
        return message

    async def serve(self) -> None:
        """Pass the core's outputs to their streams until the core has shut down on request.

        Raises:
            EngineError: the core ended by itself, failed or is stuck.
        """
        self._last_progress = time.monotonic()
        failure = EngineError(f"{self.name} has shut down")
        try:
            await self._relay()
        except EngineError as error:
            failure = error
            raise
        except Exception as error:
            failure = EngineError(f"{self.name} sent an invalid message; see the log")
            logger.critical("an invalid message from the engine", exc_info=error)
            raise failure from error
        finally:
            if self.status != "stalled":
                self.status = "dead"
            self.stats = self.stats.counted()
            self.drop_all(failure)

    @property
    def waited(self) -> float:
        """Seconds without a finished step while there was work."""
        return time.monotonic() - self._last_progress if self._streams else 0.0

    @property
    def works(self) -> bool:
        """True if the core has answered a request, or stayed ready for a while."""
        steady = self.load_seconds > 0 and self.age > self.load_seconds + STEADY
        return self._has_answered or steady

    @property
    def age(self) -> float:
        """Seconds since `spawn`."""
        return time.monotonic() - self._spawned

    async def shutdown(self, *, drain: bool, timeout: float) -> None:
        """Shut the core down. You may call it again with a shorter timeout.

        Args:
            drain: let requests finish; else they end with "abort".
            timeout: seconds until requests are aborted. Soon after, the core is killed.
        """
        self._shutting_down = True
        for patience, message in ((timeout, Shutdown(drain)), (ABORT_GRACE, Shutdown(False))):
            if self._core is not None and not self._core.ended.done():
                if drain and not message.drain and self.live:
                    logger.warning("requests cut off after %g s: %d", timeout, self.live)
                self._send(message)
                await asyncio.wait((self._core.ended,), timeout=patience)
        await self._kill()

    async def close(self) -> None:
        """Kill the core if it still runs, and release everything; `serve` must have returned."""
        if self.status != "stalled":
            self.status = "dead"
        await self._kill()
        self._remove_directory()
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        if isinstance(self._core, CoreThread):
            self._core.leave()
        else:
            # ZeroMQ sometimes waits forever for a killed process; do not wait with it.
            ending = threading.Thread(target=self._context.term, name="weft-zmq", daemon=True)
            ending.start()
            ending.join(END_GRACE)

    async def _kill(self) -> None:
        if self._core is not None and not self._core.ended.done():
            self._send(Shutdown(drain=False))  # a thread cannot be killed, only asked
            await self._core.kill()

    async def _relay(self) -> None:
        """Pass outputs on until the core ends or is stuck; raises the errors of `serve`."""
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
                # If this process did not run (a suspended node), the core may not have run either.
                self._last_progress += max(0.0, time.monotonic() - before - tick)
            if receive.done():
                for _ in range(TURN):
                    message = _decoder.decode(receive.result())
                    if isinstance(message, Failed):
                        raise EngineError(self._named(message.message))
                    assert isinstance(message, Outputs)
                    self._handle(message)
                    receive = self._receive()
                    if not receive.done():
                        break
            elif core.ended.done():
                how = core.ended.result()
                if how is None and self._shutting_down:
                    return
                raise EngineError(f"{self.name} {how or 'ended by itself'}")
            # A message may have arrived and not be handled yet; it may be progress.
            if not receive.done() and self._is_stalled():
                await self._end_stalled(core)

    def _named(self, message: str) -> str:
        return message if self.config.dp == 1 else f"{self.name}: {message}"

    def _receive(self) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self._inbox.recv())

    def _handle(self, message: Outputs) -> None:
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
            except Exception:  # a bug in detokenizing; other requests must go on
                logger.exception("request %s: its output cannot be handled", output.request_id)
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
                if output.finish_reason is None:  # a stop string, which the core does not see
                    self._send(Abort((output.request_id,)))

    def _is_stalled(self) -> bool:
        return self.waited > self.config.stall_timeout

    async def _end_stalled(self, core: Core) -> None:
        """End all streams and kill the stuck core, with its stacks on stderr."""
        error = EngineError(f"{self.name} is stuck: no step in {self.config.stall_timeout:g} s")
        self.status = "stalled"
        self.drop_all(error)
        await core.kill(dump=True)
        raise error

    def _send(self, message: ToCore) -> None:
        """Send without waiting; does nothing if the core is gone (`serve` notices)."""
        if not self._outbox.closed:
            with suppress(zmq.Again):
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    def _remove_directory(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None
