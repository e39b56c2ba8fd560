"""A model whose ranks are processes of this machine, all given the same steps.

    engine core     submit(step n) ──► board ──► rank 0 ─┐
                                          ├────► rank 1  │ the model's own collectives
                                          └────► rank 2 ─┘
                    future n ◄── receiver thread ◄── one rank: what step n has produced

With several copies of attention the first rank of each answers, and a step is done when all have;
of several stages, those of the last.

Steps are dispatched ahead and in one order (Pathways: Barham et al. 2022, section 4.5): a rank
begins the next one without hearing from anybody. When a rank ends or raises, the
others cannot go on: they are killed, and every future gets an error that names the
rank, how it ended and in which step. So they are when none of them gets on any more:
the one that is behind is named, and the stacks of all are written to stderr.

A stage waits for the one before it in the same step, and for later ones in earlier steps: of
stages that are in the same step, the first one is behind.
"""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec

from weft.errors import EngineError, WeftError
from weft.models.interface import Result, Step, StepOutput
from weft.serving.child import how_it_ended
from weft.serving.config import EngineConfig
from weft.serving.executor.board import Board
from weft.serving.executor.rank import RankOrders
from weft.serving.executor.wire import Address, Done, FromRank, Loaded, encode_step, rank_decoder
from weft.serving.loading import LoadedModel, ModelInfo
from weft.serving.messages import Failed

CLOSE_GRACE = 5.0
"""Seconds that ranks get to end by themselves."""

BLAME_GRACE = 0.5
"""Seconds after the first failure for others to be seen: a rank's end makes the rest fail, too."""

STUCK = 0.5
"""Of `stall_timeout`, after which ranks that do nothing are stuck: before the front says so."""

STACKS_GRACE = 1.0
"""Seconds for the stacks of stuck ranks to be written."""

ROOM_POLL = 50e-6
"""Seconds between two looks whether the slowest rank has read an old step."""


