"""Writes the engine core's log of steps (`--step-log`); see models/plan/step_log.py."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import msgspec

from weft.errors import ConfigError
from weft.models.interface import Result, Step
from weft.models.plan.batch import Batch
from weft.models.plan.step_log import LoggedModel, LoggedStep
from weft.serving.config.settings import EngineConfig

BUFFER = 1 << 16  # bytes

logger = logging.getLogger(__name__)


class StepLog:
    """A file with a line for each step. With several engines, engine n writes to FILE.n.

    Lines stay in memory until there are many, or `flush` is called. If the file cannot be written
    later, because the disk is full, the log ends with a warning and the engine goes on.

    Args:
        file: `EngineConfig.step_log`.
        config: the engine's settings.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, file: str, config: EngineConfig) -> None:
        path = Path(file if config.dp == 1 else f"{file}.{config.replica.number}")
        try:
            self._file: BinaryIO = path.open("wb", buffering=BUFFER)
        except OSError as error:
            raise ConfigError(f"--step-log is {path}: {error.strerror}") from None
        self._path, self._ended = path, False
        self._running: deque[tuple[Step, float]] = deque()
        self._last = 0.0
        self._write(
            LoggedModel(
                model=config.model,
                dtype=config.dtype,
                quantization=config.quantization,
                kv_cache_dtype=config.kv_cache_dtype,
                tp=config.tp_size,
                ep=config.ep,
                cp=config.cp,
                pp=config.pp,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._writing():
            self._file.close()

    def submitted(self, step: Step) -> None:
        """Take the time at which a step is submitted."""
        self._running.append((step, time.monotonic()))

    def finished(self, result: Result) -> None:
        """Write the oldest step's line; it has ended just now."""
        now = time.monotonic()
        step, begin = self._running.popleft()
        self._write(
            LoggedStep(
                batch=Batch.of(batch for batch in step if batch is not None),
                seconds=now - max(begin, self._last),
                on_device=max(output.seconds for output in result if output is not None),
            )
        )
        self._last = now

    def flush(self) -> None:
        """Write all lines to the file."""
        with self._writing():
            self._file.flush()

    def _write(self, line: LoggedModel | LoggedStep) -> None:
        if self._ended:
            return
        with self._writing():
            self._file.write(msgspec.json.encode(line) + b"\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """End the log if the file cannot be written within."""
        try:
            yield
        except OSError as error:
            logger.warning("--step-log %s ends here: %s", self._path, error.strerror)
            with suppress(OSError):  # it tries to write once more, and closes the file anyway
                self._file.close()
            self._file = BytesIO()
            self._ended = True
