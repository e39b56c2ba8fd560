"""Processes that tests have seen start."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil


def wait_until_gone(pids: Sequence[int], timeout: float = 10.0) -> None:
    """Fail if one of them is still there in the end; a zombie that its parent has yet to read is
    gone.
    """
    alive = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may go between two looks
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    _, left = psutil.wait_procs(alive, timeout)
    assert not left, left


@contextmanager
def shared_memory_left_alone(timeout: float = 10.0) -> Iterator[None]:
    """Fail if something new stays in /dev/shm; other tests have names there for moments."""
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + timeout
    while left := set(os.listdir("/dev/shm")) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)
