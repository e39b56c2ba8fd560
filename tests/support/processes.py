"""Processes that tests have seen start."""

from __future__ import annotations

from collections.abc import Sequence

import psutil


def wait_until_gone(pids: Sequence[int], timeout: float = 10.0) -> None:
    """Fail if one of them is still there in the end; a zombie that its parent has yet to read is
    gone.
    """
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, left = psutil.wait_procs(
        [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], timeout
    )
    assert not left, left
