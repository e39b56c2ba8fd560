"""One runner in this process, in a thread of its own.

The thread loads the model, warms it up and runs every step: what a library
keeps per thread (its own worker threads above all) is made once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from weft.errors import WeftError
from weft.models.interface import Result, Step
from weft.serving.loading import LoadedModel


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

    def submit(self, step: Step) -> Future[Result]:
        """See `Executor.submit`; of one copy of attention."""
        return self._thread.submit(self._run, step)

    def _run(self, step: Step) -> Result:
        (batch,) = step
        assert batch is not None
        return (self._runner.step(batch),)

    def check(self) -> WeftError | None:
        """None; what a step raises is in its future."""
        return None

    def close(self) -> None:
        """See `Executor.close`."""
        self._thread.shutdown(cancel_futures=True)
        self._runner.close()
