"""From settings to a model that is loaded, warm, and has its KV cache.

The memory ledger is printed before anything is loaded, so that a model that
does not fit is refused at once, with the flag to change.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from weft.errors import ConfigError
from weft.models.interface import ModelRunner, StepInput, StepOutput
from weft.models.spec.spec import ModelSpec
from weft.serving.config import logs
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor.backend import (
    choose_kernels,
    homes,
    prepare_triton,
    recorded_requests,
    require_same,
    symmetric_bytes,
)

LINE_EVERY = 10.0  # seconds between two lines of a log

LOOPBACK = "127.0.0.1"
"""Where ranks meet that are all on one machine."""

RANK_TIMEOUT = 1800.0
"""Seconds that a rank waits for another: one may load for longer than the rest, or be paused with
them all. In a step the executor sees much earlier that a rank is stuck."""

Progress = Callable[[int, int], None]
"""Told how much is done, and how much there is in all."""

logger = logging.getLogger(__name__)


class ModelInfo(msgspec.Struct, frozen=True):
    """What the engine must know of a model that is loaded.

    Attributes:
        num_blocks: of the KV cache of each copy of attention.
        dtype: that it computes in.
    """

    num_blocks: int
    vocab_size: int
    max_model_len: int
    dtype: str
    hidden_size: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner that is ready for its first step, of a model or of one rank's part."""

    runner: ModelRunner
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class Place:
    """Which rank this process is.

    Attributes:
        rank, world_size: its number, and how many there are.
        find_port: tells where ranks meet: called with the port by the first, which has opened it,
            and with None by the others.
        count_exchange: called when this rank comes to an exchange with others, and told whether
            that is with all of them.
        on_machine: ranks that share this machine's memory and cores.
        host, address: of the first rank's machine and of this one, for the ranks to meet.
        devices: of this rank, on its machine (see resources.py); none of one that is alone, which
            has its engine's.
    """

    rank: int = 0
    world_size: int = 1
    find_port: Callable[[int | None], int] = lambda own: own or 0
    count_exchange: Callable[[bool], None] = lambda of_all: None
    on_machine: int = 1
    host: str = LOOPBACK
    address: str = LOOPBACK
    devices: RankDevices = ()

    def own_devices(self, config: EngineConfig) -> RankDevices:
        """Devices of this rank, by index."""
        slice = (index for share in config.replica.slice for index in share.devices)
        return self.devices or tuple(slice) or tuple(range(config.world_size))


ALONE = Place()


