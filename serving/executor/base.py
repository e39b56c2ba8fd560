"""What carries steps to the model runner, or to all its ranks."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from weft.errors import WeftError
from weft.models.interface import Result, Step
from weft.serving.loading import ModelInfo


class Executor(Protocol):
    """Runs steps in the order in which they are submitted.

    Attributes:
        model: what has been loaded.
        failure: why no step can run any more, also where none was submitted since.
    """

    model: ModelInfo
    failure: WeftError | None

    def submit(self, step: Step) -> Future[Result]:
        """Queue a step; the future holds what it produced, or what a runner raised."""

    def close(self) -> None:
        """Drop steps that have not begun, wait for the one that has, release the model."""
