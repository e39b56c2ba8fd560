"""Loading a model from the settings: weights, KV cache and warm-up.

The memory ledger is printed before anything is loaded. A model that does not fit is refused at
once, with an error naming the flag to change.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.errors import ConfigError
from weft.models.interface import ModelRunner, StepInput, StepOutput
from weft.models.memory.ledger import Ledger
from weft.models.memory.plan import NO_RECORDINGS, Recordings
from weft.models.spec.spec import ModelSpec, Packed
from weft.serving.config import logs
from weft.serving.config.progress import compile_lines
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import RankDevices
from weft.serving.executor.backend import (
    check_target,
    choose_kernels,
    homes,
    interpret_kernels,
    recorded_steps,
    require_same,
    symmetric_bytes,
    use_device,
)

if TYPE_CHECKING:
    from weft.kernels.symmetric.memory import Home
    from weft.models.memory.plan import MemoryPlan
    from weft.models.spec.layout import Layout
    from weft.models.torch.dry import Sizes

LINE_EVERY = 10.0  # seconds between two log lines

LOOPBACK = "127.0.0.1"
"""Rendezvous address if all ranks are on one node."""

RANK_TIMEOUT = 1800.0
"""Seconds that a rank waits for another one.

A rank may load longer than the rest, or the whole machine may be paused. During a step the executor
notices a stuck rank much earlier.
"""

Progress = Callable[[int, int], None]
"""Callback with the amount done and the total amount."""

logger = logging.getLogger(__name__)


class ModelInfo(msgspec.Struct, frozen=True):
    """Loaded model's properties, for the engine.

    Attributes:
        num_blocks: number of KV cache blocks for each attention group.
        block_size: tokens in a block; with `cp`, all ranks' parts together.
        dtype: compute type.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    dtype: str
    hidden_size: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner, ready for its first step, with a whole model or one rank's part."""

    runner: ModelRunner
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class RankContext:
    """This process's rank, and how it reaches the other ranks.

    Attributes:
        rank, world_size: number of this rank, and number of ranks.
        rendezvous_port: exchanges the port where the ranks meet. Rank 0 passes the port that it
            has opened; the others pass None and get that port.
        count_exchange: callback for each exchange with other ranks; its argument tells whether
            all ranks take part.
        ranks_on_node: number of ranks that share the memory and the cores of this node.
        rendezvous_host, address: addresses of rank 0's node and of this node.
        devices: devices of this rank on its node (see placement.py). A single rank has none here
            and uses those of its engine.
    """

    rank: int = 0
    world_size: int = 1
    rendezvous_port: Callable[[int | None], int] = lambda own: own or 0
    count_exchange: Callable[[bool], None] = lambda of_all: None
    ranks_on_node: int = 1
    rendezvous_host: str = LOOPBACK
    address: str = LOOPBACK
    devices: RankDevices = ()

    def own_devices(self, config: EngineConfig) -> RankDevices:
        """Return the indexes of this rank's devices."""
        slice = (index for part in config.replica.slice for index in part.devices)
        return self.devices or tuple(slice) or tuple(range(config.world_size))


SINGLE_RANK = RankContext()


