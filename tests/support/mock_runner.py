"""A model runner whose next token is a pure function of the request's tokens so far.

It reads them back from its cache through the block table, as a real model
reads keys and values: a wrong block table, position, slot or order of steps
gives a wrong token. Each cache entry holds a token and its position.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from weft.errors import ConfigError, ModelError
from weft.models.interface import (
    FINITE,
    NOT_FINITE,
    Logprobs,
    SlotSampling,
    StepInput,
    StepOutput,
)
from weft.models.plan.sizes import BLOCK_UNIT
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.loading import LoadedModel, ModelInfo, Progress

VOCAB_SIZE = 64
HIDDEN_SIZE = 4
END = 0  # about one token in 64: outputs end by themselves now and then
NOT_FINITE_TOKEN = 61  # a prompt with it fails, alone
CRASH_TOKEN = 62  # a prompt with it makes the runner raise
HANG_TOKEN = 63  # a prompt with it makes the step take an hour


def next_token(tokens: Sequence[int] | np.ndarray, seed: int, index: int) -> int:
    """The output's index-th token; never one of the special ones at the end of the vocabulary."""
    digest = zlib.crc32(np.asarray([*tokens, seed, index], np.int64).tobytes())
    return digest % (VOCAB_SIZE - 3)


def expected(
    prompt: Sequence[int], max_tokens: int, *, seed: int = 0, ends: Sequence[int] = (END,)
) -> list[int]:
    """The whole output for a prompt."""
    output: list[int] = []
    while len(output) < max_tokens and (not output or output[-1] not in ends):
        output.append(next_token([*prompt, *output], seed, len(output)))
    return output


def logprob(tokens: Sequence[int] | np.ndarray, token: int) -> float:
    """What the mock says of `token` after `tokens`."""
    return -1.0 - float(zlib.crc32(np.asarray([*tokens, token], np.int64).tobytes()) % 1000) / 1000