class ProcessExecutor:
    """Owns the processes of the ranks.

    Args:
        config: of the engine.
        load_model: `loading.load_model`, or what stands in for it; named in the processes by its
            module and name.
        world_size: how many ranks; config.pp x config.copies divides it.

    Attributes:
        model: what has been loaded.
        failure: which rank has failed, and how.

    Raises:
        WeftError: a rank could not load its part.
    """

    def __init__(
        self, config: EngineConfig, load_model: Callable[..., LoadedModel], world_size: int
    ) -> None:
        self._stages = config.pp
        self._board = Board(world_size, stages=config.pp)
        self.failure: WeftError | None = None
        self._pending: deque[Future[Result]] = deque()
        # By copy of attention, what came of pending steps.
        self._came: list[deque[StepOutput | None]] = [deque() for _ in range(config.copies)]
        self._lock = threading.Lock()
        self._step = 0
        self._loaded = self._closing = False
        self._patience = config.stall_timeout * STUCK
        name = f"{load_model.__module__}:{load_model.__qualname__}"
        self._ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()
        try:
            for number in range(world_size):
                rank = _Rank.start(config, name, number, world_size, self._board)
                self._ranks.append(rank)
                self._selector.register(rank.channel, selectors.EVENT_READ, rank)
            self.model = self._load()
            self._loaded = True
        except BaseException:
            self._end(grace=0.0)
            self._release()
            raise
        self._receiver = threading.Thread(target=self._receive, name="weft-ranks", daemon=True)
        self._receiver.start()

    def submit(self, step: Step) -> Future[Result]:
        """See `Executor.submit`."""
        data, future = encode_step(step), Future[Result]()
        number = self._step + 1
        while not self._board.has_room(number) and self.failure is None:
            time.sleep(ROOM_POLL)
        with self._lock:
            if self.failure is not None:
                future.set_exception(self.failure)
                return future
            try:
                self._board.write(number, data)
            except ValueError as error:
                future.set_exception(EngineError(str(error)))
                return future
            self._step = number
            self._pending.append(future)
        for rank in self._ranks:
            rank.wake()
        return future

    def close(self) -> None:
        """See `Executor.close`."""
        self._closing = True
        self._end(CLOSE_GRACE if self.failure is None else STACKS_GRACE)
        self._receiver.join()
        self._release()

    def _load(self) -> ModelInfo:
        loaded: dict[int, ModelInfo] = {}
        while len(loaded) < len(self._ranks):
            for rank, message in self._messages():
                match message:
                    case Address():
                        for other in self._ranks[1:]:
                            with suppress(OSError):  # it is gone, and what it has said comes next
                                other.channel.sendall(message.port.to_bytes(8, "little"))
                    case Loaded():
                        loaded[rank.number] = message.info
                    case _:
                        raise self._blame(rank, message)
        return loaded[0]

    def _receive(self) -> None:
        """Hand out what comes from the ranks until they are gone, or stuck."""
        failure: WeftError = EngineError("what a rank says makes no sense; see the log")
        try:
            failure = self._hand_out()
        finally:
            self._fail(failure)

    def _hand_out(self) -> WeftError:
        """Hand out what comes from the ranks; returns why nothing comes any more."""
        tick = self._patience / 4
        progress, since = self._board.progress, time.monotonic()
        while True:
            before = time.monotonic()
            for rank, message in self._messages(tick):
                if isinstance(message, Done):
                    self._take(rank.copy, message.output)
                    continue
                closed = EngineError("the ranks have been closed")
                return closed if self._closing else self._blame(rank, message)
            now = time.monotonic()
            # When this process does not get to run, nor may the ranks have (a paused machine).
            since += max(0.0, now - before - tick)
            if progress != self._board.progress or self._board.done.min() == self._step:
                progress, since = self._board.progress, now
            elif now - since > self._patience:
                return self._name_stuck()

    def _take(self, copy: int, output: StepOutput | None) -> None:
        """Keep what a copy of attention has produced until all have, in the order of the steps."""
        self._came[copy].append(output)
        if all(self._came):
            result = tuple(came.popleft() for came in self._came)
            self._pending.popleft().set_result(result)

    def _fail(self, error: WeftError) -> None:
        """Give every future that error, also those to come."""
        with self._lock:
            self.failure = error
            while self._pending:
                self._pending.popleft().set_exception(error)

    def _messages(self, timeout: float | None = None) -> Iterator[tuple[_Rank, FromRank | None]]:
        """What has come; None of a rank whose process has hung up."""
        for key, _ in self._selector.select(timeout):
            yield key.data, key.data.receive()

    def _blame(self, rank: _Rank, message: FromRank | None) -> WeftError:
        """End all ranks, and say what the one did that failed first."""
        failed = {rank.number: message}
        deadline = time.monotonic() + BLAME_GRACE
        while len(failed) < len(self._ranks) and time.monotonic() < deadline:
            for key, _ in self._selector.select(timeout=deadline - time.monotonic()):
                told = key.data.receive()
                if told is None or isinstance(told, Failed):
                    failed.setdefault(key.data.number, told)
                    self._selector.unregister(key.fileobj)
        # One that ended without a word is the cause; those that raise may only have missed it.
        number = min(failed, key=lambda number: (failed[number] is not None, number != rank.number))
        culprit, said = self._ranks[number], failed[number]
        when = self._when(number)
        self._end(grace=0.0)
        if isinstance(said, Failed):
            error = said.error
            named = EngineError(f"rank {number} failed{when}: {error}")
            return named if isinstance(error, EngineError) else error
        how = how_it_ended(culprit.process.wait()) or "ended"
        return EngineError(f"rank {number} (process {culprit.process.pid}) {how}{when}")

    def _release(self) -> None:
        self._selector.close()
        self._board.close()
        for rank in self._ranks:
            rank.channel.close()
            if rank.process.stdin is not None:
                rank.process.stdin.close()

    def _name_stuck(self) -> WeftError:
        """End all ranks, and say which one is behind."""
        done = self._board.done.tolist()
        exchanges, rounds = self._board.exchanges.tolist(), self._board.rounds.tolist()
        stage_size = len(self._ranks) // self._stages
        stopped = [rank.is_stopped for rank in self._ranks]

        def place(rank: int) -> tuple[bool, int, int, int, int]:
            """Which of two is behind: a stage's exchanges are not those of another."""
            stage = rank // stage_size
            return not stopped[rank], done[rank], stage, rounds[rank], exchanges[rank]

        number = min(range(len(self._ranks)), key=place)
        first = number // stage_size * stage_size
        stage = slice(first, first + stage_size)
        # Ranks of several copies of attention have only the exchanges of all in common.
        at = rounds if rounds[number] < max(rounds[stage]) else exchanges
        error = EngineError(
            f"rank {number} (process {self._ranks[number].process.pid}) is "
            f"{'stopped' if stopped[number] else 'stuck'}{self._when(number)}, at its exchange "
            f"{at[number]} with other ranks, for {self._patience:g} s; others are at "
            f"{max(at[stage])}"
        )
        self._fail(error)  # at once, for the front's own patience ends soon
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGABRT)  # faulthandler writes the stacks
        self._end(STACKS_GRACE)
        return error

    def _when(self, number: int) -> str:
        begun, done = int(self._board.begun[number]), int(self._board.done[number])
        if not begun:
            return " before its first step" if self._loaded else " while it loaded"
        return f" in step {begun}" if begun > done else f" after step {done}"

    def _end(self, grace: float) -> None:
        """Let the ranks end, and kill those that do not."""
        for rank in self._ranks:
            rank.hang_up()
        deadline = time.monotonic() + grace
        for rank in self._ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()