def load_model(
    config: EngineConfig, progress: Progress, context: RankContext = SINGLE_RANK
) -> LoadedModel:
    """Load the checkpoint, or only this rank's part.

    Raises:
        ConfigError: a setting does not suit the model, or the model does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint.locate import read_spec
    from weft.models.memory.available import available_memory
    from weft.models.memory.ledger import human_bytes
    from weft.models.spec.layout import Layout, check_layout
    from weft.models.torch.device import choose_device, free_memory, gpu_name, gpu_target
    from weft.models.torch.group import make_groups, meet
    from weft.models.torch.runner import TorchRunner

    if uses_jax(config):
        from weft.serving.executor.jax_loading import load_jax_model

        return load_jax_model(config, progress, context)
    path = fetched(config, progress)
    spec = read_spec(path)
    max_model_len = context_length(config, spec)
    spec = spec.for_context(max_model_len)
    dtype = compute_dtype(config, spec)
    overlapped = config.kernels == "overlapped"
    check_layout(
        *(spec, config.tp_size, config.ep, config.cp, config.pp),
        overlapped=overlapped,
        redundant_experts=config.redundant_experts,
    )
    layout = Layout(config.tp_size, config.ep, context.rank, config.cp, config.pp)
    device = choose_device(config.device, context.own_devices(config)[0])
    use_device(device)
    kernels = choose_kernels(config, layout, device)
    triton = kernels == "overlapped" or device.type == "cuda"
    interpreted = triton and device.type == "cpu"
    buffers = 0
    recorded = NO_RECORDINGS
    if interpreted:
        interpret_kernels()
    if device.type == "cuda":
        check_target(config, gpu_target(device))
        keep_kernels(config)
    if triton:
        if kernels == "overlapped" and layout.stage_size > 1:
            buffers = symmetric_bytes(config, spec, layout, dtype, gpu_name(device))
        if device.type == "cuda":
            recorded = recorded_steps(config, layout, kernels)
    store = None
    if context.world_size > 1:
        store = meet(
            context.rank,
            context.world_size,
            context.rendezvous_port,
            timeout=RANK_TIMEOUT,
            host=context.rendezvous_host,
            address=context.address,
        )
        require_same(store, context.rank, context.world_size, f"{device.type}, --kernels {kernels}")
    groups = make_groups(layout, context.count_exchange, device, RANK_TIMEOUT)
    # Measured after the ranks have met, since NCCL's groups take memory, too.
    if device.type == "cuda":
        free = free_memory(device)
    elif config.replica.memory is None:
        free = available_memory() // context.ranks_on_node
    else:
        free = config.replica.memory // context.ranks_on_node
    plan = plan_memory(
        config,
        spec,
        layout,
        dtype=dtype,
        max_model_len=max_model_len,
        free=free,
        triton=triton,
        buffers=buffers,
        recorded=recorded,
    )
    ledger = plan.ledger()
    if interpreted and context.rank == config.replica.number == 0:
        logger.warning(
            "--kernels overlapped: on CPUs kernels are interpreted; a step takes seconds"
        )
    ledger = ledger.with_blocks(groups.minimum(ledger.num_blocks))
    if context.rank % layout.stage_size == config.replica.number == 0:
        scope = f" of each of {layout.stage_size} ranks" if layout.stage_size > 1 else ""
        scope += f" of stage {layout.stage}" if layout.pp > 1 else ""
        scope += f" of each of {config.dp} engine cores" if config.dp > 1 else ""
        log_ledger(scope, ledger)
        if device.type == "cpu" and config.kv_cache_memory is None and ledger.limited_by_memory:
            logger.info(
                "the KV cache may grow to all of that, and another server here would plan with "
                "the same memory: to run several, set --kv-cache-memory"
            )
    home = context_home = None
    if triton:
        home, context_home = homes(layout, device, kernels, groups, store, config.replica.slice)
    torch_runner = TorchRunner.load(
        path,
        spec,
        dtype=dtype,
        kv_dtype=kv_dtype(config),
        block_size=plan.block_size,
        max_num_seqs=config.capacity.max_num_seqs,
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        max_model_len=max_model_len,
        quantization=config.quantization,
        compress_weights=config.compress_weights,
        threads=_threads(config.threads, context.ranks_on_node * config.replica.engines),
        progress=progress,
        layout=layout,
        groups=groups,
        home=home,
        context_home=context_home,
        cuda_graphs=config.cuda_graphs,
        redundant_experts=config.redundant_experts,
    )
    if device.type == "cpu":
        ledger = replace(plan, saved=torch_runner.saved_bytes).ledger()
        ledger = ledger.with_blocks(groups.minimum(ledger.num_blocks))
    if context.rank == config.replica.number == 0:
        for line in torch_runner.quantized_lines:
            logger.info(line)
    if torch_runner.saved_bytes and context.rank == config.replica.number == 0:
        logger.info(
            "loaded weights take %s; the KV cache has %s blocks",
            *(human_bytes(ledger.weights), f"{ledger.num_blocks:,}"),
        )
    torch_runner.allocate_kv_cache(ledger.num_blocks)
    runner: ModelRunner = torch_runner
    if home is not None and device.type == "cuda":
        sizes = step_sizes(config, plan, ledger.num_blocks)
        compile_kernels(config, spec, layout, dtype, sizes, home, kernels, context)
    if interpreted and context.rank == 0:
        logger.info("warming up: a short prompt")
        runner = SlowRunner(runner)
    runner.warm_up()
    info = ModelInfo(
        num_blocks=ledger.num_blocks,
        block_size=plan.cache_block,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        hidden_size=spec.hidden_size,
    )
    return LoadedModel(runner, info)


def keep_kernels(config: EngineConfig) -> None:
    """Let Triton keep compiled kernels in --compile-cache; $TRITON_CACHE_DIR precedes it."""
    if config.compile_cache is not None:
        folder = Path(config.compile_cache).expanduser().absolute()
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder))


def compile_kernels(
    config: EngineConfig,
    spec: ModelSpec,
    layout: Layout,
    dtype: str,
    sizes: Sizes,
    home: Home,
    kernels: str,
    context: RankContext,
) -> None:
    """Compile a rank's kernels in threads, before the warm-up runs them one by one. Collective.

    A kernel that does not compile here is left to the warm-up, which raises its error.

    Args:
        config, spec, layout, dtype: settings, the whole model, the rank, and the compute type.
        sizes: of the rank's steps.
        home: its device.
        kernels: "overlapped" or "plain".
        context: the process's rank.
    """
    from weft.kernels.symmetric.absent import AbsentGpu
    from weft.models.torch.dry import compile_warm_up

    ranks, is_first = context.ranks_on_node, context.rank == config.replica.number == 0
    log = compile_lines("kernels")

    def progress(done: int, total: int) -> None:
        context.count_exchange(False)  # counts as progress
        if is_first and done < total:
            log("", done, total)

    done = compile_warm_up(
        spec,
        [layout],
        dtype,
        sizes,
        AbsentGpu.like(home),
        overlapped=kernels == "overlapped",
        threads=_threads(config.threads, ranks) or len(os.sched_getaffinity(0)),
        progress=progress,
        share=(context.rank % ranks, ranks),
    )
    if is_first:
        logger.info(
            "compiled %d of %d kernels in %.1f s; the others were in Triton's cache",
            *(done.compiled, done.kernels, done.seconds),
        )
    for name, error in done.failed.items():
        logger.warning("%s is left to the warm-up, because it does not compile: %s", name, error)
    home.barrier()  # a rank that launched earlier would wait for the others in its first kernel


def fetched(config: EngineConfig, progress: Progress) -> Path:
    """Return the checkpoint's directory; on other nodes than the first, download it if necessary.

    Raises:
        ModelError: the model cannot be found or downloaded.
    """
    from weft.models.checkpoint.download import download
    from weft.models.checkpoint.locate import locate, remote

    if (source := remote(config.model, config.revision)) is not None:
        download(source, progress)
    return locate(config.model, config.revision)


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    layout: Layout,
    *,
    dtype: str,
    max_model_len: int,
    free: int,
    triton: bool = False,
    buffers: int = 0,
    recorded: Recordings = NO_RECORDINGS,
) -> MemoryPlan:
    """Plan a rank's memory with torch.

    Args:
        config, spec, layout: settings, the whole model, and the rank's part of it.
        dtype: compute type.
        max_model_len: maximum number of tokens in a request.
        free: free bytes for this rank.
        triton: Triton kernels run the model.
        buffers: bytes of symmetric memory.
        recorded: steps that are recorded as CUDA graphs.
    """
    from weft.models.memory.activations import cpu_activations, triton_activations
    from weft.models.memory.plan import MemoryPlan, copies_bytes
    from weft.models.plan.sizes import BLOCK_UNIT

    local = layout.local(spec)
    return MemoryPlan(
        spec=local,
        dtype=dtype,
        kv_dtype=kv_dtype(config),
        quantization=config.quantization,
        available=free,
        memory_fraction=config.capacity.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=config.block_size or BLOCK_UNIT,
        cp=config.cp,
        max_num_seqs=config.capacity.max_num_seqs,
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        max_model_len=max_model_len,
        dp_size=layout.dp_size,
        count_activations=triton_activations if triton else cpu_activations,
        buffers=buffers,
        recordings=recorded,
        copies=copies_bytes(
            *(local, dtype, config.redundant_experts // config.ep, config.quantization)
        ),
        packed=_packed(local, dtype, triton=triton),
        sharded=buffers > 0 and layout.dp_size == 1,
    )


def _packed(spec: ModelSpec, dtype: str, *, triton: bool) -> Packed:
    """Return where quantised weights stay as they are stored."""
    import torch

    from weft.kernels.cpu import native

    if triton:
        return "gpu"
    return "cpu" if native.supports(getattr(torch, spec.compute_dtype(dtype))) else None


def step_sizes(config: EngineConfig, plan: MemoryPlan, num_blocks: int) -> Sizes:
    """Return the sizes of a GPU server's steps, for which its kernels are compiled.

    Args:
        config: settings.
        plan: a rank's memory, from `plan_memory`.
        num_blocks: blocks in the KV cache.
    """
    from weft.models.torch.dry import Sizes

    return Sizes(
        plan.block_size,
        num_blocks,
        plan.max_num_seqs,
        plan.max_num_batched_tokens,
        plan.max_model_len,
        plan.recordings,
        config.redundant_experts // config.ep,
        kv_dtype(config),
        config.quantization,
    )


def kv_dtype(config: EngineConfig) -> str | None:
    """Return the KV cache's dtype, by its torch name; None is the compute dtype."""
    from weft.models.spec.spec import FP8_CACHE

    return FP8_CACHE if config.kv_cache_dtype == "fp8" else None


