"""AsyncEngine: prompts in, streams of text out. The front of the engine cores.

A core runs in a process of its own (or in a thread, for the `LLM` class and tests: the same
loop behind the same sockets); see core_client.py. With `dp` there are several, all alike, which
share the requests. Here are the parts that work in text, and what is true of all requests:
limits, the queue, which core has room, and what is done about a core that is lost:

    one fails ──► its requests end with an error ──► the engine fails, and all else with it
                                                 └─► with `restart`, another takes its place

Everything but `validate` runs on one event loop; an AsyncEngine is not thread-safe.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Literal

import msgspec
import zmq

from weft.errors import EngineError, ModelError, RequestError, WeftError
from weft.models.spec.pooling import Pooling, read_pooling
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.checks import CheckedRequest, check_pooled, check_request
from weft.serving.engine.core_client import CoreClient
from weft.serving.engine.core_process import share_out
from weft.serving.engine.grammar.compiler import GrammarCompiler
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import Add, Compiled, EngineInfo, EngineStats
from weft.serving.engine.request_stream import Delta, RequestStream, StreamObserver
from weft.serving.engine.retry_after import FinishRate
from weft.serving.engine.sampling_params import Grammar, SamplingParams
from weft.serving.engine.timeline import Timelines
from weft.serving.engine.tokenizer import Tokenizer, load_tokenizer
from weft.serving.executor.nodes.inventory import own_inventory
from weft.serving.executor.placement import Inventory, kind_of

if TYPE_CHECKING:
    from weft.serving.executor.nodes.node_pool import NodePool

Status = Literal["ready", "restarting", "stalled", "draining", "dead"]

LOAD_MODEL = "weft.serving.executor.loading:load_model"
MAX_RESTARTS = 3  # of a core, in a row, of which none works
END_GRACE = 2.0  # seconds for a core that has failed to end by itself
LIVE_GRAMMARS = 1 << 30  # bytes of compiled grammars that a core's requests may have in all
SLOW_RELOAD = 10.0  # times as long as at first that a core may load, beside `stall_timeout`

logger = logging.getLogger(__name__)

_NO_OBSERVER = StreamObserver()

__all__ = ["AsyncEngine", "Delta", "Status"]


class AsyncEngine:
    """Serves one model; made by `start`.

    Attributes:
        config: as given.
        info: of the model that the cores have loaded; of their KV caches, the smallest.
        tokenizer: of the model.
        pooling: how embeddings are made.
        failure: what went wrong, once the engine has ended otherwise than by `shutdown`.
        restarts: times that a core was started again.
        timelines: when live requests, and the last that ended, waited and ran.
    """

    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer
    pooling: Pooling
    failure: EngineError | None
    restarts: int
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
        """Load the model; returns when requests can be served.

        Args:
            config: of the engine.
            in_process: run the cores in threads instead of processes.
            runner_factory: "module:function" that stands in for `loading.load_model`.
            restart: start a core that has failed again. One that is in a thread and stuck
                cannot be ended, and goes on.
            on_spawned: called once the cores' processes are there, or other machines are awaited.

        Raises:
            ConfigError, ModelError: a core says that it cannot load the model.
            EngineError: a core ended.
        """
        engine = cls(config, in_process, runner_factory, restart)
        try:
            await engine._start(on_spawned)
        except BaseException:
            for core in engine._cores:
                await core.close()
            if engine._pool is not None:
                engine._pool.close()
            raise
        return engine

    def __init__(
        self, config: EngineConfig, in_process: bool, load_model: str, restart: bool
    ) -> None:
        self.config = config
        self.failure = None
        self.restarts = 0
        self.timelines = Timelines()
        self._in_process = in_process
        self._load_model = load_model
        self._restart = restart
        self._draining = False
        self._past = EngineStats()
        self._pool: NodePool | None = None
        self._shares: list[EngineConfig] = []
        self._cores: list[CoreClient] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._load_seconds = 0.0
        self._pace = FinishRate()
        self._ids = count()
        self._seeds = random.Random(config.seed)

    # Requests.

    @property
    def places(self) -> int:
        """Most requests that run or wait at once."""
        return self.config.dp * self.info.max_num_seqs + self.config.max_queue

    @property
    def live(self) -> int:
        """Requests that run or wait."""
        return sum(core.live for core in self._cores)

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of the last message of each."""
        return sum((core.stats for core in self._cores), self._past)

    @property
    def serving(self) -> int:
        """Cores that serve."""
        return sum(core.status == "ready" for core in self._cores)

    @property
    def status(self) -> Status:
        """ "ready" while a core serves; "restarting" while none does, but will; "draining" after
        `shutdown`. "stalled", when a core did no step for `stall_timeout` seconds with work at
        hand, and "dead" are final.
        """
        states = {core.status for core in self._cores}
        lost: Status = "stalled" if "stalled" in states else "dead"
        if self._draining:
            return "draining" if "ready" in states else lost
        if self.failure is not None or not (self._restart or states == {"ready"}):
            return lost
        return "ready" if "ready" in states else "restarting"

    @property
    def waited(self) -> float:
        """Seconds in which no core that serves has done a step, with work at hand for each."""
        return min((core.waited for core in self._cores if core.status == "ready"), default=0.0)

    def validate(
        self, prompt_token_ids: Sequence[int], params: SamplingParams | Pooling
    ) -> CheckedRequest:
        """Check a request against the model; may be called in any thread.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample and when to stop (`n` is ignored: n answers are n requests); or,
                for an embedding, how it is made.

        Returns:
            The request as `generate` takes it, with `max_tokens` and `seed` filled in.

        Raises:
            RequestError: the request cannot be served.
        """
        if isinstance(params, Pooling):
            return check_pooled(prompt_token_ids, params.kind, self.info)
        return check_request(prompt_token_ids, params, self.info, self._draw_seed)

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def _check_queue(self) -> None:
        if self.live >= self.places:
            raise self._full(
                f"{self.live} requests are running or waiting, of at most {self.places}"
            )

    def _full(self, why: str) -> RequestError:
        return RequestError(
            f"{why}; try again later",
            code="queue_full",
            status=429,
            retry_after=self._pace.retry_after(),
        )

    async def generate(
        self,
        request: CheckedRequest,
        *,
        priority: int = 0,
        deadline: float | None = None,
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
            visible: special tokens whose text is wanted, such as the marks of a call.
            admit: returns when the request may be queued, even if the queue is full. Without it,
                a full queue refuses the request.
            on_admitted: called once the request waits or runs.
            observer: called with each delta and at the end.

        Yields:
            What is new; the last delta has a finish_reason. An embedding is one delta.

        Raises:
            RequestError: the queue is full (429); the grammar cannot be compiled, or not now
                (429); or the deadline has passed (504).
            EngineError: the engine is shutting down or not ready, or the core has failed.
        """
        observer = observer or _NO_OBSERVER
        try:
            core, id, stream = await self._queue(request, priority, deadline, visible, admit)

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
                self._pace.ended()
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
            grammar = await self._compiled(params.grammar, deadline)
        if admit is None:
            self._check_queue()
        else:
            await admit()
        self.check_serving()
        core = self._least_busy()
        if grammar is not None and core.grammar_bytes(grammar) > LIVE_GRAMMARS:
            raise self._full(
                f"the grammars of requests under way take {LIVE_GRAMMARS >> 20} MiB, which is all "
                "they may"
            )
        number = next(self._ids)
        id = str(number)
        block_size = self.info.block_size if self.config.prefix_caching else None
        add = Add(
            id,
            pack_prompt(request.prompt_token_ids, block_size),
            msgspec.structs.replace(params, grammar=None),
            self._end_token_ids(params),
            priority,
            time.monotonic(),
            b"" if grammar is None else grammar.key,
            request.pooling,
        )
        timeline = self.timelines.begin(id, len(request.prompt_token_ids))
        named = None if grammar is None else (grammar.key, len(grammar.data))
        stream = RequestStream(self.tokenizer, params, timeline, visible, named)
        try:
            core.add(number, add, stream, grammar)
        except BaseException:
            self.timelines.close(id)
            raise
        self._pace.began()
        return core, id, stream

    async def _compiled(self, grammar: Grammar, deadline: float | None) -> Compiled:
        """Compile a request's grammar; raises as `generate`."""
        left = None if deadline is None else deadline - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._grammars.compile(grammar)
        except TimeoutError:
            raise _late() from None

    def check_serving(self) -> None:
        """Raise EngineError, with the time to wait if that is known, when no core serves."""
        match self.status:
            case "ready":
                return
            case "draining":
                raise EngineError("the engine is shutting down")
            case "restarting":
                loading = (core.age for core in self._cores if core.status == "loading")
                left = self._load_seconds - max(loading, default=0.0)
                raise EngineError(
                    "the engine has failed and is being started again",
                    retry_after=max(1, math.ceil(left)),
                )
            case status:
                raise EngineError(f"the engine is {status}")

    def _end_token_ids(self, params: SamplingParams) -> tuple[int, ...]:
        ignored = params.ignore_eos and params.grammar is None  # which has an end of its own
        own = () if ignored else self.tokenizer.eos_token_ids
        return (*own, *params.stop_token_ids)

    def _least_busy(self) -> CoreClient:
        """The core with the fewest requests; of such, the one that has waited for one longest."""
        ready = (core for core in self._cores if core.status == "ready")
        return min(ready, key=lambda core: (core.live, core.latest))

    # The cores.

    async def shutdown(self, *, drain: bool = True, timeout: float = 30.0) -> None:
        """End the engine. May be called again, to be less patient.

        Args:
            drain: let requests finish; else they end with "abort".
            timeout: seconds until requests are aborted, and soon after the cores are ended by
                force.
        """
        self._draining = self.failure is None
        await self._grammars.close()
        for core, keeper in zip(self._cores, self._keepers, strict=True):
            if core.status == "loading":
                keeper.cancel()
        await asyncio.gather(*(core.shutdown(drain=drain, timeout=timeout) for core in self._cores))
        await asyncio.wait(self._keepers)
        if self._pool is not None:
            self._pool.close()

    async def _start(self, on_spawned: Callable[[], None]) -> None:
        self._shares = await self._share_out(on_spawned)
        self._cores = [CoreClient(share) for share in self._shares]
        for core in self._cores:
            await core.spawn(self._load_model, in_process=self._in_process)
        on_spawned()
        self.tokenizer = await asyncio.to_thread(load_tokenizer, self.config)
        self.pooling = await asyncio.to_thread(_pooling, self.config)
        try:
            async with asyncio.TaskGroup() as group:
                for number, core in enumerate(self._cores):
                    group.create_task(core.load(partial(self._lend, number)))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.info = min((core.info for core in self._cores), key=lambda info: info.num_blocks)
        self._grammars = GrammarCompiler(self.config, self.info.vocab_size)
        self._load_seconds = max(core.load_seconds for core in self._cores)
        self._keepers = [asyncio.create_task(self._keep(i)) for i in range(self.config.dp)]

    async def _share_out(self, on_spawned: Callable[[], None]) -> list[EngineConfig]:
        """What each core is given, once all machines are there; ConfigError if it cannot be."""
        config = self.config
        if config.executor == "ray":  # it knows the machines, and finds such that suit
            most = config.dp * config.world_size
            kind = kind_of(config)  # auto: nobody asks nodes
            offer = Inventory(
                gpus=(0,) * most if kind == "cuda" else (), tpus=most if kind == "tpu" else 0
            )
            group = secrets.token_hex(4)
            return [
                replace(share, replica=replace(share.replica, group=group))
                for share in share_out(config, [offer] * config.nodes)
            ]
        gpus = config.device in ("auto", "cuda") and config.backend != "jax"
        offers = [own_inventory(config, gpus=gpus)]
        if config.nodes > 1:
            from weft.serving.executor.loading import check_ranks
            from weft.serving.executor.nodes.node_pool import NodePool

            if self._load_model == LOAD_MODEL:
                check_ranks(config)  # before people are asked to start others
            self._pool = NodePool(config)
            on_spawned()
            offers += await self._pool.inventories()
            config = replace(config, node_token=self._pool.token)
        shares = share_out(config, offers)
        if self._pool is not None:
            self._pool.assign(shares)
        return shares

    def _lend(self, number: int, port: int) -> None:
        """A core waits for machines at a port."""
        if self._pool is not None:
            self._pool.connect_nodes(number, port)

    async def _keep(self, number: int) -> None:
        """See a core through, and those that take its place."""
        tries = 0
        while True:
            core = self._cores[number]
            try:
                await self._see_through(core, number)
                return
            except WeftError as error:
                tries = 0 if core.works else tries
                failure = self._judge(error, tries)
                if failure is None:
                    logger.warning("%s; it is started again", error)
                else:
                    self._fail(failure)
                if core.status != "loading":  # else it does not listen yet
                    await core.shutdown(drain=False, timeout=END_GRACE)
            except Exception as error:  # a fault of ours, of which nobody would hear
                self._fail(EngineError(f"{core.name}: {error!r}"))
                raise
            finally:
                await core.close()
            if failure is not None or self._draining:
                return
            tries += 1
            self.restarts += 1
            self._past += core.stats
            self._cores[number] = CoreClient(self._shares[number])

    async def _see_through(self, core: CoreClient, number: int) -> None:
        """Load a core, if that is still to do, and serve until it has ended as it was told.

        Raises:
            ConfigError, ModelError: it cannot be loaded.
            EngineError: it ended, failed or is stuck.
        """
        if core.status == "loading":
            if self._pool is not None:
                core.config = await self._pool.wait_for_slice(number)
            patience = math.ceil(self.config.stall_timeout + SLOW_RELOAD * self._load_seconds)
            try:
                async with asyncio.timeout(patience):
                    await core.spawn(self._load_model, in_process=self._in_process)
                    await core.load(partial(self._lend, number))
            except TimeoutError:
                raise EngineError(f"{core.name} did not load within {patience} s") from None
            except (OSError, zmq.ZMQError) as error:  # no more processes, no space for a socket
                raise EngineError(f"{core.name} cannot be started: {error}") from error
            if core.info.vocab_size != self.info.vocab_size:  # the tokenizer is the old one
                raise ModelError(f"{self.config.model} is not the model that it was")
            self.info = min(
                (other.info for other in self._cores if other.status == "ready"),
                key=lambda info: info.num_blocks,
            )
            logger.warning("%s serves again", core.name)
        await core.serve()

    def _judge(self, error: WeftError, tries: int) -> EngineError | None:
        """Why a core is not started again after an error and so many vain tries; None if it is.

        The settings are those that it was started with at first: what they ask for and cannot have
        (memory, machines) may be there later.
        """
        if isinstance(error, ModelError):
            return EngineError(f"the engine cannot be started again: {error}")
        if self._draining or not self._restart or self.failure is not None:
            return error if isinstance(error, EngineError) else EngineError(str(error))
        if tries == MAX_RESTARTS:
            return EngineError(f"{error}; it was started {tries} times in vain")
        return None

    def _fail(self, failure: EngineError) -> None:
        """There is no engine any more; what drains may come to its end."""
        self.failure = self.failure or failure
        if not self._draining:
            for core in self._cores:
                core.drop_all(failure)


def _pooling(config: EngineConfig) -> Pooling:
    """How embeddings are made; ModelError if the checkpoint asks for what is not handled."""
    from weft.models.checkpoint.locate import locate

    if config.pooling == "auto":
        return read_pooling(locate(config.model))
    return Pooling(config.pooling)


def _at(deadline: float, do: Callable[[], object]) -> asyncio.TimerHandle:
    """Do something at a time of time.monotonic()."""
    left = deadline - time.monotonic()
    return asyncio.get_running_loop().call_later(max(0.0, left), do)


def _late() -> RequestError:
    return RequestError(
        "the request did not finish in time; ask for fewer tokens, or try again later",
        code="request_timeout",
        status=504,
    )
