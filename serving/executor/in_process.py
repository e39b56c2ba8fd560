"""One runner in this process, in a thread of its own.

The thread loads the model, warms it up and runs every step: what a library
keeps per thread (its own worker threads above all) is made once. Where devices
work on their own, it begins steps, and a second thread waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weft.errors import WeftError
from weft.models.interface import DispatchingRunner, Result, Step
from weft.serving.executor.loading import LoadedModel


class InProcessExecutor:
    """Owns a runner.

    Args:
        load: makes the runner, ready for its first step; what it raises is raised here.

    Attributes:
        model: what has been loaded.
    """

    def __init__(self, load: Callable[[], LoadedModel]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-runner")
        try:
            loaded = self._thread.submit(load).result()
        except BaseException:
            self._thread.shutdown(wait=False)
            raise
        self._runner, self.model = loaded.runner, loaded.info
        runner = self._runner
        self._dispatch = runner.dispatch if isinstance(runner, DispatchingRunner) else None
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="weft-readback")

    def submit(self, step: Step) -> Future[Result]:
        """See `Executor.submit`; of one copy of attention."""
        (batch,) = step
        assert batch is not None
        runner = self._runner
        if self._dispatch is None:
            return self._thread.submit(lambda: (runner.step(batch),))
        begun = self._thread.submit(self._dispatch, batch)
        return self._waiting.submit(lambda: (begun.result()(),))

    def check(self) -> WeftError | None:
        """None; what a step raises is in its future."""
        return None

    def rank_seconds(self) -> tuple[float, ...]:
        """None: of one rank the steps say it."""
        return ()

    def close(self) -> None:
        """See `Executor.close`."""
        self._waiting.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)
        self._waiting.shutdown()
        self._runner.close()
