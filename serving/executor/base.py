"""Interface between the engine and the ranks."""

from __future__ import annotations

from typing import Protocol

from weft.errors import WeftError
from weft.models.interface import Result, Step
from weft.serving.executor.loading import ModelInfo


class Pending(Protocol):
    """A step's future output. A concurrent.futures.Future is one."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the step; return its error, or None on success.

        Args:
            timeout: maximum seconds to wait.

        Raises:
            TimeoutError: the step is still running.
        """

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the step and return its output; raise its error, if any."""


class Executor(Protocol):
    """Runner for steps, in submission order. Only one thread may use it.

    Attributes:
        model: properties of the loaded model.
    """

    model: ModelInfo

    def submit(self, step: Step) -> Pending:
        """Queue a step and return a future for its output."""

    def check(self) -> WeftError | None:
        """Return the error behind the failure of all further steps, or None.

        Call this regularly while no step is running.
        """

    def rank_seconds(self) -> tuple[float, ...]:
        """Return each rank's seconds in steps so far; empty with a single rank."""

    def close(self) -> None:
        """Drop queued steps, wait for the running one, and release the model."""
