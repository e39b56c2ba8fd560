"""From settings to a model on the devices of jax: see loading.py, of which this is the one branch.

One process has all devices; --tp and --ep are of its mesh.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.models.spec import ModelSpec
from weft.serving.config import EngineConfig
from weft.serving.loading import (
    LINE_EVERY,
    LoadedModel,
    ModelInfo,
    Progress,
    compute_dtype,
    context_length,
)

CompileProgress = Callable[[str, int, int], None]

ONLY: dict[str, object] = {
    "cp": 1,
    "pp": 1,
    "dp": 1,
    "nodes": 1,
    "executor": "processes",
    "quantization": "none",
    "devices": None,
}
"""What these settings must be: there is no other way yet."""

logger = logging.getLogger(__name__)


def load_jax_model(config: EngineConfig, progress: Progress) -> LoadedModel:
    """Load the checkpoint that the settings name onto the devices of jax, and compile its steps.

    Raises:
        ConfigError: a setting does not suit the model or jax, or it does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint import locate, read_spec
    from weft.models.jax import platform
    from weft.models.layout import Layout, check_layout

    check_settings(config)
    path = locate(config.model)
    spec = read_spec(path)
    check_layout(spec, config.tp, config.ep)
    max_model_len = context_length(config, spec)
    dtype = compute_dtype(config, spec)
    overlapped = config.kernels == "overlapped"
    devices = platform.devices(config.tp, interpreting=overlapped)
    if overlapped and devices[0].platform == "cpu":
        logger.warning("--kernels overlapped: interpreted on a CPU, which takes seconds a step")
    platform.keep_compiled(cache_folder(config))
    num_blocks = _plan(config, spec, devices, dtype, max_model_len)
    from weft.models.jax.runner import JaxRunner

    with show_compiling() as compiling:
        runner = JaxRunner.load(
            path,
            spec,
            devices=devices,
            layout=Layout(config.tp, config.ep),
            dtype=dtype,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            kernels=config.kernels,
            progress=progress,
            compiling=compiling,
        )
        runner.allocate_kv_cache(num_blocks)
        runner.warm_up()
    return LoadedModel(runner, ModelInfo(num_blocks, spec.vocab_size, max_model_len, dtype))


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that jax's executor does not know.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, only in ONLY.items():
        if (value := getattr(config, name)) != only:
            must = "cannot be given" if only is None else f"must be {only}"
            raise ConfigError(f"--{name} is {value}; with --backend jax it {must}")
    if config.device == "cuda":
        raise ConfigError("--device is cuda; with --backend jax it must be auto or cpu")
    if config.tp % config.ep:
        raise ConfigError(
            f"--ep is {config.ep} beside --tp {config.tp}; with --backend jax it must divide --tp"
        )


def cache_folder(config: EngineConfig) -> Path:
    """Where compiled programs are kept."""
    if config.compile_cache is not None:
        return Path(config.compile_cache).expanduser()
    return Path.home() / ".cache" / "weft" / "jax"


def state_bytes(spec: ModelSpec, max_num_seqs: int, tp: int) -> int:
    """Bytes of a device's part of the sampler's state (models/jax/sampler.py)."""
    from weft.models.activations import padded_numbers

    return 2 * 4 * padded_numbers(max_num_seqs, -(-spec.vocab_size // tp))


def _plan(
    config: EngineConfig, spec: ModelSpec, devices: list[Any], dtype: str, max_model_len: int
) -> int:
    """Say where each device's memory goes; blocks of its cache."""
    from weft.models.activations import jax_activations
    from weft.models.free_memory import available_memory
    from weft.models.layout import Layout
    from weft.models.memory_plan import MemoryPlan

    if devices[0].platform == "cpu":
        free = available_memory() // len(devices)
    else:
        stats = [device.memory_stats() for device in devices]
        free = min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)
    ledger = MemoryPlan(
        spec=Layout(config.tp, config.ep).local(spec),
        dtype=dtype,
        available=free - state_bytes(spec, config.max_num_seqs, config.tp),
        memory_fraction=config.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        count=partial(jax_activations, tp=config.tp),
    ).ledger()
    whose = f" of each of {config.tp} devices" if config.tp > 1 else ""
    logger.info("memory%s (%s)\n%s", whose, devices[0].device_kind, ledger.render())
    return ledger.num_blocks


@contextmanager
def show_compiling() -> Iterator[CompileProgress]:
    """Shows on stderr how many programs are compiled: a bar, or lines in a log file."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("compiling"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task: Any = None

        def progress(name: str, done: int, total: int) -> None:
            nonlocal task
            if task is None:
                task = bar.add_task(name, total=total)
            bar.update(task, description=name, completed=done, total=total)

        yield progress


def _lines() -> CompileProgress:
    last = begin = time.monotonic()

    def progress(name: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total:
            logger.info("compiled %d programs in %.1f s", total, now - begin)
        elif now - last >= LINE_EVERY:
            last = now
            logger.info("compiling: %d of %d programs: %s", done, total, name)

    return progress
