"""The context of an HTTP request: data about the request that all layers share.

The outermost middleware sets it in the request's task, and tasks started there inherit it. Without
an HTTP server (`weft batch`) there is no context.
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
    """The context of one request.

    Attributes:
        id: the client's `X-Request-Id`, or a new id.
        arrival: time.monotonic() when its headers were complete.
        key: the API key, if the server has keys.
        answers: token counts and times of its answers.
        error: the code of the error response.
        prompts: the prompts as the model sees them, if they are logged.
        status: the response's status. It is 499 until the response begins, and stays so if the
            client leaves earlier.
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
"""The `admit` argument of `AsyncEngine.generate`; only rows of batches have one."""

heavy: ContextVar[bool] = ContextVar("heavy", default=False)
"""True if the request's body has very many values; see `ServerState.aside`."""


def owner() -> str:
    """Return the owner of files and batches: the key's digest, or "" without keys."""
    context = current.get()
    return "" if context is None or context.key is None else context.key.digest.hex()
