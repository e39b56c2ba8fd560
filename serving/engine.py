"""AsyncEngine: prompts in, streams of text out. The front of the engine core.

The core runs in a process of its own (or in a thread, for the `LLM` class and
tests: the same loop behind the same sockets). Here are the parts that work in
text, and what is true of all requests: limits, the queue, and the core's
health. Nothing waits for ever: when the core ends, fails or is stuck, every
stream ends with an EngineError.

Everything but `encode` runs on one event loop; an AsyncEngine is not
thread-safe.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from itertools import count
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from weft.errors import ConfigError, EngineError, RequestError
from weft.serving.channel import MAX_PATH, addresses
from weft.serving.config import EngineConfig
from weft.serving.launch import Core, CoreProcess, CoreThread
from weft.serving.limits import check_request
from weft.serving.messages import (
    Abort,
    Add,
    EngineInfo,
    EngineStats,
    Failed,
    FromCore,
    Outputs,
    Ready,
    Shutdown,
    ToCore,
)
from weft.serving.sampling_params import SamplingParams
from weft.serving.stream import Delta, Stream
from weft.serving.tokenizer import Tokenizer

Status = Literal["ready", "stalled", "draining", "dead"]

LOAD_MODEL = "weft.serving.loading:load_model"
LONG_PROMPT = 4096  # characters from which on a prompt is encoded in a thread
ABORT_GRACE = 2.0  # seconds for a core to abort all requests and end
TURN = 32  # messages that are taken in before readers run: what has piled up reaches them merged
LAST_WORDS = 0.2  # seconds that messages of a core that has ended may take to arrive

__all__ = ["AsyncEngine", "Delta", "Status"]


class AsyncEngine:
    """Serves one model; made by `start`.

    Attributes:
        config: as given.
        info: of the model that the core has loaded.
        tokenizer: of the model.
        stats: as of the core's last message.
        status: "ready"; "draining" after `shutdown`; "stalled" when no step was done for
            `stall_timeout` seconds with work at hand; "dead" when the core has ended. The last
            two are final.
        failure: what went wrong, once the core has ended otherwise than by `shutdown`.
    """

    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer
    stats: EngineStats
    status: Status
    failure: EngineError | None

    @classmethod
    async def start(
        cls, config: EngineConfig, *, in_process: bool = False, runner_factory: str = LOAD_MODEL
    ) -> AsyncEngine:
        """Load the model; returns when requests can be served.

        Args:
            config: of the engine.
            in_process: run the core in a thread instead of a process.
            runner_factory: "module:function" that stands in for `loading.load_model`.

        Raises:
            ConfigError, ModelError: the core says that it cannot load the model.
            EngineError: the core ended.
        """
        engine = cls(config)
        try:
            await engine._start(in_process, runner_factory)
        except BaseException:
            await engine._close()
            raise
        return engine

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.stats = EngineStats()
        self.status = "dead"
        self.failure = None
        self._core: Core | None = None
        self._streams: dict[str, Stream] = {}
        self._ids = count()
        self._seeds = random.Random(config.seed)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._last_progress = 0.0
        self._listener: asyncio.Task[None] | None = None
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = zmq.Context(self._context).socket(zmq.PUSH)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)

    # Requests.

    @property
    def places(self) -> int:
        """Most requests that run or wait at once."""
        return self.info.max_num_seqs + self.config.max_queue

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return len(self._streams)

    def validate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> SamplingParams:
        """Check a request against the model and the queue.

        Returns:
            `params` with max_tokens and seed filled in.

        Raises:
            RequestError: this request cannot be served; with status 429, not now.
        """
        params = check_request(prompt_token_ids, params, self.info)
        if len(self._streams) >= self.places:
            raise RequestError(
                f"{len(self._streams)} requests are running or waiting, of at most {self.places}; "
                "try again later",
                code="queue_full",
                status=429,
            )
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=self._seeds.getrandbits(63))
        return params

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[Delta, None]:
        """Serve one request (`params.n` is ignored: n answers are n calls).

        Closing or cancelling the iterator aborts the request.

        Args:
            prompt: text, or token ids.
            params: how to sample and when to stop.
            priority: lower is served first.

        Yields:
            What is new; the last one has a finish_reason.

        Raises:
            RequestError: see `validate`.
            EngineError: the engine is shutting down, or has failed.
        """
        if isinstance(prompt, str):
            prompt = await self.encode(prompt)
        params = self.validate(prompt, params)
        self._check_serving()
        request_id = str(next(self._ids))
        if not self._streams:
            self._last_progress = time.monotonic()
        stream = self._streams[request_id] = Stream(self.tokenizer, params)
        try:
            self._send(
                Add(
                    request_id,
                    list(map(int, prompt)),
                    params,
                    self._end_token_ids(params),
                    priority,
                    time.monotonic(),
                )
            )
            while True:
                delta = await stream.next()
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            if self._streams.pop(request_id, None) is not None:
                self._send(Abort((request_id,)))

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; a long one is encoded in a thread."""
        if len(text) < LONG_PROMPT:
            return self.tokenizer.encode(text)
        return await asyncio.to_thread(self.tokenizer.encode, text)

    async def shutdown(self, *, drain: bool = True, timeout: float = 30.0) -> None:
        """End the engine. May be called again, to be less patient.

        Args:
            drain: let requests finish; else they end with "abort".
            timeout: seconds until requests are aborted, and soon after the core is ended by force.
        """
        if self.status == "ready":
            self.status = "draining"
        for patience, message in ((timeout, Shutdown(drain)), (ABORT_GRACE, Shutdown(False))):
            if self._core is not None and not self._core.ended.done():
                self._send(message)
                await asyncio.wait((self._core.ended,), timeout=patience)
        await self._close()

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.tokenizer.eos_token_ids
        return (*own, *params.stop_token_ids)

    def _check_serving(self) -> None:
        if self.status == "draining":
            raise EngineError("the engine is shutting down")
        if self.status != "ready":
            raise EngineError(f"the engine is {self.status}")

    # The core.

    async def _start(self, in_process: bool, load_model: str) -> None:
        base, directory = f"inproc://{uuid.uuid4().hex}", None
        if not in_process:
            directory = tempfile.mkdtemp(prefix="weft-")  # only this user may enter it
            if len(directory) > MAX_PATH - len("/from-core"):
                raise ConfigError(f"TMPDIR is too long a path for a unix socket: {directory}")
            base = f"ipc://{directory}"
        try:
            to_core, from_core = addresses(base)
            self._outbox.bind(to_core)
            self._inbox.bind(from_core)
            if in_process:
                context = zmq.Context(self._context)
                self._core = CoreThread(self.config, load_model, base, context)
            else:
                self._core = await CoreProcess.start(self.config, load_model, base)
            self.tokenizer = await asyncio.to_thread(_load_tokenizer, self.config)
            self.info = await self._ready(self._core)
        finally:
            if directory is not None:  # the core is connected, or will never be
                shutil.rmtree(directory, ignore_errors=True)
        self.status = "ready"
        self._last_progress = time.monotonic()
        self._listener = asyncio.create_task(self._listen(self._core))

    async def _ready(self, core: Core) -> EngineInfo:
        """Wait for the core's first message."""
        receive = self._receive()
        await asyncio.wait((receive, core.ended), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait((receive,), timeout=LAST_WORDS)
        if not receive.done():
            how = core.ended.result() or "ended"
            raise EngineError(f"the engine {how} while it was loading")
        message = self._decoder.decode(receive.result())
        if isinstance(message, Failed):
            raise message.error
        assert isinstance(message, Ready)
        return message.info

    async def _listen(self, core: Core) -> None:
        """Hand on what the core sends, until it ends or is stuck; then end every stream."""
        failure: EngineError | None = EngineError(
            "the engine's messages make no sense; see the log"
        )
        try:
            failure = await self._relay(core)
        finally:
            if self.status != "stalled":
                self.status = "dead"
            self.failure = failure
            self._end_streams(failure or EngineError("the engine has shut down"))

    async def _relay(self, core: Core) -> EngineError | None:
        """Hand on what the core sends, until it ends or is stuck; returns what went wrong."""
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
                        return EngineError(message.message)
                    assert isinstance(message, Outputs)
                    self._take(message)
                    receive = self._receive()
                    if not receive.done():
                        break
            elif core.ended.done():
                how = core.ended.result()
                if how is None and self.status == "draining":
                    return None
                return EngineError(f"the engine {how or 'ended by itself'}")
            # What has come and is not handled yet may well be progress.
            if not receive.done() and self._is_stalled():
                return await self._give_up(core)

    def _receive(self) -> asyncio.Future[bytes]:
        return asyncio.ensure_future(self._inbox.recv())

    def _take(self, message: Outputs) -> None:
        if message.stats.steps != self.stats.steps or not self._streams:
            self._last_progress = time.monotonic()
        self.stats = message.stats
        for output in message.outputs:
            stream = self._streams.get(output.request_id)
            if stream is not None and stream.push(output):
                del self._streams[output.request_id]
                if output.finish_reason is None:  # a stop string: the core does not know
                    self._send(Abort((output.request_id,)))

    def _is_stalled(self) -> bool:
        return time.monotonic() - self._last_progress > self.config.stall_timeout

    async def _give_up(self, core: Core) -> EngineError:
        """The core is stuck: tell everyone, and end it, with its stacks on stderr."""
        error = EngineError(f"the engine is stuck: no step in {self.config.stall_timeout:g} s")
        self.status = "stalled"
        self._end_streams(error)
        await core.kill(dump=True)
        return error

    def _end_streams(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def _send(self, message: ToCore) -> None:
        """Send without waiting; to a core that is gone, nothing (the listener notices)."""
        if not self._outbox.closed:
            with suppress(zmq.Again):
                self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _close(self) -> None:
        """End the core by force if it still runs, and release everything."""
        if self._core is not None and not self._core.ended.done():
            self._send(Shutdown(drain=False))  # all that a thread can be told
            await self._core.kill()
        if self._listener is not None:
            await self._listener
        self._inbox.close(linger=0)
        self._outbox.close(linger=0)
        if self._core is None or self._core.ended.done():  # else a thread has sockets open
            self._context.term()


def _load_tokenizer(config: EngineConfig) -> Tokenizer:
    from weft.models.checkpoint import locate

    model = locate(config.model)
    return Tokenizer.load(config.tokenizer or model, model=model)
