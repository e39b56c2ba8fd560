"""A model that costs next to nothing: every token is the same, and comes at once or on time.

`load_instant` and `load_paced` stand in for `weft.serving.executor.loading.load_model`.
"""

from __future__ import annotations

import time

import numpy as np

from weft.models.interface import FINITE, StepInput, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.loading import SINGLE_RANK, LoadedModel, ModelInfo, Progress, RankContext

VOCAB_SIZE = 151936
PIECE = "zq"  # in no key or id of an answer: where it stands in a stream is a token
TOKEN = 1884  # of `PIECE` in make_tokenizer(VOCAB_SIZE)
RATE = 10_000.0  # tokens per second of `load_paced`, over all requests
NUM_BLOCKS, BLOCK_SIZE = 65536, 16


class MockRunner:
    """A `ModelRunner`.

    Args:
        rate: tokens per second; a step that comes late is not made up for.
    """

    bytes_per_block = 1

    def __init__(self, rate: float = float("inf")) -> None:
        self._seconds_per_token = 1.0 / rate
        self._due = 0.0

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Nothing is kept."""

    def warm_up(self) -> None:
        """Nothing is cold."""

    def close(self) -> None:
        """Nothing is held."""

    def step(self, batch: StepInput) -> StepOutput:
        """`TOKEN` for every row that is sampled."""
        count = len(batch.sample_slot)
        if self._seconds_per_token:
            self._due = max(self._due + count * self._seconds_per_token, time.monotonic())
            time.sleep(max(0.0, self._due - time.monotonic()))
        return StepOutput(
            batch.step, np.full(count, TOKEN, np.int32), np.full(count, FINITE, np.int32)
        )


def load_instant(
    config: EngineConfig, progress: Progress, place: RankContext = SINGLE_RANK
) -> LoadedModel:
    """A model, or a rank's part of one, that takes no time."""
    return _loaded(config, MockRunner())


def load_paced(config: EngineConfig, progress: Progress) -> LoadedModel:
    """A model that gives `RATE` tokens per second, however many requests share them."""
    return _loaded(config, MockRunner(RATE))


def _loaded(config: EngineConfig, runner: MockRunner) -> LoadedModel:
    assert config.max_model_len is not None, "the mock has no length of its own"
    info = ModelInfo(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, config.max_model_len, "none", 1)
    return LoadedModel(runner, info)
