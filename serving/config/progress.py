"""How far a list of requests has come, on stderr: a bar for people, lines for a log file.

On a terminal rich draws a bar with the count, the rate and the time left; else
a plain line is written every ten seconds. stdout is never touched.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

LINE_EVERY = 10.0  # seconds between two lines of a log


class Progress:
    """Counts items and output tokens; show it with `with`.

    Args:
        title: what is being done.
        total: items to do.
        unit: what an item is called.
        quiet: show nothing, only count.
    """

    def __init__(
        self, title: str, total: int, *, unit: str = "requests", quiet: bool = False
    ) -> None:
        self.title, self.total, self.unit, self.quiet = title, total, unit, quiet
        self.done = self.tokens = 0
        self.started = self._last_line = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self.started = self._last_line = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task(self.title, total=self.total, rate="")
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def rate(self) -> float:
        """Output tokens per second since the start."""
        return self.tokens / max(self.seconds, 1e-9)

    def advance(self, tokens: int) -> None:
        """One item is done, with so many output tokens."""
        self.done += 1
        self.tokens += tokens
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, rate=f"{self.rate:,.0f} tokens/s")
        elif not self.quiet and time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            left = self.seconds / self.done * (self.total - self.done)
            print(
                f"{self.title}: {self.done}/{self.total} {self.unit}, "
                f"{self.rate:.0f} tokens/s, {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )


def _bar() -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
