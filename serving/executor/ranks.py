"""A model with its ranks in separate processes, which all run the same steps.

    engine core     submit(step n) ──► ring ───► rank 0 ─┐
                                          ├────► rank 1  │ the model's own collectives
                                          └────► rank 2 ─┘
                    pending n ◄──────────── socket ◄── one rank: the output of step n

With data-parallel attention, the first rank in each attention group sends an output, and the last
output completes the step. With pipeline stages, only the last stage sends outputs. The engine's
thread reads these messages itself while it waits for a step: a handover from a reader thread would
take longer than the reading.

Steps are dispatched ahead, in one order for all ranks (Pathways: Barham et al. 2022, section 4.5).
A rank begins its next step without asking anyone. If a rank ends or raises an exception, the others
cannot continue. They are killed, and every step gets an error with the rank, its end and its step.
The same happens if no rank makes progress: the error names the rank furthest behind, and all ranks
write their stacks to stderr.

The ranks may be on several nodes, each with its own ring (node.py, nodes/multi_node_executor.py).
A stage waits for the previous stage in the same step and for later stages in earlier steps. Among
stages in the same step, the first one is therefore behind.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from math import ceil

import numpy as np
import zmq

from weft.errors import EngineError, WeftError
from weft.models.interface import Result, Step, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.child_process import Failed
from weft.serving.executor.loading import LoadedModel, ModelInfo
from weft.serving.executor.node import Channel, LocalNode, Node
from weft.serving.executor.placement import devices_of_ranks
from weft.serving.executor.rank_messages import Done, FromRank, Loaded, RendezvousPort, encode_step
from weft.serving.executor.step_ring import Int64, check_size, how_loaded

CLOSE_GRACE = 5.0
"""Seconds for ranks to end by themselves."""

FAILURE_GRACE = 0.5
"""Seconds to collect further failures after the first: the end of one rank makes others fail."""

STUCK_FRACTION = 0.5
"""Fraction of `stall_timeout` after which idle ranks count as stuck.

