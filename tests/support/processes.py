"""Processes that tests have seen start."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil


def wait_until_gone(pids: Sequence[int], timeout: float = 60.0) -> None:
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
def shared_memory_left_alone(timeout: float = 60.0) -> Iterator[None]:
    """Fail if something new stays in /dev/shm that no process uses.

    Tests beside this one have names there, too: for as long as their processes run, and for
    moments before a process uses them.
    """
    before = set(os.listdir("/dev/shm"))
    yield
    deadline = time.monotonic() + timeout
    while left := set(os.listdir("/dev/shm")) - before - _shared_memory_in_use():
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _shared_memory_in_use() -> set[str]:
    """The names in /dev/shm that a process has mapped or open."""
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends, or belongs to another user
            used.update(re.findall(r" /dev/shm/(\S+)", (process / "maps").read_text()))
            links = [os.readlink(each) for each in (process / "fd").iterdir()]
            used.update(link.removeprefix("/dev/shm/") for link in links)
    return used
