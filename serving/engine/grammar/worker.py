"""The compiler process for grammars: it forks a process for each attempt.

Compiling runs C++ on a client's text. It may take forever, all the memory, or the whole stack. Each
attempt therefore has a separate process, with limits. The tokenizer is loaded once, before the
forks, so a fork takes 15 to 30 ms processor time.

This process must have a single thread, because a fork copies no others. It ends when its stdin
ends. Both pipes carry messages from `messages.framed`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import selectors
import signal
import traceback
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

import msgspec

from weft.serving.engine.grammar.messages import HEAD, Answer, Start, Stop, Vocabulary, framed
from weft.serving.engine.grammar.trial import Compiler
from weft.serving.executor import child_process

MAX_MEMORY = 1 << 30  # bytes for one attempt
MIN_SECONDS = 1e-6  # a timer's unit

_order = msgspec.msgpack.Decoder(Start | Stop)
_answer = msgspec.msgpack.Decoder(Answer)

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # prctl: a signal for this process when its parent dies


@dataclass
class _Attempt:
    """A forked process for compiling a grammar.

    Attributes:
        number: as in Start.
        pid: the process.
        file: the memory for its answer.
    """

    number: int
    pid: int
    file: BinaryIO


class Worker:
    """Forks attempts, and passes their answers on.

    Args:
        compiler: compiles in the forked processes.
        orders: unbuffered stream with Start and Stop.
        out: stream for answers.
    """

    def __init__(self, compiler: Compiler, orders: BinaryIO, out: BinaryIO) -> None:
        self._compiler = compiler
        self._orders = orders
        self._out = out
        self._attempts: dict[int, _Attempt] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(orders, selectors.EVENT_READ)
        with open("/proc/self/statm") as statm:
            self._memory = int(statm.read().split()[0]) * resource.getpagesize() + MAX_MEMORY

    def run(self) -> None:
        """Serve until the orders end."""
        while True:
            for key, _ in self._selector.select():
                if isinstance(key.data, _Attempt):
                    self._end(key.data, key.fd)
                    continue
                data = read(self._orders)
                if data is None:
                    for attempt in self._attempts.values():
                        os.kill(attempt.pid, signal.SIGKILL)
                    return
                order = _order.decode(data)
                if isinstance(order, Start):
                    self._start(order)
                elif order.number in self._attempts:
                    os.kill(self._attempts[order.number].pid, signal.SIGKILL)

    def _start(self, order: Start) -> None:
        try:
            file = open(os.memfd_create("answer"), "w+b", buffering=0)  # noqa: SIM115
        except OSError as error:
            self._answer(Answer(order.number, fault=str(error)))
            return
        pid = 0
        try:
            pid = os.fork()
            if pid == 0:
                self._attempt(order, file)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if pid != 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            file.close()
            self._answer(Answer(order.number, fault=str(error)))
            return
        attempt = self._attempts[order.number] = _Attempt(order.number, pid, file)
        self._selector.register(pidfd, selectors.EVENT_READ, attempt)

    def _attempt(self, order: Start, file: BinaryIO) -> NoReturn:
        """Compile in the forked process."""
        status = 1
        try:
            os.nice(order.nice)
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_AS, (self._memory, self._memory))
            signal.setitimer(signal.ITIMER_PROF, max(order.seconds, MIN_SECONDS))
            answer = self._compiler.compile(order.grammar)
            file.write(msgspec.msgpack.encode(answer))
            status = 0
        except Exception:  # noqa: BLE001  the process ends here
            traceback.print_exc()
        finally:
            os._exit(status)

    def _end(self, attempt: _Attempt, pidfd: int) -> None:
        """Pass on an ended attempt's result."""
        self._selector.unregister(pidfd)
        os.close(pidfd)
        del self._attempts[attempt.number]
        code = os.waitstatus_to_exitcode(os.waitpid(attempt.pid, 0)[1])
        with attempt.file as file:
            file.seek(0)
            if code == 0:
                answer = _answer.decode(file.read())
            elif code == -signal.SIGPROF:
                answer = Answer(late=True)
            else:
                answer = Answer(died=child_process.how_it_ended(code))
        self._answer(msgspec.structs.replace(answer, number=attempt.number))

    def _answer(self, answer: Answer) -> None:
        self._out.write(framed(answer))
        self._out.flush()


def read(stream: BinaryIO) -> bytes | None:
    """Return the next message; None at the end."""
    head = _exactly(stream, HEAD)
    return None if head is None else _exactly(stream, int.from_bytes(head, "little"))


def _exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = b""
    while len(data) < size:
        more = stream.read(size - len(data))
        if not more:
            return None
        data += more
    return data


def main() -> None:
    """Run the process."""
    child_process.ignore_signals()
    orders = open(0, "rb", buffering=0)  # noqa: SIM115
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # stray prints go to stderr
    first = read(orders)
    if first is None:
        return
    worker = Worker(Compiler(msgspec.msgpack.decode(first, type=Vocabulary)), orders, out)
    out.write(framed(Answer()))
    out.flush()
    gc.collect()
    gc.freeze()  # forks share the memory
    worker.run()


if __name__ == "__main__":
    main()
