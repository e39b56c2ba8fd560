"""From settings to a model that is loaded, warm, and has its KV cache.

The memory ledger is printed before anything is loaded, so that a model that
does not fit is refused at once, with the flag to change.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.models.interface import ModelRunner
from weft.models.spec import ModelSpec
from weft.serving.config import EngineConfig

LINE_EVERY = 10.0  # seconds between two lines of a log

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is in all."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner that is ready for its first step.

    Attributes:
        num_blocks: of its KV cache.
        dtype: that it computes in.
    """

    runner: ModelRunner
    num_blocks: int
    vocab_size: int
    max_model_len: int
    dtype: str


def load_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Load the checkpoint that the settings name.

    Raises:
        ConfigError: a setting does not suit the model, or it does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint import locate, read_spec
    from weft.models.memory import available_memory, plan_memory
    from weft.models.torch.runner import TorchRunner

    path = locate(config.model)
    spec = read_spec(path)
    max_model_len = context_length(config, spec)
    dtype = spec.compute_dtype(config.dtype)
    if config.dtype == "auto" and dtype != spec.dtype:
        logger.info("%s is stored in %s and computed in %s", config.model, spec.dtype, dtype)
    ledger = plan_memory(
        spec,
        dtype=dtype,
        quantization=config.quantization,
        available=available_memory(),
        memory_fraction=config.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
    )
    logger.info("memory\n%s", ledger.render())
    runner = TorchRunner.load(
        path,
        spec,
        dtype=dtype,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        quantization=config.quantization,
        compress_weights=config.compress_weights,
        threads=config.threads,
        progress=progress,
    )
    runner.allocate_kv_cache(ledger.num_blocks)
    runner.warm_up()
    return LoadedModel(runner, ledger.num_blocks, spec.vocab_size, max_model_len, dtype)


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of a request; ConfigError when more are asked for than the model has."""
    if config.max_model_len is None:
        return spec.max_model_len
    if config.max_model_len > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}; "
            f"{config.model} has a context of {spec.max_model_len} tokens"
        )
    return config.max_model_len


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Shows on stderr how far something of so many bytes is: a bar, or lines in a log file."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> Progress:
    last = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            print(f"{title}: {done / total:.0%} of {total / 2**30:.1f} GiB", file=sys.stderr)

    return progress
