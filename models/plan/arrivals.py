"""Requests at their times: read from a server's log, or drawn from a load.

A log has one JSON object in each line, as `weft serve --log-requests --log-format json` writes
them. These keys count:

    time             end of the request, ISO 8601
    seconds          from its arrival to its end; 0 if absent
    prompt_tokens    at least 1
    output_tokens    at least 1

Lines without both counts are other messages or refused requests, and are skipped.
"""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import ConfigError

LONGEST = 10**9 - 1  # tokens in a prompt or an answer


class Arrival(NamedTuple):
    """A request and its time.

    Attributes:
        time: arrival in seconds, from 0.
        prompt: number of tokens in the prompt.
        answer: number of tokens in the answer.
        prefix: number of first prompt tokens in common with the group.
        group: the group's number.
    """

    time: float
    prompt: int
    answer: int
    prefix: int = 0
    group: int = 0


def read_log(path: Path) -> list[Arrival]:
    """Return a log's requests by their arrival; the first arrives at 0.

    Args:
        path: the log; the module's text describes it.

    Raises:
        ConfigError: the file cannot be read, a line is wrong, or there are fewer than two requests.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # a text may have other line ends
    except OSError as error:
        raise ConfigError(f"log is {path}; it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"log is {path}; it cannot be read: {error}") from None
    found = [
        arrival
        for number, line in enumerate(lines, 1)
        if line.strip() and (arrival := _arrival(line, f"line {number} of {path}")) is not None
    ]
    found.sort()
    if len(found) < 2 or found[0].time == found[-1].time:
        raise ConfigError(
            f"log is {path}; a rate needs requests at two times at least, it has {len(found)} "
            "with prompt_tokens and output_tokens (weft serve --log-requests --log-format json)"
        )
    return [arrival._replace(time=arrival.time - found[0].time) for arrival in found]


def _arrival(line: str, where: str) -> Arrival | None:
    """Return a line's request with its time since 1970; None for other messages."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ConfigError(f"{where} is not JSON; each line must be an object") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is not an object; each line must be one")
    if not entry.get("prompt_tokens") or not entry.get("output_tokens"):
        return None
    end = _time(entry.get("time"), where)
    seconds = entry.get("seconds", 0)
    if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
        raise ConfigError(f"seconds is {seconds!r} in {where}; it must be 0 or more")
    return Arrival(
        end - seconds, _count(entry, "prompt_tokens", where), _count(entry, "output_tokens", where)
    )


def _time(text: Any, where: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"time is {text!r} in {where}; it must be like 2026-11-22T07:50:49.258+00:00"
        ) from None


def _count(entry: dict[str, Any], name: str, where: str) -> int:
    count = entry[name]
    if type(count) is not int or not 0 < count <= LONGEST:
        raise ConfigError(f"{name} is {count!r} in {where}; it must be in [1, {LONGEST}]")
    return count
