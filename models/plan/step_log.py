"""A server's log of its steps: `weft serve --step-log FILE` writes it, `weft plan` reads it.

The first line names the model and the layout. Each further line is one step.

    {"model": "Qwen/Qwen3-8B", "dtype": "auto", "quantization": "none", "tp": 2, ...}
    {"batch": {"decodes": 8, "decode_context": 512.5, ...}, "seconds": 0.021, "on_device": 0.02}
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from weft.errors import ConfigError
from weft.models.plan.batch import Batch

Line = TypeVar("Line")


@dataclass(frozen=True, slots=True)
class LoggedModel:
    """The server whose steps are logged.

    Attributes:
        model: as given to the server.
        dtype, quantization, kv_cache_dtype: as given.
        tp, ep, cp, pp: the layout's sizes.
    """

    model: str
    dtype: str
    quantization: str
    tp: int
    ep: int
    cp: int
    pp: int
    kv_cache_dtype: str = "auto"


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step.

    Attributes:
        batch: its work, in all attention groups together.
        seconds: from its submission, or from the end of the step before if that came later, until
            the engine core had its result.
        on_device: `StepOutput.seconds` of the slowest attention group.
    """

    batch: Batch
    seconds: float
    on_device: float


def read_step_log(path: Path) -> tuple[LoggedModel, list[LoggedStep]]:
    """Return a log's model and steps; a last line without its end is left out.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not what it should be.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path} is empty; weft serve --step-log writes a line for each step")
    model = _decode(path, 1, lines[0], LoggedModel)
    return model, [_decode(path, i, line, LoggedStep) for i, line in enumerate(lines[1:], 2)]


def _decode(path: Path, number: int, line: bytes, kind: type[Line]) -> Line:
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}; it must be a line of weft serve --step-log"
        ) from None