class _Rank:
    """A rank's process, and this end of its socket."""

    def __init__(
        self, number: int, copy: int, process: subprocess.Popen[bytes], channel: socket.socket
    ) -> None:
        self.number = number
        self.copy = copy
        self.process = process
        self.channel = channel

    @classmethod
    def start(
        cls, config: EngineConfig, load_model: str, number: int, world_size: int, board: Board
    ) -> _Rank:
        """Start it; its stdin stays open for as long as this process lives."""
        own, other = socket.socketpair()
        stage_size = world_size // config.pp
        copy, place = divmod(number % stage_size, stage_size // config.copies)
        in_last = number >= world_size - stage_size
        with other:
            orders = RankOrders(
                config,
                load_model,
                number,
                world_size,
                copy=copy,
                answers=place == 0 and in_last,
                socket=other.fileno(),
                board=board.fd,
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.serving.executor.rank"],
                stdin=subprocess.PIPE,
                stdout=2,  # stdout belongs to the parent's output; stray prints go to stderr
                pass_fds=(other.fileno(), board.fd),
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(orders) + b"\n")
        process.stdin.flush()
        return cls(number, copy, process, own)

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger)."""
        with suppress(OSError):  # it is gone
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            return "\nState:\tT" in status or "\nState:\tt" in status
        return False

    def wake(self) -> None:
        """Tell it that there is one more step."""
        with suppress(OSError):  # it is gone, as the receiver sees
            self.channel.send(b"\0")

    def receive(self) -> FromRank | None:
        """The next message; None if the process has ended."""
        header = self._read(8)
        data = self._read(int.from_bytes(header, "little")) if header else b""
        return rank_decoder.decode(data) if data else None

    def _read(self, count: int) -> bytes:
        """So many bytes, or none if they will not come."""
        parts: list[bytes] = []
        while count:
            try:
                part = self.channel.recv(count)
            except ConnectionResetError:
                part = b""
            if not part:
                return b""
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def hang_up(self) -> None:
        """Let it end once it has run what it was woken for."""
        with suppress(OSError):  # it is gone
            self.channel.shutdown(socket.SHUT_WR)
