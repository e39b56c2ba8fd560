"""What carries steps to the model runner, or to all its ranks."""

from __future__ import annotations

from typing import Protocol

from weft.errors import WeftError
from weft.models.interface import Result, Step
from weft.serving.executor.loading import ModelInfo


class Pending(Protocol):
    """What a step is going to produce; a concurrent.futures.Future is one."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What a runner has raised, or why no runner can run the step.

        Args:
            timeout: seconds to wait for the step.

        Raises:
            TimeoutError: it is not done yet.
        """

    def result(self, timeout: float | None = None) -> Result:
        """What the step has produced; raises what `exception` gives."""


class Executor(Protocol):
    """Runs steps in the order in which they are submitted. One thread alone uses it.

    Attributes:
        model: what has been loaded.
    """

    model: ModelInfo

    def submit(self, step: Step) -> Pending:
        """Queue a step."""

    def check(self) -> WeftError | None:
        """Why no step can run any more. To be asked now and then while no step is awaited."""

    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank has spent in steps so far; empty where there is one rank."""

    def close(self) -> None:
        """Drop steps that have not begun, wait for the one that has, release the model."""
