"""The engine core: takes requests as token ids and returns tokens, in its own process or thread.

Each turn of its loop receives messages, submits steps, finishes the oldest step and sends the
outputs. Up to `DEPTH` steps are in flight at once, so that the model never waits for the host.

A request that fails ends alone. If the model runner raises, the cache cannot be trusted any more.
The core then tells the API process and ends, and the API process ends every request with an error.

core_process.py starts the core as a process (`python -m weft.serving.engine.core`) or as a thread.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from weft.errors import EngineError, RequestError, WeftError
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core_channel import CoreChannel
from weft.serving.engine.grammar.matcher import GrammarMatcher, GrammarMatchers
from weft.serving.engine.grammar.token_filter import filtered
from weft.serving.engine.protocol import (
    Abort,
    Add,
    Compiled,
    EngineInfo,
    Orders,
    Outputs,
    Ready,
    Shutdown,
    ToCore,
    TokenOutput,
    Waiting,
)
from weft.serving.engine.scheduler.block_manager import BlockManager
from weft.serving.engine.scheduler.dp_attention import DpAttentionScheduler
from weft.serving.engine.scheduler.scheduler import Scheduler
from weft.serving.engine.step_log import StepLog
from weft.serving.executor import child_process, loading
from weft.serving.executor.base import Executor, Pending
from weft.serving.executor.in_process import InProcessExecutor
from weft.serving.executor.loading import LoadedModel, ModelInfo, show_progress
from weft.serving.executor.ranks import ProcessExecutor

if TYPE_CHECKING:
    import zmq

DEPTH = 2
"""Maximum number of steps in flight with one pipeline stage; each further stage adds one."""
PREPARING = 0.002  # seconds between checks for a matcher that is being made, if no step runs
HEARTBEAT = 1.0  # maximum number of seconds between messages

LoadModel = Callable[..., LoadedModel]
logger = logging.getLogger(__name__)


class EngineCore:
    """Runs the loop.

    Args:
        channel: connection to the API process.
        executor: runs the steps.
        scheduler: chooses each step's tokens.
        matchers: makes grammar matchers.
        heartbeat: maximum number of seconds between messages.
        depth: maximum number of steps in flight.
        log: the log of steps; None without one.
    """

    def __init__(
        self,
        channel: CoreChannel,
        executor: Executor,
        scheduler: DpAttentionScheduler,
        matchers: GrammarMatchers,
        *,
        heartbeat: float = HEARTBEAT,
        depth: int = DEPTH,
        log: StepLog | None = None,
    ) -> None:
        self._channel = channel
        self._executor = executor
        self._scheduler = scheduler
        self._matchers = matchers
        self._preparing: dict[str, tuple[Add, Future[GrammarMatcher]]] = {}
        self._heartbeat = heartbeat
        self._depth = depth
        self._log = log
        self._steps: deque[Pending] = deque()
        self._outputs: list[TokenOutput] = []
        self._last_sent = 0.0
        self._draining = False

    def run(self) -> None:
        """Serve until a shutdown message.

        Raises:
            EngineError: the model runner failed.
        """
        while not (self._draining and not self._busy):
            self._receive()
            if self._preparing:
                self._add_prepared()
            self._submit()
            self._finish()

    @property
    def _busy(self) -> bool:
        return bool(self._steps or self._scheduler.count or self._outputs or self._preparing)

    def _receive(self) -> None:
        timeout = 0.0 if self._busy else self._heartbeat
        if self._preparing and not self._steps:
            timeout = PREPARING
        for message in self._channel.receive(timeout):
            self._handle(message)

    def _handle(self, message: ToCore) -> None:
        match message:
            case Add() if message.grammar:
                self._preparing[message.request_id] = message, self._matchers.make(message)
            case Add():
                self._add(message)
            case Compiled():
                self._matchers.keep(message)
            case Abort():
                self._abort(message.request_ids)
            case Shutdown():
                self._draining = True
                if not message.drain:
                    self._abort((*self._scheduler.live, *self._preparing))

    def _add(self, message: Add, matcher: GrammarMatcher | None = None) -> None:
        try:
            filter = filtered(message, self._matchers.vocab_size, matcher)
        except RequestError as error:
            self._reject(message, error.message, faulty_grammar=True)
            return
        try:
            self._scheduler.add(message, filter)
        except RequestError as error:
            self._reject(message, error.message)
        except Exception:  # a bug here must not end other requests
            logger.exception("request %s cannot be queued", message.request_id)
            self._reject(message, "the request could not be queued; see the server's log")

    def _reject(self, message: Add, error: str, *, faulty_grammar: bool = False) -> None:
        self._outputs.append(
            TokenOutput(message.request_id, [], "error", error=error, faulty_grammar=faulty_grammar)
        )

    def _add_prepared(self) -> None:
        """Queue requests with a finished grammar matcher."""
        for request_id, (message, making) in list(self._preparing.items()):
            if not making.done():
                continue
            del self._preparing[request_id]
            error = making.exception()
            if error is None:
                self._add(message, making.result())
            else:
                logger.warning("a grammar cannot be used", exc_info=error)
                self._reject(message, f"the grammar cannot be used: {error}", faulty_grammar=True)

    def _abort(self, request_ids: tuple[str, ...]) -> None:
        for request_id in request_ids:
            if self._preparing.pop(request_id, None) is not None:
                self._outputs.append(TokenOutput(request_id, [], "abort"))
        self._outputs += self._scheduler.abort(request_ids)

    def _submit(self) -> None:
        while len(self._steps) < self._depth:
            step = self._scheduler.schedule()
            if step is None:
                return
            self._steps.append(self._executor.submit(step))
            if self._log is not None:
                self._log.submitted(step)

    def _finish(self) -> None:
        """Finish the oldest step if it is done, and send outputs and statistics."""
        if not self._steps:
            if (failure := self._executor.check()) is not None:
                self._fail(failure)
            if self._log is not None:
                self._log.flush()
        elif self._is_done(self._steps[0]):
            result = self._steps.popleft().result()
            if self._log is not None:
                self._log.finished(result)
            self._outputs += self._scheduler.finish(result)
            self._send()
        if self._outputs or time.monotonic() - self._last_sent >= self._heartbeat:
            self._send()

    def _is_done(self, step: Pending) -> bool:
        """Wait for a step until the next heartbeat is due; returns whether it is done."""
        try:
            error = step.exception(self._heartbeat)
        except TimeoutError:
            return False
        if error is not None:
            self._fail(error)
        return True

    def _send(self) -> None:
        stats = self._scheduler.stats()
        if rank_seconds := self._executor.rank_seconds():
            stats = replace(stats, rank_seconds=rank_seconds)
        self._channel.send(Outputs(self._outputs, stats, self._scheduler.take_moves()))
        self._outputs = []
        self._last_sent = time.monotonic()

    def _fail(self, error: BaseException) -> NoReturn:
        if isinstance(error, WeftError):  # its message is complete
            message = f"the model runner failed: {error}"
        else:
            message = f"the model runner failed: {type(error).__name__}: {error}"
            logger.critical(message, exc_info=error)
        if self._outputs:
            self._send()
        raise EngineError(message) from error


def serve(
    config: EngineConfig,
    load_model: LoadModel,
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    *,
    own_process: bool = False,
) -> None:
    """Load a model and serve it until a shutdown message.

    Args:
        config: how to load the model, and limits on what runs at once.
        load_model: `weft.serving.executor.loading.load_model`, or a substitute.
        context: shared with the API side if the address is inproc://.
        address: base address of the API side's sockets, see core_channel.py.
        own_process: nothing else runs in this process, so its garbage collector may be tuned.

    Raises:
        WeftError: the model cannot be loaded or run; the API process has been informed.
    """
    with CoreChannel(context, address) as channel, ExitStack() as stack:
        log = None
        if config.step_log is not None:
            log = stack.enter_context(StepLog(config.step_log, config))
        begin = time.monotonic()
        executor = start_executor(config, load_model, lambda port: channel.send(Waiting(port)))
        matchers = GrammarMatchers(config, executor.model.vocab_size)
        try:
            model = executor.model
            scheduler = DpAttentionScheduler(
                [_scheduler(config, model) for _ in range(config.attention_groups)]
            )
            if own_process:
                child_process.settle_garbage_collector()
            channel.send(Ready(_info(config, model, time.monotonic() - begin)))
            heartbeat = min(HEARTBEAT, config.stall_timeout / 4)
            depth = DEPTH + config.pp - 1
            core = EngineCore(
                *(channel, executor, scheduler, matchers),
                heartbeat=heartbeat,
                depth=depth,
                log=log,
            )
            core.run()
        finally:
            matchers.close()
            executor.close()


def start_executor(
    config: EngineConfig, load_model: LoadModel, announce: Callable[[int], None]
) -> Executor:
    """Load the model in this process, or in one process for each rank.

    JAX uses all devices of a node in one process. A GPU's rank always has a process of its own: it
    launches steps while the scheduler prepares others, and both would share one Python lock.

    Args:
        config: this engine's settings.
        load_model: see `serve`.
        announce: called with the port where other nodes of the engine's slice should connect.

    Raises:
        WeftError: the model cannot be loaded.
    """
    elsewhere = any(part.node for part in config.replica.slice)
    on_gpu = config.device == "cuda"  # placement has decided what "auto" means
    several = (config.world_size > 1 or on_gpu) and not loading.uses_jax(config)
    if several or elsewhere or config.executor == "ray":
        if load_model is loading.load_model:
            loading.check_ranks(config)  # before any process starts
        if config.executor == "ray":
            from weft.serving.executor.nodes.ray_executor import RayExecutor

            return RayExecutor(config, load_model)
        if elsewhere:
            from weft.serving.executor.nodes.multi_node_executor import MultiNodeExecutor

            return MultiNodeExecutor(config, load_model, announce)
        return ProcessExecutor(config, load_model, config.world_size)

    def load() -> LoadedModel:
        if config.replica.number:  # only the first replica shows its progress
            return load_model(config, lambda done, total: None)
        with show_progress("loading") as progress:
            return load_model(config, progress)

    return InProcessExecutor(load)


def _scheduler(config: EngineConfig, model: ModelInfo) -> Scheduler:
    """Return the scheduler for one attention group."""
    return Scheduler(
        BlockManager(
            model.num_blocks, model.block_size, config.capacity.max_num_seqs, model.max_model_len
        ),
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        prefix_caching=config.prefix_caching,
        stages=config.pp,
    )


def _info(config: EngineConfig, model: ModelInfo, load_seconds: float) -> EngineInfo:
    return EngineInfo(
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        block_size=model.block_size,
        num_blocks=model.num_blocks,
        max_num_seqs=config.attention_groups * config.capacity.max_num_seqs,
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        memory_fraction=config.capacity.memory_fraction,
        dtype=model.dtype,
        load_seconds=load_seconds,
    )


def main() -> None:
    """Run the engine process."""
    gc.disable()  # imports make little garbage; see child_process.settle_garbage_collector
    import zmq

    orders = child_process.begin(Orders)
    try:
        with zmq.Context() as context:
            load_model = child_process.find(orders.load_model)
            serve(orders.config, load_model, context, orders.address, own_process=True)
    except WeftError:
        sys.exit(1)  # the API process has been informed and reports it


if __name__ == "__main__":
    main()
