"""What is known of the HTTP request that a task works for.

It is set at the door, and goes with the task and those that it starts; where there is no HTTP
server (`weft batch`) there is none.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from weft.serving.api.middleware.keys import Key
    from weft.serving.engine.metrics import Phases


@dataclass
class RequestContext:
    """One request.

    Attributes:
        id: the client's `X-Request-Id`, or a new one.
        arrival: time.monotonic() when its head had come.
        key: that it was made with, if the server has keys.
        answers: what each of its answers took.
        error: the code of the error that it was answered with.
        prompts: as the model sees them, where they are to be logged.
        status: of the answer; 499 until it has begun, as when the client goes before.
    """

    id: str
    arrival: float = field(default_factory=time.monotonic)
    key: Key | None = None
    answers: list[Phases] = field(default_factory=list)
    error: str | None = None
    prompts: list[str] | None = None
    status: int = 499


current: ContextVar[RequestContext | None] = ContextVar("current", default=None)

admit: ContextVar[Callable[[], Awaitable[None]] | None] = ContextVar("admit", default=None)
"""For `AsyncEngine.generate`: what the answers of a batch's row wait for. Others do not wait."""


def owner() -> str:
    """To whom what a request makes belongs: its key's digest, or "" where there are no keys."""
    context = current.get()
    return "" if context is None or context.key is None else context.key.digest.hex()
