"""Errors that weft raises on purpose.

    WeftError
    ├── ConfigError     a flag, file key or environment variable cannot work
    ├── ModelError      a checkpoint cannot be found, understood or loaded
    ├── RequestError    one request is at fault; the others are unaffected
    ├── EngineError     the engine cannot continue (it died, or it is draining)
    └── DiskError       a disk is full or fails; a retry may succeed

A message names the field, the value and the remedy. The command line prints it as one line and
exits with a non-zero status. The API turns a RequestError into a 4xx, an EngineError into a 503 and
a DiskError into a 507, all in OpenAI's format.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

_MAX_SHOWN = 80  # characters of a wrong value in a message


class WeftError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(WeftError):
    """A setting cannot work. The message names its flag."""


class ModelError(WeftError):
    """A checkpoint cannot be found, understood or loaded. The message names the file."""


class RequestError(WeftError):
    """One request is at fault.

    Args:
        message: the problem and the allowed values.
        param: the request field at fault, as written by the client.
        code: a short machine-readable reason, like OpenAI's `error.code`.
        status: the HTTP status of the response.
        retry_after: seconds until a retry makes sense, or None.
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
        message: the cause.
        retry_after: seconds until the engine may serve again, or None if unknown.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DiskError(WeftError):
    """A disk is full or fails, possibly for a while. A retry may succeed."""


def shown(value: Any) -> str:
    """Return a JSON value for a message: its words are JSON's, and a long value is cut."""
    text = _written(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "..."


def _written(value: Any) -> str:
    """Write a value's beginning, because a large value takes long."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case str():
            return repr(value[: _MAX_SHOWN + 1])
        case list():
            return f"[{', '.join(map(_written, value[:_MAX_SHOWN]))}]"
        case dict():
            fields = islice(value.items(), _MAX_SHOWN)
            return (
                f"{{{', '.join(f'{_written(name)}: {_written(each)}' for name, each in fields)}}}"
            )
    return repr(value)