def load_model(config: EngineConfig, progress: Progress, place: Place = ALONE) -> LoadedModel:
    """Load the checkpoint that the settings name, or this rank's part of it.

    Raises:
        ConfigError: a setting does not suit the model, or it does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.memory.activations import cpu_activations, triton_activations
    from weft.models.memory.available import available_memory
    from weft.models.memory.plan import MemoryPlan
    from weft.models.spec.layout import Layout, check_layout
    from weft.models.torch.device import choose_device, free_memory
    from weft.models.torch.group import make_groups, meet
    from weft.models.torch.runner import TorchRunner

    if uses_jax(config):
        from weft.serving.executor.jax_loading import load_jax_model

        return load_jax_model(config, progress, place)
    path = locate(config.model)
    spec = read_spec(path)
    max_model_len = context_length(config, spec)
    dtype = compute_dtype(config, spec)
    overlapped = config.kernels == "overlapped"
    check_layout(spec, config.tp, config.ep, config.cp, config.pp, overlapped=overlapped)
    layout = Layout(config.tp, config.ep, place.rank, config.cp, config.pp)
    device = choose_device(config.device, place.own_devices(config)[0])
    kernels = choose_kernels(config, layout, device)
    triton = kernels == "overlapped" or device.type == "cuda"
    interpreted = triton and device.type == "cpu"
    buffers = recorded = 0
    if triton:
        prepare_triton(device)
        if kernels == "overlapped" and layout.stage_size > 1:
            buffers = symmetric_bytes(config, spec, layout, dtype, device)
        if device.type == "cuda":
            recorded = recorded_requests(config, layout)
    store = None
    if place.world_size > 1:
        store = meet(
            place.rank,
            place.world_size,
            place.find_port,
            timeout=RANK_TIMEOUT,
            host=place.host,
            address=place.address,
        )
        require_same(store, place.rank, place.world_size, f"{device.type}, --kernels {kernels}")
    groups = make_groups(layout, place.count_exchange, device, RANK_TIMEOUT)
    # After the ranks have met: what NCCL takes for its groups is no longer free then.
    if device.type == "cuda":
        free = free_memory(device)
    elif config.replica.memory is None:
        free = available_memory() // place.on_machine
    else:
        free = config.replica.memory // place.on_machine
    ledger = MemoryPlan(
        spec=layout.local(spec),
        dtype=dtype,
        quantization=config.quantization,
        available=free,
        memory_fraction=config.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=config.block_size,
        cp=config.cp,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        dp_size=layout.dp_size,
        count_activations=triton_activations if triton else cpu_activations,
        buffers=buffers,
        graph_requests=recorded,
    ).ledger()
    if interpreted and place.rank == config.replica.number == 0:
        logger.warning("--kernels overlapped: interpreted on a CPU, which takes seconds a step")
    ledger = ledger.with_blocks(groups.minimum(ledger.num_blocks))
    if place.rank % layout.stage_size == config.replica.number == 0:
        whose = f" of each of {layout.stage_size} ranks" if layout.stage_size > 1 else ""
        whose += f" of stage {layout.stage}" if layout.pp > 1 else ""
        whose += f" of each of {config.dp} engine cores" if config.dp > 1 else ""
        logger.info("memory%s\n%s", whose, ledger.render())
    home = context_home = None
    if triton:
        home, context_home = homes(layout, device, kernels, groups, store)
    runner: ModelRunner = TorchRunner.load(
        path,
        spec,
        dtype=dtype,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=max_model_len,
        quantization=config.quantization,
        compress_weights=config.compress_weights,
        threads=_threads(config.threads, place.on_machine * config.replica.engines),
        progress=progress,
        layout=layout,
        groups=groups,
        home=home,
        context_home=context_home,
        cuda_graphs=config.cuda_graphs,
    )
    runner.allocate_kv_cache(ledger.num_blocks)
    if interpreted and place.rank == 0:
        logger.info("warming up: a short prompt")
        runner = SlowRunner(runner)
    runner.warm_up()
    info = ModelInfo(ledger.num_blocks, spec.vocab_size, max_model_len, dtype, spec.hidden_size)
    return LoadedModel(runner, info)


class SlowRunner:
    """A runner that says every ten seconds how far it is. A ModelRunner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens = 0
        self._last_line = time.monotonic()
        self.bytes_per_block = runner.bytes_per_block
        self.allocate_kv_cache = runner.allocate_kv_cache
        self.close = runner.close

    def warm_up(self) -> None:
        """See ModelRunner; tells how long it took."""
        begin = time.monotonic()
        self._runner.warm_up()
        logger.info("warm after %.1f s", time.monotonic() - begin)

    def step(self, batch: StepInput) -> StepOutput:
        """See ModelRunner."""
        output = self._runner.step(batch)
        self._tokens += len(batch.token_ids)
        if time.monotonic() - self._last_line >= LINE_EVERY:
            self._last_line = time.monotonic()
            logger.info("step %d: %d tokens so far", batch.step, self._tokens)
        return output


def _threads(threads: int | None, ranks: int) -> int | None:
    """Each rank's share of the model's threads, or of the cores; as torch likes for one alone."""
    if ranks == 1:
        return threads
    return max(1, (threads or len(os.sched_getaffinity(0))) // ranks)


def check_ranks(config: EngineConfig) -> None:
    """Refuse what the model cannot be split over, by its config.json, or its backend cannot run.

    Raises:
        ConfigError: naming the sizes that work.
        ModelError: the checkpoint cannot be found or understood.
    """
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.spec.layout import check_layout

    if uses_jax(config):
        from weft.serving.executor.jax_loading import check_settings

        check_settings(config)
    elif config.kernels == "overlapped" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--kernels is overlapped; that needs triton, which runs the kernels: "
            "pip install 'triton>=3.6'"
        )
    spec = read_spec(locate(config.model))
    overlapped = config.kernels == "overlapped"
    check_layout(spec, config.tp, config.ep, config.cp, config.pp, overlapped=overlapped)


def uses_jax(config: EngineConfig) -> bool:
    """Whether jax runs the model: if asked to, or where it finds TPUs."""
    from weft.models.jax.platform import count_tpus

    if config.backend == "auto" and config.device in ("auto", "tpu"):
        return count_tpus() > 0
    return config.backend == "jax"


def compute_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """The dtype to compute in; said where it is not the checkpoint's."""
    dtype = spec.compute_dtype(config.dtype)
    if config.dtype == "auto" and dtype != spec.dtype:
        logger.info("%s is stored in %s and computed in %s", config.model, spec.dtype, dtype)
    return dtype


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
    from weft.models.memory.ledger import human_bytes

    last: float | None = None

    def progress(done: int, total: int) -> None:
        nonlocal last
        if last is None:  # what came before, such as imports, is not told
            last = time.monotonic()
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            logs.say(f"{title}: {done / total:.0%} of {human_bytes(total)}")

    return progress
