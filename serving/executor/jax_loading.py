"""From settings to a model on the devices of jax: see loading.py, of which this is the one branch.

One process has all devices of a machine; --tp and --ep are of the mesh of all processes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError
from weft.models.spec.spec import ModelSpec
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.loading import (
    ALONE,
    LINE_EVERY,
    RANK_TIMEOUT,
    LoadedModel,
    ModelInfo,
    Place,
    Progress,
    compute_dtype,
    context_length,
)
from weft.serving.executor.placement import kind_of

if TYPE_CHECKING:
    from weft.models.memory.ledger import Ledger

CompileProgress = Callable[[str, int, int], None]

ONLY: dict[str, object] = {
    "cp": 1,
    "pp": 1,
    "quantization": "none",
}
"""What these settings must be: there is no other way yet."""

logger = logging.getLogger(__name__)


def load_jax_model(config: EngineConfig, progress: Progress, place: Place = ALONE) -> LoadedModel:
    """Load the checkpoint that the settings name onto the devices of jax, and compile its steps.

    Each process reads what its devices have.

    Raises:
        ConfigError: a setting does not suit the model or jax, or it does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.spec.layout import Layout, check_layout

    check_settings(config)
    path = locate(config.model)
    spec = read_spec(path)
    check_layout(spec, config.tp, config.ep)
    max_model_len = context_length(config, spec)
    dtype = compute_dtype(config, spec)
    devices = _devices(config, place)
    if config.kernels == "overlapped" and devices[0].platform == "cpu":
        logger.warning("--kernels overlapped: interpreted on a CPU, which takes seconds a step")
    ledger = _plan(config, spec, dtype, max_model_len)
    from weft.models.jax.distributed import minimum
    from weft.models.jax.runner import JaxRunner

    if place.world_size > 1:
        ledger = ledger.with_blocks(minimum(ledger.num_blocks, RANK_TIMEOUT))
    speaks = place.rank == config.replica.number == 0
    if speaks:
        whose = f" of each of {config.tp} devices" if config.tp > 1 else ""
        whose += f" of each of {config.dp} engine cores" if config.dp > 1 else ""
        logger.info("memory%s (%s)\n%s", whose, devices[0].device_kind, ledger.render())
    with show_compiling() if speaks else nullcontext(_silent) as show:

        def compiling(name: str, done: int, total: int) -> None:
            place.count_exchange(True)  # for this rank gets on; all compile the same
            show(name, done, total)

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
        runner.allocate_kv_cache(ledger.num_blocks)
        runner.warm_up()
    info = ModelInfo(ledger.num_blocks, spec.vocab_size, max_model_len, dtype, spec.hidden_size)
    return LoadedModel(runner, info)


def _devices(config: EngineConfig, place: Place) -> list[Any]:
    """Of all processes, in the order of the mesh; this one's are here from now on.

    Raises:
        ConfigError: there are not those that the resource manager counted.
    """
    from weft.models.jax import platform

    own = place.own_devices(config)
    platform.prepare(
        len(own),
        config.device,
        own_process=place.world_size > 1,
        interpreting=config.kernels == "overlapped",
    )
    if config.dp > 1 and kind_of(config) == "tpu":
        platform.keep_to(own)
    if place.world_size == 1:
        devices = platform.devices(config.tp)
    else:
        from weft.models.jax.distributed import meet

        devices = meet(
            place.rank,
            place.world_size,
            place.find_port,
            RANK_TIMEOUT,
            host=place.host,
            address=place.address,
        )
        if len(devices) != config.tp:
            raise ConfigError(
                f"--tp is {config.tp}; the machines have {len(devices)} devices together, and of "
                "several machines all must be used"
            )
    platform.keep_compiled(cache_folder(config))
    return devices


def check_settings(config: EngineConfig) -> None:
    """Refuse settings that jax's executor does not know.

    Raises:
        ConfigError: naming the first of them.
    """
    for name, only in ONLY.items():
        if (value := getattr(config, name)) != only:
            raise ConfigError(f"--{name} is {value}; with --backend jax it must be {only}")
    if config.device == "cuda":
        raise ConfigError("--device is cuda; with --backend jax it must be auto, cpu or tpu")
    if config.tp % config.ep:
        raise ConfigError(
            f"--ep is {config.ep} beside --tp {config.tp}; with --backend jax it must divide --tp"
        )
    if config.dp > 1 and len(config.replica.slice) > 1 and kind_of(config) == "tpu":
        raise ConfigError(
            f"--dp is {config.dp} and an engine has TPUs of {len(config.replica.slice)} machines; "
            "it must be 1, or --devices such that each engine is on one machine"
        )


def cache_folder(config: EngineConfig) -> Path:
    """Where compiled programs are kept."""
    if config.compile_cache is not None:
        return Path(config.compile_cache).expanduser()
    return Path.home() / ".cache" / "weft" / "jax"


def state_bytes(spec: ModelSpec, max_num_seqs: int, tp: int) -> int:
    """Bytes of a device's part of the sampler's state (models/jax/sampler.py)."""
    from weft.models.memory.activations import padded_numbers

    return 2 * 4 * padded_numbers(max_num_seqs, -(-spec.vocab_size // tp))


def _plan(config: EngineConfig, spec: ModelSpec, dtype: str, max_model_len: int) -> Ledger:
    """Where the memory goes of each device of this process."""
    import jax

    from weft.models.memory.activations import jax_activations
    from weft.models.memory.available import available_memory
    from weft.models.memory.plan import MemoryPlan
    from weft.models.spec.layout import Layout

    devices = jax.local_devices()[: config.tp]
    if devices[0].platform == "cpu":
        free = config.replica.memory or available_memory()
        free //= len(devices)
    else:
        stats = [device.memory_stats() for device in devices]
        free = min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)
    return MemoryPlan(
        spec=Layout(config.tp, config.ep).local(spec),
        dtype=dtype,
        available=free - state_bytes(spec, config.max_num_seqs, config.tp),
        memory_fraction=config.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        count_activations=partial(jax_activations, tp=config.tp),
    ).ledger()


def _silent(name: str, done: int, total: int) -> None:
    """Shows nothing."""


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
