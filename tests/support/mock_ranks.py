"""Ranks without a model, for tests of the executor: `load` stands in for `loading.load_model`.

`config.model` says what goes wrong: "1 raises in 3" (rank, what, step), and
`config.tokenizer` is a directory, in which each rank notes the steps that it runs.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from weft.errors import ConfigError
from weft.models.interface import StepInput, StepOutput
from weft.serving.config import EngineConfig
from weft.serving.loading import LoadedModel, ModelInfo, Place, Progress

SLOW = 0.02
"""Seconds of a step of a rank that is slow."""


class RankRunner:
    """Samples token 100 * step + slot."""

    bytes_per_block = 1

    def __init__(self, config: EngineConfig, place: Place) -> None:
        words = config.model.split()
        rank, self._fault, step = (
            (int(words[0]), words[1], int(words[3])) if len(words) == 4 else (-1, "", 0)
        )
        self._at = step if rank == place.rank else -1
        self._notes = Path(config.tokenizer or os.devnull)
        if self._notes.is_dir():
            self._notes /= f"rank{place.rank}"

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def step(self, batch: StepInput) -> StepOutput:
        with self._notes.open("a") as notes:
            notes.write(f"{batch.step} {batch.token_ids.sum()}\n")
        if self._fault == "lags" and self._at >= 0:
            time.sleep(SLOW)
        if batch.step == self._at:
            if self._fault == "raises":
                raise ValueError("a bad step")
            if self._fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault == "hangs":
                time.sleep(600)
        return StepOutput(
            batch.step,
            (100 * batch.step + batch.sample_slot).astype(np.int32),
            np.zeros(len(batch.sample_slot), np.int32),
        )

    def close(self) -> None:
        with self._notes.open("a") as notes:
            notes.write("closed\n")


def load(config: EngineConfig, progress: Progress, place: Place) -> LoadedModel:
    """A rank that is ready at once, or refuses if it is to in step 0."""
    if config.model == f"{place.rank} refuses in 0":
        raise ConfigError("--model is not to my liking")
    return LoadedModel(RankRunner(config, place), ModelInfo(8, 1000, 64, "none"))
