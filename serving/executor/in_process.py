"""A single model runner in this process, on its own thread.

One thread loads the model, warms it up and runs every step, so per-thread library state (such as
worker pools) is created only once. On devices that run asynchronously this thread dispatches
steps, and a second thread waits for their output.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weft.errors import WeftError
from weft.models.interface import DispatchingRunner, Result, Step
from weft.serving.executor.loading import LoadedModel


class InProcessExecutor:
    """Executor with one runner; see `Executor`.

    Args:
        load: creates the runner, ready for its first step. Its exceptions are raised here.

    Attributes:
        model: properties of the loaded model.
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
        self._readback = ThreadPoolExecutor(1, thread_name_prefix="weft-readback")

    def submit(self, step: Step) -> Future[Result]:
        """See `Executor.submit`. The step has the input of one attention group."""
        (batch,) = step
        assert batch is not None
        runner = self._runner
        if self._dispatch is None:
            return self._thread.submit(lambda: (runner.step(batch),))
        dispatched = self._thread.submit(self._dispatch, batch)
        return self._readback.submit(lambda: (dispatched.result()(),))

    def check(self) -> WeftError | None:
        """Return None: a step's future holds its exception."""
        return None

    def rank_seconds(self) -> tuple[float, ...]:
        """Return (): the engine times the steps of a single rank itself."""
        return ()

    def close(self) -> None:
        """See `Executor.close`."""
        self._readback.shutdown(wait=False, cancel_futures=True)
        self._thread.shutdown(cancel_futures=True)
        self._readback.shutdown()
        self._runner.close()
