"""Ranks without a model, for executor tests: `load` replaces `loading.load_model`.

`config.model` describes the fault: "1 raises in 3" (rank, fault, step). `config.tokenizer` is a
directory where each rank notes its replica and its steps. A rank that "works" waits for a file
"worked" in this directory. If a rank "stalls", the others wait for it as in a model with
`config.pp` stages.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import msgspec
import numpy as np

from weft.errors import ConfigError, WeftError
from weft.models.interface import StepInput, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.base import Executor
from weft.serving.executor.loading import LoadedModel, ModelInfo, Progress, RankContext, load_model

SLOW = 0.02
"""Duration of a slow rank's step in seconds."""


class RankRunner:
    """Runner that samples token 100 * step + slot."""

    bytes_per_block = 1

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        words = config.model.split()
        rank, self._fault, step = (
            (int(words[0]), words[1], int(words[3])) if len(words) == 4 else (-1, "", 0)
        )
        self._is_named = rank == context.rank
        self._at = step if self._is_named else -1
        self._strands = step if self._fault == "strands" else -1
        self._context = context
        if self._fault == "stalls":
            size = context.world_size // config.pp
            self._at = step + (
                context.rank // size < rank // size
            )  # earlier stages wait for tokens
        self._notes = Path(config.tokenizer or os.devnull)
        if self._notes.is_dir():
            (self._notes / f"device{context.rank}").write_text(str(*context.devices))
            replica = msgspec.json.encode(config.replica)
            (self._notes / f"replica{config.replica.number}-{context.rank}").write_bytes(replica)
            self._notes /= f"rank{context.rank}"

    def allocate_kv_cache(self, num_blocks: int) -> None: ...

    def warm_up(self) -> None: ...

    def step(self, batch: StepInput) -> StepOutput:
        with self._notes.open("a") as notes:
            notes.write(f"{batch.step} {batch.token_ids.sum()}\n")
        if self._fault == "lags" and self._at >= 0:
            time.sleep(SLOW)
        if batch.step == self._strands:
            self._strand()
        if batch.step == self._at:
            if self._fault == "raises":
                raise ValueError("a bad step")
            if self._fault == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            if self._fault in ("hangs", "stalls"):
                if self._fault == "stalls" and not self._is_named:
                    self._context.count_exchange(True)
                time.sleep(600)
            if self._fault == "works":
                while not self._notes.with_name("worked").exists():
                    time.sleep(0.01)
            if self._fault == "babbles":
                return StepOutput("no number", batch.token_ids, batch.token_ids)  # type: ignore[arg-type]
        return StepOutput(
            batch.step,
            (100 * batch.step + batch.sample_slot).astype(np.int32),
            np.zeros(len(batch.sample_slot), np.int32),
        )

    def _strand(self) -> None:
        """Hang, while all other ranks have entered an exchange among all ranks."""
        for _ in range(1 + self._context.rank):
            self._context.count_exchange(False)
        if self._at < 0:
            self._context.count_exchange(True)
        time.sleep(600)

    def close(self) -> None:
        with self._notes.open("a") as notes:
            notes.write("closed\n")


def load(config: EngineConfig, progress: Progress, context: RankContext) -> LoadedModel:
    """Load at once, or refuse with the fault "refuses in 0"."""
    if config.model == f"{context.rank} refuses in 0":
        raise ConfigError("--model is not to my liking")
    return LoadedModel(RankRunner(config, context), ModelInfo(8, 16, 1000, 64, "none", 1))


def load_and_die(config: EngineConfig, progress: Progress, context: RankContext) -> LoadedModel:
    """Let rank 0 open the rendezvous; then kill rank 1."""
    opened = Path(config.tokenizer or os.devnull) / "opened"
    if context.rank == 0:
        context.rendezvous_port(1)
        opened.touch()
        time.sleep(600)
    while not opened.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


PARTS = 4


def load_in_parts(config: EngineConfig, progress: Progress, context: RankContext) -> LoadedModel:
    """Load in parts. Rank 1 waits for a file before each part; the others load at once."""
    folder = Path(config.tokenizer or os.devnull)
    for part in range(1, PARTS + 1):
        while context.rank == 1 and not (folder / f"part{part}").exists():
            time.sleep(0.01)
        progress(part, PARTS)
        (folder / f"rank{context.rank} has {part}").touch()
    return load(config, progress, context)


def load_and_babble(config: EngineConfig, progress: Progress, context: RankContext) -> LoadedModel:
    """Let rank 1 report invalid model properties."""
    loaded = load(config, progress, context)
    if context.rank == 1:
        return LoadedModel(loaded.runner, ModelInfo("many", 16, 1000, 64, "none", 1))  # type: ignore[arg-type]
    return loaded


def load_late(config: EngineConfig, progress: Progress, context: RankContext) -> LoadedModel:
    """Load a real model, with rank 1 three times as slow as --stall-timeout."""
    waits = [3 * config.stall_timeout] if context.rank == 1 else []
    return load_model(config, lambda *_: time.sleep(waits.pop() if waits else 0), context)


def batch(step: int, tokens: int = 3) -> StepInput:
    """Build a step with one request and two sampled tokens."""
    ids = np.arange(tokens, dtype=np.int32) * (step + 1)
    slots = np.arange(2, dtype=np.int32)
    return StepInput(
        step,
        token_ids=ids,
        positions=ids,
        query_start=np.array([0, tokens], np.int32),
        context_len=np.array([tokens], np.int32),
        block_table=np.zeros((1, 4), np.int32),
        slot=slots[:1],
        sample_index=slots,
        sample_slot=slots,
        output_index=slots,
    )


def failure_of(executor: Executor, timeout: float = 60.0) -> WeftError:
    """Wait until the executor fails while idle; return the error."""
    deadline = time.monotonic() + timeout
    while (failure := executor.check()) is None:
        assert time.monotonic() < deadline, "it has not failed"
        time.sleep(0.01)
    return failure