It is below 1 so that this error comes before that of the API process.
"""

STACKS_GRACE = 1.0
"""Seconds for stuck ranks to write their stacks."""

ROOM_POLL = 50e-6
"""Seconds between two checks for room in the ring."""

PROGRESS_CHECKS = 4
"""Number of progress checks, at equal intervals, until ranks count as stuck."""


class _Pending:
    """A submitted step; see base.Pending."""

    def __init__(self, executor: RankExecutor) -> None:
        self._executor = executor
        self.outcome: Result | WeftError | None = None

    def exception(self, timeout: float | None = None) -> WeftError | None:
        outcome = self._executor.wait_for(self, timeout)
        return outcome if isinstance(outcome, WeftError) else None

    def result(self, timeout: float | None = None) -> Result:
        outcome = self._executor.wait_for(self, timeout)
        if isinstance(outcome, WeftError):
            raise outcome
        return outcome


class RankExecutor:
    """Executor for ranks on one or several nodes.

    Args:
        config: settings of the engine.
        nodes: nodes in the order of their ranks. Taking a node from the iterable starts it.

    Attributes:
        model: properties of the loaded model.
        failure: error with the rank that failed, or None.

    Raises:
        WeftError: a rank could not load its part.
    """

    def __init__(self, config: EngineConfig, nodes: Iterable[Node]) -> None:
        self._stages = config.pp
        self.failure: WeftError | None = None
        self._pending: deque[_Pending] = deque()
        # Outputs by attention group, for steps not finished by all groups.
        self._outputs: list[deque[StepOutput | None]] = [
            deque() for _ in range(config.attention_groups)
        ]
        self._step = 0
        self._loaded = self._is_stuck = False
        patience = config.stall_timeout * STUCK_FRACTION
        self._patience, self._check_every = config.load_stall_timeout, patience / PROGRESS_CHECKS
        self._last_check = time.monotonic()
        self._progress, self._idle_checks = -1, 0
        self._nodes: list[Node] = []
        self._poller = zmq.Poller()
        # By the poller's result: a ZeroMQ socket, or another socket's descriptor.
        self._channels: dict[Channel | int, tuple[Node, Channel]] = {}
        try:
            for node in nodes:
                self._nodes.append(node)
                for channel in node.channels:
                    self._poller.register(channel, zmq.POLLIN)
                    self._channels[_polled(channel)] = node, channel
            self._num_ranks = sum(len(node.ranks) for node in self._nodes)
            self.model = self._load()
            self._loaded, self._patience = True, patience
        except BaseException:
            self._end(grace=0.0)
            self._release()
            raise

    def submit(self, step: Step) -> _Pending:
        """See `Executor.submit`."""
        data, pending = encode_step(step), _Pending(self)
        number = self._step + 1
        while self.failure is None and not all(node.has_room(number) for node in self._nodes):
            if not self._process_messages(0.0):
                time.sleep(ROOM_POLL)
        pending.outcome = self.failure
        try:
            check_size(number, data)
        except ValueError as error:
            pending.outcome = EngineError(str(error))
        if pending.outcome is None:
            self._step = number
            self._pending.append(pending)
            for node in self._nodes:
                node.put(number, data)
        return pending

    def wait_for(self, pending: _Pending, timeout: float | None) -> Result | WeftError:
        """Wait for a step and return its output or its error; see base.Pending."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while pending.outcome is None:
            now = time.monotonic()
            left = self._last_check + self._check_every - now
            if deadline is not None:
                if deadline < now:
                    raise TimeoutError
                left = min(left, deadline - now)
            self._process_messages(max(0.0, left))
        return pending.outcome

    def check(self) -> WeftError | None:
        """See `Executor.check`."""
        while self.failure is None and self._process_messages(0.0):
            pass
        return self.failure

    def close(self) -> None:
        """See `Executor.close`."""
        self._end(CLOSE_GRACE if self.failure is None else 0.0)
        self._release()

    def _load(self) -> ModelInfo:
        """Wait until all ranks have loaded; return rank 0's report."""
        loaded: dict[int, ModelInfo] = {}
        while len(loaded) < self._num_ranks:
            last_check = self._last_check
            for rank, message in self._messages(self._check_every):
                match message:
                    case RendezvousPort():
                        for node in self._nodes:
                            node.set_rendezvous(message.port)
                    case Loaded():
                        loaded[rank] = message.info
                    case _:
                        raise self._failure_error(rank, message)
            if self._last_check != last_check:
                self._check_progress()
        return loaded[0]

    def _process_messages(self, timeout: float) -> bool:
        """Wait for messages, at most `timeout` seconds, and process them; return if any came."""
        any_came, last_check = False, self._last_check
        try:
            for rank, message in self._messages(timeout):
                any_came = True
                if not isinstance(message, Done):
                    raise self._failure_error(rank, message)
                self._collect_output(rank, message.output)
            if self._last_check != last_check:
                self._check_progress()
        except WeftError as error:
            self._fail(error)
        return any_came

    def _collect_output(self, rank: int, output: StepOutput | None) -> None:
        """Store an attention group's output; finish the oldest step when it is complete."""
        stage_size = self._num_ranks // self._stages
        self._outputs[rank % stage_size * len(self._outputs) // stage_size].append(output)
        if all(self._outputs):
            if not self._pending:
                raise EngineError(f"rank {rank} answers a step that it was not given")
            self._pending.popleft().outcome = tuple(outputs.popleft() for outputs in self._outputs)

    def _fail(self, error: WeftError) -> None:
        """Fail all pending and future steps with this error."""
        self.failure = error
        while self._pending:
            self._pending.popleft().outcome = error

    def _messages(self, timeout: float) -> Iterator[tuple[int, FromRank | None]]:
        """Yield received messages with their rank's number; None marks the end of a rank.

        A lost node yields the end of its first rank.
        """
        for polled, _ in self._poller.poll(ceil(1000 * timeout)):
            node, channel = self._channels[polled]
            yield from self._unregister_ended(node, node.receive(channel))
        now = time.monotonic()
        if (waited := now - self._last_check) < self._check_every:
            return
        self._last_check = now
        # If this process did not run for a while (a paused machine), the ranks may not have either.
        pause = waited - self._check_every
        for node in self._nodes:
            yield from self._unregister_ended(node, node.check(pause))

    def _unregister_ended(
        self, node: Node, message: tuple[int, FromRank | None] | None
    ) -> Iterator[tuple[int, FromRank | None]]:
        """Yield a message from a node, if there is one; forget closed channels."""
        if message is None:
            return
        if message[1] is None:
            for polled, (owner, channel) in list(self._channels.items()):
                if owner is node and channel not in node.channels:
                    self._poller.unregister(channel)
                    del self._channels[polled]
        yield message

    def _check_progress(self) -> None:
        """Raise a WeftError if too many checks in a row saw no progress.

        Checks are counted instead of seconds, because a paused machine makes no checks.
        """
        counters = self._counters()
        last, self._progress = self._progress, int(counters.sum())
        idle = self._loaded and counters[1].min() == self._step
        if self._progress != last or idle:
            self._idle_checks = 0
            return
        self._idle_checks += 1
        if self._idle_checks * self._check_every > self._patience:
            self._is_stuck = True
            raise self._stuck_error()

    def _failure_error(self, rank: int, message: FromRank | None) -> WeftError:
        """End all ranks; return an error with the rank that caused the failure.

        Args:
            rank, message: first failed rank, and its unexpected message or None.
        """
        failed = {rank: message}
        deadline = time.monotonic() + FAILURE_GRACE
        while len(failed) < self._num_ranks and (left := deadline - time.monotonic()) > 0:
            for number, other in self._messages(left):
                if other is None or isinstance(other, Failed):
                    failed.setdefault(number, other)
        # An end without a message is the cause: exceptions elsewhere may be its consequence.
        number = min(
            failed,
            key=lambda n: (failed[n] is not None, self._node_of(n).lost is None, n != rank),
        )
        node, message = self._node_of(number), failed[number]
        when = self._describe_step(number)
        self._end(grace=0.0)
        where = node.where
        if node.lost is not None and not isinstance(message, Failed):
            ranks = ", ".join(map(str, node.ranks))
            return EngineError(f"{where} is lost, with rank {ranks},{when}: {node.lost}")
        if message is None:
            return EngineError(f"{node.name(number)} {node.how_ended(number)}{when}")
        if not isinstance(message, Failed):
            what = type(message).__name__
            return EngineError(f"{node.name(number)} sent an unexpected {what}{when}")
        error = message.error
        if isinstance(error, EngineError):
            on = f" on {where}" if where else ""
            return EngineError(f"rank {number}{on} failed{when}: {error}")
        return type(error)(f"{where}: {error}") if where else error

    def _release(self) -> None:
        for node in self._nodes:
            node.release()

    def _stuck_error(self) -> WeftError:
        """Build an error with the rank furthest behind."""
        _, done, exchanges, rounds, loaded, _ = (each.tolist() for each in self._counters())
        stage_size = self._num_ranks // self._stages
        stopped = [node.is_stopped(rank) for node in self._nodes for rank in node.ranks]

        def progress(rank: int) -> tuple[bool, int, int, int, int, int]:
            """Return a sort key: exchanges are comparable within a stage only."""
            at = rank // stage_size, rounds[rank], exchanges[rank]
            return not stopped[rank], loaded[rank], done[rank], *at

        number = min(range(self._num_ranks), key=progress)
        first = number // stage_size * stage_size
        stage = slice(first, first + stage_size)
        # Different attention groups share only the exchanges among all ranks.
        at = rounds if rounds[number] < max(rounds[stage]) else exchanges
        return EngineError(
            f"{self._node_of(number).name(number)} is "
            f"{'stopped' if stopped[number] else 'stuck'}{self._describe_step(number)}"
            f"{'' if self._loaded else f', {how_loaded(loaded[number])}'}: no progress for "
            f"{self._patience:g} s; it is at exchange {at[number]} with other ranks, others are at "
            f"{max(at[stage])}"
        )

    def rank_seconds(self) -> tuple[float, ...]:
        """See `Executor.rank_seconds`."""
        return tuple((self._counters()[5] / 1e6).tolist())

    def _counters(self) -> Int64:
        """Return the counters of all ranks: int64 [COUNTERS, ranks]."""
        if len(self._nodes) == 1:
            return self._nodes[0].counters
        return np.concatenate([node.counters for node in self._nodes], axis=1)

    def _node_of(self, rank: int) -> Node:
        return next(node for node in self._nodes if rank in node.ranks)

    def _describe_step(self, rank: int) -> str:
        begun, done = self._counters()[:2, rank].tolist()
        if self._node_of(rank).lost is not None:  # its counters may be out of date
            done = self._step - len(self._pending)
            begun = min(done + 1, self._step)
        if not begun:
            return " before its first step" if self._loaded else " while loading"
        return f" in step {begun}" if begun > done else f" after step {done}"

    def _end(self, grace: float) -> None:
        """Let the ranks end, and kill the rest; stuck ranks first dump their stacks."""
        if self._is_stuck:
            grace = STACKS_GRACE
            for node in self._nodes:
                node.dump()
        for node in self._nodes:
            node.hang_up(grace)
        deadline = time.monotonic() + grace
        while self._channels and (left := deadline - time.monotonic()) > 0:
            for _ in self._messages(left):  # a rank may block on sending one before it ends
                pass
        for node in self._nodes:
            node.wait(deadline)


def _polled(channel: Channel) -> Channel | int:
    return channel if isinstance(channel, zmq.Socket) else channel.fileno()


class ProcessExecutor(RankExecutor):
    """Executor with all ranks on this node; see RankExecutor.

    Args:
        config: settings of the engine.
        load_model: `loading.load_model` or a replacement. The rank processes import it by its
            module and name.
        world_size: number of ranks; a multiple of config.attention_groups.
    """

    def __init__(
        self, config: EngineConfig, load_model: Callable[..., LoadedModel], world_size: int
    ) -> None:
        devices = [own for part in config.replica.slice for own in devices_of_ranks(config, part)]
        ranks = range(world_size)
        node = LocalNode(config, import_path(load_model), ranks, world_size, devices=devices)
        super().__init__(config, [node])


def import_path(load_model: Callable[..., LoadedModel]) -> str:
    """Return a function's path for `child_process.find`."""
    return f"{load_model.__module__}:{load_model.__qualname__}"