def log_ledger(scope: str, ledger: Ledger) -> None:
    """Log the memory ledger, a record for each line; `scope` names its owner."""
    for line in ledger.render().splitlines():
        logger.info("memory%s: %s", scope, line)


class SlowRunner:
    """ModelRunner with a progress log line every ten seconds."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._tokens = 0
        self._last_line = time.monotonic()
        self.bytes_per_block = runner.bytes_per_block
        self.allocate_kv_cache = runner.allocate_kv_cache
        self.close = runner.close

    def warm_up(self) -> None:
        """See ModelRunner. Logs the duration."""
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
    """Return the threads per rank; None lets torch decide for a single rank."""
    if ranks == 1:
        return threads
    return max(1, (threads or len(os.sched_getaffinity(0))) // ranks)


def check_ranks(config: EngineConfig) -> None:
    """Check that the backend supports the settings and that the ranks can share the model.

    This reads only the model's config.json.

    Raises:
        ConfigError: the settings cannot work. The message names the sizes that do.
        ModelError: the checkpoint cannot be found or understood.
    """
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.spec.layout import check_layout

    if uses_jax(config):
        from weft.serving.executor.jax_loading import check_settings

        check_settings(config)
    elif config.kernels == "overlapped":
        _require_triton()
    spec = read_spec(locate(config.model, config.revision))
    overlapped = config.kernels == "overlapped"
    check_layout(
        *(spec, config.tp_size, config.ep, config.cp, config.pp),
        overlapped=overlapped,
        redundant_experts=config.redundant_experts,
    )


def _require_triton() -> None:
    """Refuse overlapped kernels where Triton is not installed, or too old for the GPUs."""
    import torch

    from weft.kernels.gpu import lacks_triton_for_amd

    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "--kernels is overlapped; the kernels need triton: pip install 'triton>=3.6'"
        )
    if torch.version.hip and (lack := lacks_triton_for_amd()):
        raise ConfigError(f"--kernels is overlapped; {lack}")


def uses_jax(config: EngineConfig) -> bool:
    """Return whether jax runs the model: on request, or because it finds TPUs."""
    from weft.models.jax.platform import tpu_memory

    if config.backend == "auto" and config.device in ("auto", "tpu"):
        return bool(tpu_memory())
    return config.backend == "jax"


def compute_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """Return the compute type; log it if it differs from the checkpoint's."""
    dtype = spec.compute_dtype(config.dtype)
    if config.dtype == "auto" and dtype != spec.dtype:
        logger.info("%s is stored in %s and computed in %s", config.model, spec.dtype, dtype)
    elif config.dtype not in ("auto", dtype):
        logger.info("--dtype %s: %s is computed in %s", config.dtype, config.model, dtype)
    return dtype


def context_length(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the maximum number of tokens in a request.

    Raises:
        ConfigError: `max_model_len` exceeds the model's context.
    """
    if config.max_model_len is None:
        return spec.max_model_len
    if config.max_model_len > spec.max_model_len:
        chunks = (layer.attention.chunk for layer in spec.layers)
        reason = " (attention_chunk_size)" if spec.max_model_len in chunks else ""
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}; "
            f"{config.model} has a context of {spec.max_model_len} tokens{reason}"
        )
    return config.max_model_len


@contextmanager
def show_progress(title: str) -> Iterator[Progress]:
    """Show progress in bytes on stderr: a bar on a terminal, else log lines."""
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
        if last is None:  # imports and the like came before
            last = time.monotonic()
        if time.monotonic() - last >= LINE_EVERY:
            last = time.monotonic()
            logs.say(f"{title}: {done / total:.0%} of {human_bytes(total)}")

    return progress
