"""A process with all its descendants: started, frozen while others are timed, always ended.

Each runs in a session of its own, so that an interrupt reaches only the
benchmark, which then ends them in order. A frozen process (SIGSTOP) takes no
processor time, whatever its threads would spin on, and keeps its memory.

Not handled: descendants that move to another process group.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from weft.errors import WeftError

_GRACE = 30.0  # seconds between SIGTERM and SIGKILL
_POLL = 0.02
_TAIL = 30  # lines of a log that an error shows


class PeerError(WeftError):
    """A contestant ended, did not get ready, or answered with an error."""


@dataclass(slots=True)
class Contender:
    """A running process group.

    Attributes:
        name: of the contestant.
        process: the group's leader.
        log: the file that its stderr goes to, and its stdout unless that is a pipe.
    """

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def freeze(self) -> None:
        """Stop the whole group until `thaw`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let the group run again."""
        os.killpg(self.process.pid, signal.SIGCONT)

    def resident(self) -> int:
        """Bytes resident over the leader and all descendants; shared pages count once (PSS)."""
        leader = psutil.Process(self.process.pid)
        total = 0
        for process in (leader, *leader.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total

    def fail(self, problem: str) -> PeerError:
        """An error that shows the end of the log."""
        tail = self.log.read_text(errors="replace").splitlines()[-_TAIL:]
        return PeerError("\n".join([f"{self.name} {problem}; {self.log} ends with", *tail]))

    def wait_ready(self, url: str, body: Mapping[str, Any], timeout: float) -> None:
        """Wait until a POST of `body` to `url` is answered with 200.

        Raises:
            PeerError: the process ended, or there is no answer after `timeout` seconds.
        """
        request = urllib.request.Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + timeout
        problem = "no answer"
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise self.fail(f"ended with status {self.process.returncode} before it was ready")
            try:
                with urllib.request.urlopen(request, timeout=timeout):
                    return
            except urllib.error.HTTPError as error:  # most servers say 503 while they load
                problem = f"HTTP {error.code}: {error.read()[:300].decode(errors='replace')}"
            except OSError as error:
                problem = str(error)
            time.sleep(_POLL)
        raise self.fail(f"was not ready after {timeout:.0f} s ({problem})")


@contextlib.contextmanager
def start(
    name: str,
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    pipes: bool = False,
) -> Iterator[Contender]:
    """Run `command`; at the end of the block nothing of it is left.

    Args:
        environment: added to this process's own.
        log: file to write its output to.
        pipes: connect stdin and stdout to this process instead.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
            stdout=subprocess.PIPE if pipes else file,
            stderr=file,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    contender = Contender(name, process, log)
    try:
        yield contender
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the leader, then SIGKILL to all of the group that is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
