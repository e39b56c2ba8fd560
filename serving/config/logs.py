"""Logging to stderr: lines for people, or JSON objects for programs (`--log-format`).

Records that are made while serving a request contain the request's id. Prompts are logged only with
--log-prompts.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
FIELDS = "fields"
"""Record attribute for additional JSON keys, set by `extra={FIELDS: {...}}`."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task works for. The API sets it."""

logger = logging.getLogger("weft")


def configure(form: LogFormat = "text") -> None:
    """Log to stderr: weft's records from level INFO, other libraries' warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(handlers=[handler], force=True)
    logger.setLevel(logging.INFO)


def say(message: str, level: int = logging.INFO) -> None:
    """Print a message for the user: a bare line, or a regular record in JSON format."""
    if any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers):
        logger.log(level, message)
    else:
        print(message, file=sys.stderr)


class _Text(logging.Formatter):
    """Formatter for lines, with the request's id at the end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s")

    def format(self, record: logging.LogRecord) -> str:
        request = request_id.get()
        record.request = "" if request is None else f" [{request}]"
        return super().format(record)


class _Json(logging.Formatter):
    """Formatter for JSON objects.

    Keys: time (UTC), level, logger and message; request_id, exception and fields if present.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := request_id.get()) is not None:
            entry["request_id"] = request
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        entry |= getattr(record, FIELDS, {})
        return msgspec.json.encode(entry).decode()
