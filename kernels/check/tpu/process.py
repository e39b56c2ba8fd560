"""Runs jobs in worker processes, and survives their hangs, crashes and lost state."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, Any

DEVICES = 16
"""CPU devices in a worker. Meshes are smaller, because the interpreter's callbacks hang if XLA has
only one thread per device in the mesh.
"""

DEADLINE = 300.0
"""Seconds for a job before its worker is killed. Deadlocks are found much sooner."""

WORKER = (sys.executable, "-m", "weft.kernels.check.tpu.worker")


class Workers:
    """Answers jobs with one worker, until a finding destroys the worker's state.

    The next job then gets a new worker.
    """

    def __init__(self, command: Sequence[str] = WORKER, deadline: float = DEADLINE) -> None:
        """Store the arguments; the first job starts a worker.

        Args:
            command: the worker's command.
            deadline: seconds for a job.
        """
        self._command = command
        self._deadline = deadline
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job (worker.py); return its findings, and the job."""
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `_end` closes it
            self._process = start(self._command, self._errors)
        outcome = self._answer(self._process, job)
        if outcome["findings"]:
            self._end()
        return job | outcome

    def _answer(self, process: subprocess.Popen[str], job: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the worker is dead; reading reports it
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self._deadline):
                return _found(f"hang: no answer in {self._deadline:g} s")
        line = process.stdout.readline()
        if not line:
            return _found(f"crash: exit status {process.wait()}: {self._last_error()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_error(self) -> str:
        assert self._errors is not None
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["nothing on stderr"])[-1]

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(BrokenPipeError):  # it may not have read its last job
                self._process.communicate()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None


def _found(finding: str) -> dict[str, Any]:
    return {"findings": [finding], "seconds": 0.0}


def start(command: Sequence[str], errors: IO[str] | None = None) -> subprocess.Popen[str]:
    """Start a worker with its environment.

    Args:
        command: the worker's command.
        errors: receives its stderr; this process's stderr by default.
    """
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "NPROC": str(2 * DEVICES),  # threads of XLA's pool; see DEVICES
        "TPU_SKIP_MDS_QUERY": "1",  # libtpu: there is no metadata server
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several compile at once
        "TPU_STDERR_LOG_LEVEL": "3",
        "TPU_MIN_LOG_LEVEL": "3",
    }
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=environment,
    )
