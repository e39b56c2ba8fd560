"""AsyncEngine: checked requests in, streams of text out.

The engine is the part of weft that works in text: it checks requests, limits the queue, chooses a
core for each request, and turns the core's tokens into text. The cores run the model; see
supervisor.py for their life and core_client.py for the connection to one. The `LLM` class and tests
run a core in a thread instead of a process, with the same loop behind the same sockets.

Everything but `validate` runs on one event loop; an AsyncEngine is not thread-safe.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from itertools import count

import msgspec

from weft.errors import EngineError, RequestError, WeftError
from weft.models.checkpoint.locate import find
from weft.models.spec.pooling import Pooling, read_pooling
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.checks import CheckedRequest, check_pooled, check_requests
from weft.serving.engine.core_client import CoreClient
from weft.serving.engine.generation_config import GenerationConfig, load_generation_config
from weft.serving.engine.grammar.compiler import GrammarCompiler
from weft.serving.engine.model_files import (
    check_model,
    warn_of_ignored_defaults,
    warn_of_large_tokenizer,
    warn_of_unread_fields,
)
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, Compiled, EngineInfo, EngineStats
from weft.serving.engine.request_stream import Delta, RequestStream, StreamObserver
from weft.serving.engine.retry_after import FinishRate
from weft.serving.engine.sampling_params import Grammar, SamplingParams
from weft.serving.engine.supervisor import LOAD_MODEL, CoreSupervisor, Status
from weft.serving.engine.timeline import Timelines
from weft.serving.engine.tokenizer import Tokenizer, load_tokenizer
from weft.serving.executor.fetch import fetch

LIVE_GRAMMARS = 1 << 30  # bytes of compiled grammars that one core's requests may hold

_NO_OBSERVER = StreamObserver()

__all__ = ["LOAD_MODEL", "AsyncEngine", "Delta", "Status"]


class AsyncEngine:
    """Serves one model; made by `start`.

    Attributes:
        config: the settings, as given.
        tokenizer: the model's tokenizer and chat template.
        pooling: how embeddings are made.
        generation_config: the sampling defaults in force.
        timelines: when requests waited and ran; live requests, and the last that ended.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    pooling: Pooling
    generation_config: GenerationConfig
    timelines: Timelines

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        *,
        in_process: bool = False,
        runner_factory: str = LOAD_MODEL,
        restart: bool = False,
        on_spawned: Callable[[], None] = lambda: None,
    ) -> AsyncEngine:
        """Fetch and load the model; returns when requests can be served.

        Args:
            config: the settings.
            in_process: run the cores in threads instead of processes.
            runner_factory: "module:function" that replaces `loading.load_model`.
            restart: restart a core that has failed. A core that is stuck in a thread cannot be
                ended, and goes on.
            on_spawned: called once the cores' processes exist, or other nodes are awaited.

        Raises:
            ConfigError, ModelError: the model cannot be fetched, or a core cannot load it.
            EngineError: a core ended.
        """
        config = await fetch(config)
        if runner_factory == LOAD_MODEL:
            check_model(config)
            warn_of_unread_fields(config)
        engine = cls(config, CoreSupervisor(config, in_process, runner_factory, restart))
        try:
            await engine._start(on_spawned)
        except BaseException:
            await engine._supervisor.abandon()
            raise
        if runner_factory == LOAD_MODEL:
            warn_of_large_tokenizer(config, engine.tokenizer.vocab_size, engine.info.vocab_size)
        return engine

    def __init__(self, config: EngineConfig, supervisor: CoreSupervisor) -> None:
        self.config = config
        self.timelines = Timelines()
        self._supervisor = supervisor
        self._finish_rate = FinishRate()
        self._ids = count()
        self._seeds = random.Random(config.seed)

    async def _start(self, on_spawned: Callable[[], None]) -> None:
        await self._supervisor.spawn(on_spawned)
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.config)
        self.pooling = await asyncio.to_thread(_pooling, self.config)
        self.generation_config = await asyncio.to_thread(load_generation_config, self.config)
        warn_of_ignored_defaults(self.generation_config)
        await self._supervisor.load()
        self._grammars = GrammarCompiler(self.config, self.info.vocab_size)

    async def shutdown(self, *, drain: bool = True, timeout: float = 30.0) -> None:
        """End the engine. A second call may be less patient than the first.

        Args:
            drain: let requests finish; else they end with "abort".
            timeout: seconds until requests are aborted. Soon after, cores that still run are
                killed.
        """
        self._supervisor.draining = self.failure is None
        await self._grammars.close()
        await self._supervisor.shutdown(drain=drain, timeout=timeout)

    # State.

    @property
    def info(self) -> EngineInfo:
        """Sizes of the loaded model; of the cores' KV caches, the smallest."""
        return self._supervisor.info

    @property
    def failure(self) -> EngineError | None:
        """The error that ended the engine; None while it runs or after `shutdown`."""
        return self._supervisor.failure

    @property
    def restarts(self) -> int:
        """Number of restarts of cores."""
        return self._supervisor.restarts

    @property
    def places(self) -> int:
        """Maximum number of requests that run or wait."""
        return self.config.dp * self.info.max_num_seqs + self.config.max_queue

    @property
    def live(self) -> int:
        """Number of requests that run or wait."""
        return sum(core.live for core in self._supervisor.cores)

    @property
    def stats(self) -> EngineStats:
        """Sums over all cores, from the last message of each."""
        return self._supervisor.stats

    @property
    def serving(self) -> int:
        """Number of cores that serve."""
        return len(self._supervisor.ready)

    @property
    def status(self) -> Status:
        """The state of the engine.

        "ready" while a core serves; "restarting" while no core serves but one will; "draining"
        after `shutdown`. Two states are final: "stalled" if a core did no step for `stall_timeout`
        seconds although it had work, and "dead".
        """
        return self._supervisor.status

    @property
    def waited(self) -> float:
        """Seconds without a step on any core that serves, while each had work."""
        return min((core.waited for core in self._supervisor.ready), default=0.0)

    def check_serving(self) -> None:
        """Raise EngineError if no core serves, with the time to wait if that is known."""
        match self.status:
            case "ready":
                return
            case "draining":
                raise EngineError("the engine is shutting down")
            case "restarting":
                raise EngineError(
                    "the engine has failed and is being started again",
                    retry_after=self._supervisor.seconds_to_wait,
                )
            case status:
                raise EngineError(f"the engine is {status}")

    # Requests.

    def validate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | Pooling,
        cache_salt: str = "",
    ) -> CheckedRequest:
        """Check a request against the model; may be called in any thread.

        Args:
            prompt_token_ids: the prompt.
            params: sampling settings (`n` is ignored: n answers are n requests); or, for an
                embedding, its pooling. Settings that are None get the model's defaults.
            cache_salt: only requests with the same salt share the prefix cache.

        Returns:
            The request as `generate` takes it, with all settings filled in.

        Raises:
            RequestError: the request cannot be served.
        """
        if isinstance(params, Pooling):
            return check_pooled(prompt_token_ids, params.kind, self.info)
        return self.validate_all([prompt_token_ids], params, cache_salt)[0]

    def validate_all(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams, cache_salt: str = ""
    ) -> list[CheckedRequest]:
        """Check requests with common settings; see `validate`. The settings are checked once."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return check_requests(
            *(prompts, params, self.generation_config.defaults, self.info),
            *(self._draw_seed, encode, cache_salt),
        )

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def _check_queue(self) -> None:
        if self.live >= self.places:
            raise self._full(
                f"{self.live} requests are running or waiting; the maximum is {self.places}"
            )

    def _full(self, why: str) -> RequestError:
        return RequestError(
            f"{why}; try again later",
            code="queue_full",
            status=429,
            retry_after=self._finish_rate.retry_after(),
        )

    async def generate(
        self,
        request: CheckedRequest,
        *,
        priority: int = 0,
        deadline: float | None = None,
        owner: str = "",
        visible: frozenset[int] = frozenset(),
        admit: Callable[[], Awaitable[None]] | None = None,
        on_admitted: Callable[[], None] = lambda: None,
        observer: StreamObserver | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """Serve one request. Closing or cancelling the iterator aborts it.

        Args:
            request: made by `validate`.
            priority: lower is served first.
            deadline: time.monotonic() at which the request is given up.
            owner: the client's API key, in any form; owners take turns while grammars wait.
            visible: special tokens whose text the reader needs, such as the marks of a call.
            admit: returns when the request may be queued, even if the queue is full. Without it,
                a full queue refuses the request.
            on_admitted: called once the request waits or runs.
            observer: called with each delta and at the end.

        Yields:
            Deltas; the last one has a finish_reason. An embedding is one delta.

        Raises:
            RequestError: the queue is full (429); the grammar cannot be compiled, or not now
                (429); or the deadline has passed (504).
            EngineError: the engine is shutting down or not ready, or the core has failed.
        """
        observer = observer or _NO_OBSERVER
        try:
            core, id, stream = await self._queue(request, priority, deadline, owner, visible, admit)

            def give_up() -> None:
                stream.fail(_late())
                core.drop(id)

            timer = None if deadline is None else _at(deadline, give_up)
            try:
                on_admitted()
                while True:
                    delta = await stream.next()
                    observer.on_delta(delta)
                    yield delta
                    if delta.finish_reason is not None:
                        return
            finally:
                if timer is not None:
                    timer.cancel()
                self._finish_rate.ended()
                core.drop(id)
                self.timelines.close(id)
        except WeftError:
            observer.on_error()
            raise
        finally:
            observer.on_end()

    async def _queue(
        self,
        request: CheckedRequest,
        priority: int,
        deadline: float | None,
        owner: str,
        visible: frozenset[int],
        admit: Callable[[], Awaitable[None]] | None,
    ) -> tuple[CoreClient, str, RequestStream]:
        """Send a request to a core; raises as `generate`.

        Returns:
            The core, the request's id there, and its stream.
        """
        params, grammar = request.params, None
        if params.grammar is not None:
            if admit is None:  # compiling takes long, so a full queue refuses first
                self._check_queue()
            grammar = await self._compiled(params.grammar, deadline, owner)
        if admit is None:
            self._check_queue()
        else:
            await admit()
        self.check_serving()
        core = self._least_busy()
        if grammar is not None and core.grammar_bytes(grammar) > LIVE_GRAMMARS:
            raise self._full(
                "the grammars of the requests that run or wait would take more than "
                f"{LIVE_GRAMMARS >> 20} MiB"
            )
        number = next(self._ids)
        id = str(number)
        block_size = self.info.block_size if self.config.prefix_caching else None
        add = Add(
            id,
            pack_prompt(request.prompt_token_ids, block_size, request.cache_salt),
            # The core reads the smaller forms of these settings.
            msgspec.structs.replace(params, grammar=None, allowed_token_ids=None, bad_words=()),
            self._end_token_ids(params),
            priority,
            time.monotonic(),
            b"" if grammar is None else grammar.key,
            request.pooling,
            request.allowed,
            request.banned,
        )
        timeline = self.timelines.begin(id, len(request.prompt_token_ids))
        named = None if grammar is None else (grammar.key, grammar.size)
        stream = RequestStream(self.tokenizer, params, timeline, visible, named)
        try:
            core.add(number, add, stream, grammar)
        except BaseException:
            self.timelines.close(id)
            raise
        self._finish_rate.began()
        return core, id, stream

    async def _compiled(self, grammar: Grammar, deadline: float | None, owner: str) -> Compiled:
        """Compile a request's grammar; raises as `generate`."""
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._grammars.compile(grammar, owner)
        except TimeoutError:
            raise _late() from None

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        # A grammar ends with the model's own end token, so that is never ignored.
        ignored = params.ignore_eos and params.grammar is None
        own = () if ignored else self.tokenizer.eos_token_ids
        return (*own, *params.stop_token_ids)

    def _least_busy(self) -> CoreClient:
        """Return the ready core with the fewest requests; of equals, the least recently used."""
        return min(self._supervisor.ready, key=lambda core: (core.live, core.latest))


def _pooling(config: EngineConfig) -> Pooling:
    """Return how embeddings are made; ModelError if the checkpoint asks for an unknown way."""
    if config.pooling == "auto":
        return read_pooling(find(config.model, config.revision))
    return Pooling(config.pooling)


def _at(deadline: float, do: Callable[[], object]) -> asyncio.TimerHandle:
    """Call a function at a time of time.monotonic()."""
    left = deadline - time.monotonic()
    return asyncio.get_running_loop().call_later(max(0.0, left), do)


def _late() -> RequestError:
    return RequestError(
        "the request did not finish in time; ask for fewer tokens, or try again later",
        code="request_timeout",
        status=504,
    )
