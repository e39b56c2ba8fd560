"""Every error that weft raises on purpose.

    WeftError
    ├── ConfigError     a flag, file key or environment variable cannot work
    ├── ModelError      a checkpoint cannot be found, understood or loaded
    ├── RequestError    one request is at fault; the others are unaffected
    ├── EngineError     the engine cannot go on (it died, or it is draining)
    └── DiskError       a disk is full, or fails; later there may be room

A message names the field, the value and what to do. The command line prints
it as one line and exits with a non-zero status; the API turns a RequestError
into a 4xx, an EngineError into a 503 and a DiskError into a 507, all in OpenAI's shape.
"""

from __future__ import annotations


class WeftError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(WeftError):
    """A setting cannot work; the message names its flag."""


class ModelError(WeftError):
    """A checkpoint cannot be found, understood or loaded; the message names the file."""


class RequestError(WeftError):
    """One request is at fault.

    Args:
        message: what is wrong and what is allowed.
        param: the request field at fault, as the client wrote it.
        code: a short machine-readable reason, as OpenAI's `error.code`.
        status: the HTTP status that says it best.
        retry_after: seconds until it may be tried again, where that makes sense.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.retry_after = retry_after


class EngineError(WeftError):
    """The engine cannot serve: it died, is not ready, or is shutting down.

    Args:
        message: how that came.
        retry_after: seconds until it may serve again, if that is known.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DiskError(WeftError):
    """A disk is full, or fails, in a way that may pass: the same may work later."""
