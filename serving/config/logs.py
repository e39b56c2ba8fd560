"""What is logged, on stderr: lines for people, or JSON objects for programs (`--log-format`).

A record that is made while a request is served has the request's id. No record has a prompt, unless
--log-prompts asks for it.
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
"""The attribute of a record, as in `extra={FIELDS: {...}}`, that JSON has as keys of its own."""

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The id of the HTTP request that a task works for; the API sets it."""

logger = logging.getLogger("weft")


def configure(form: LogFormat = "text") -> None:
    """Write to stderr what is logged, of weft's own also what is no warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if form == "json" else _Text())
    logging.basicConfig(handlers=[handler], force=True)
    logger.setLevel(logging.INFO)


def say(message: str, level: int = logging.INFO) -> None:
    """Tell whoever has started the command: a bare line, or in JSON a record like all others."""
    if any(isinstance(handler.formatter, _Json) for handler in logging.getLogger().handlers):
        logger.log(level, message)
    else:
        print(message, file=sys.stderr)


class _Text(logging.Formatter):
    """A line, with the request's id at its end."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s%(request)s")

    def format(self, record: logging.LogRecord) -> str:
        request = request_id.get()
        record.request = "" if request is None else f" [{request}]"
        return super().format(record)


class _Json(logging.Formatter):
    """An object: time (UTC), level, logger, message; request_id, exception, fields if any."""

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
