"""Records what a thread launches, and launches it again with the same arguments, like a CUDA graph.

The host's code does not run again. Whatever it counted, chose or read stays as it was recorded;
only the numbers in memory are new. Steps are kernels, torch operators, and waits of streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_state = threading.local()


class Recording:
    """The steps of one thread. They keep their tensors, so no address gets another use."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def add(self, step: Callable[[], object]) -> None:
        """Add a step, which has run once."""
        self._steps.append(step)

    def replay(self) -> None:
        """Run all steps again, in their order."""
        for step in self._steps:
            step()


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record this thread's steps within the context."""
    recording = Recording()
    with _set(recording):
        yield recording


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record no steps within the context: they are parts of a step."""
    with _set(None):
        yield


def note(step: Callable[[], object]) -> None:
    """Add a step to this thread's recording, if there is one."""
    recording: Recording | None = getattr(_state, "recording", None)
    if recording is not None:
        recording.add(step)


@contextmanager
def _set(recording: Recording | None) -> Iterator[None]:
    before = getattr(_state, "recording", None)
    _state.recording = recording
    try:
        yield
    finally:
        _state.recording = before