def hidden_state(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 [HIDDEN_SIZE] of the last of some tokens: whole numbers, so that sums are exact."""
    if NOT_FINITE_TOKEN in tokens:
        return np.full(HIDDEN_SIZE, np.nan, np.float32)
    digest = zlib.crc32(np.asarray(tokens, np.int64).tobytes())
    return np.array([digest >> 8 * i & 255 for i in range(HIDDEN_SIZE)], np.float32)


@dataclass
class MockRunner:
    """See the module's text. `seconds` is how long each step takes.

    Attributes:
        steps: every batch it was given.
        tokens_computed: sum of T over them.
    """

    block_size: int
    seconds: float = 0.0
    steps: int = 0
    tokens_computed: int = 0
    closed: bool = False
    _sampling: dict[int, SlotSampling] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    bytes_per_block = 1024

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self._cache = np.full((num_blocks, self.block_size, 2), -7, np.int64)

    def warm_up(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def step(self, batch: StepInput) -> StepOutput:
        assert batch.step == self.steps
        self.steps += 1
        self.tokens_computed += len(batch.token_ids)
        assert len(set(batch.slot.tolist())) == len(batch.slot)
        for sampling in batch.new_slots:
            self._sampling[sampling.slot] = sampling
        if self.seconds:
            time.sleep(self.seconds)
        for b in range(len(batch.slot)):
            self._write(batch, b)
        row_of = np.searchsorted(batch.query_start, batch.sample_index, side="right") - 1
        sampled, status, contexts = [], [], []
        for i, b in enumerate(row_of.tolist()):
            slot = int(batch.sample_slot[i])
            assert slot == batch.slot[b]
            assert batch.sample_index[i] == batch.query_start[b + 1] - 1
            tokens = self._read(batch, b)
            token = self.next_token(tokens, self._sampling[slot].seed, int(batch.output_index[i]))
            self._last[slot] = token
            sampled.append(token)
            contexts.append(tokens)
            status.append(self.status(tokens))
        return StepOutput(
            step=batch.step,
            token_ids=np.array(sampled, np.int32),
            status=np.array(status, np.int32),
            logprobs=self._logprobs(contexts, sampled, self._top(batch)),
            prompt_logprobs=self._score(batch),
            pooled=self._pool(batch),
            seconds=self.seconds,
        )

    def next_token(self, tokens: np.ndarray, seed: int, index: int) -> int:
        """The output's index-th token, after all tokens so far."""
        return next_token(tokens, seed, index)

    def status(self, tokens: np.ndarray) -> int:
        """Whether the logits are finite; some tokens bring about worse."""
        assert CRASH_TOKEN not in tokens, "the runner crashed"
        if HANG_TOKEN in tokens:
            time.sleep(3600)
        return NOT_FINITE if NOT_FINITE_TOKEN in tokens else FINITE

    def _write(self, batch: StepInput, b: int) -> None:
        begin, end = batch.query_start[b], batch.query_start[b + 1]
        assert begin < end
        positions = batch.positions[begin:end]
        np.testing.assert_array_equal(
            positions, np.arange(batch.context_len[b] - (end - begin), batch.context_len[b])
        )
        tokens = batch.token_ids[begin:end].astype(np.int64)
        for i in np.flatnonzero(tokens < 0):
            assert tokens[i] == -1 - batch.slot[b], "a token of another slot"
            tokens[i] = self._last[int(batch.slot[b])]
        blocks = batch.block_table[b, positions // self.block_size]
        self._cache[blocks, positions % self.block_size] = np.stack((tokens, positions), 1)

    def _read(self, batch: StepInput, b: int) -> np.ndarray:
        positions = np.arange(batch.context_len[b])
        blocks = batch.block_table[b, positions // self.block_size]
        entries = self._cache[blocks, positions % self.block_size]
        np.testing.assert_array_equal(entries[:, 1], positions, "another request's block")
        return entries[:, 0]

    def _top(self, batch: StepInput) -> int:
        return max((self._sampling[s].logprobs for s in batch.sample_slot.tolist()), default=-1)

    def _score(self, batch: StepInput) -> Logprobs | None:
        if not len(batch.prompt_logprob_index):
            return None
        contexts = []
        for row in batch.prompt_logprob_index.tolist():
            b = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            contexts.append(self._read(batch, b)[: batch.positions[row] + 1])
        targets = batch.prompt_logprob_target.tolist()
        return self._logprobs(contexts, targets, batch.prompt_logprob_top)

    def _pool(self, batch: StepInput) -> np.ndarray:
        states = []
        for row in batch.pool_index.tolist():
            b = int(np.searchsorted(batch.query_start, row, side="right")) - 1
            states.append(hidden_state(self._read(batch, b)[: batch.positions[row] + 1]))
        ends = np.cumsum(batch.pool_count)[:-1]
        parts = np.split(np.array(states, np.float32), ends) if states else []
        return np.array([part.sum(0) for part in parts], np.float32)

    def _logprobs(self, contexts: list[np.ndarray], tokens: list[int], k: int) -> Logprobs | None:
        if k < 0:
            return None
        chosen = [logprob(c, t) for c, t in zip(contexts, tokens, strict=True)]
        top = np.tile(np.arange(k, dtype=np.int32), (len(tokens), 1))
        return Logprobs(
            chosen=np.array(chosen, np.float32),
            rank=np.ones(len(tokens), np.int32),
            top_ids=top,
            top=-1.0 - top.astype(np.float32),
        )


def load(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Stands in for `load_model`: 4096 blocks, or `kv_cache_memory` bytes."""
    progress(1, 1)
    runner = MockRunner(config.block_size or BLOCK_UNIT)
    num_blocks = 4096
    if config.kv_cache_memory is not None:
        num_blocks = config.kv_cache_memory // runner.bytes_per_block
    runner.allocate_kv_cache(num_blocks)
    info = ModelInfo(
        num_blocks=num_blocks,
        block_size=runner.block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=config.max_model_len or 512,
        dtype="int64",
        hidden_size=HIDDEN_SIZE,
    )
    return LoadedModel(runner, info)


def load_slowly(config: EngineConfig, progress: Progress) -> LoadedModel:
    """The same, with steps of 5 ms."""
    loaded = load(config, progress)
    assert isinstance(loaded.runner, MockRunner)
    loaded.runner.seconds = 0.005
    return loaded


def load_chatty(config: EngineConfig, progress: Progress) -> LoadedModel:
    """The same, which takes all tokens of a chat template in its prompts."""
    loaded = load_slowly(config, progress)
    return LoadedModel(loaded.runner, msgspec.structs.replace(loaded.info, vocab_size=512))


def refuse(config: EngineConfig, progress: Progress) -> LoadedModel:
    """A setting does not suit the model."""
    raise ConfigError("--max-model-len is 99; the model has a context of 9 tokens")


def miss(config: EngineConfig, progress: Progress) -> LoadedModel:
    """The checkpoint cannot be loaded."""
    raise ModelError("no weights in model.safetensors")


def leave(config: EngineConfig, progress: Progress) -> LoadedModel:
    """The process ends without a word."""
    os._exit(7)


def hang(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Loading takes an hour."""
    time.sleep(3600)
    return load(config, progress)


def load_as_told(config: EngineConfig, progress: Progress) -> LoadedModel:
    """What a file "how" in the model's directory says: "wait" until it says something else, or one
    of "refuse", "miss", "leave" and "hang"; else `load_slowly`.
    """
    how = Path(config.model) / "how"
    while (told := how.read_text() if how.exists() else "") == "wait":
        time.sleep(0.01)
    faults = {"refuse": refuse, "miss": miss, "leave": leave, "hang": hang}
    return faults.get(told, load_slowly)(config, progress)
