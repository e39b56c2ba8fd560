"""Loading a model onto jax devices; loading.py calls this for `--backend jax`.

One process owns all devices on a node. --tp and --ep describe the mesh over all processes.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError
from weft.models.spec.spec import ModelSpec
from weft.serving.config.progress import show_compiling
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.loading import (
    RANK_TIMEOUT,
    SINGLE_RANK,
    LoadedModel,
    ModelInfo,
    Progress,
    RankContext,
    compute_dtype,
    context_length,
    fetched,
    log_ledger,
)
from weft.serving.executor.placement import kind_of

if TYPE_CHECKING:
    from weft.models.memory.ledger import Ledger

ONLY: dict[str, object] = {
    "cp": 1,
    "pp": 1,
    "quantization": "none",
    "kv_cache_dtype": "auto",
}
"""The only values that the jax backend supports for these settings."""

logger = logging.getLogger(__name__)


def load_jax_model(
    config: EngineConfig, progress: Progress, context: RankContext = SINGLE_RANK
) -> LoadedModel:
    """Load the checkpoint onto jax devices and compile its steps.

    Each process reads only the parts for its own devices.

    Raises:
        ConfigError: a setting does not suit the model or jax, or the model does not fit in memory.
        ModelError: the checkpoint cannot be found, understood or loaded.
    """
    from weft.models.checkpoint.locate import read_spec
    from weft.models.spec.layout import Layout, check_layout

    check_settings(config)
    path = fetched(config, progress)
    spec = read_spec(path)
    check_layout(spec, config.tp_size, config.ep)
    max_model_len = context_length(config, spec)
    spec = spec.for_context(max_model_len)
    dtype = compute_dtype(config, spec)
    devices = _devices(config, context)
    if config.kernels == "overlapped" and devices[0].platform == "cpu":
        logger.warning(
            "--kernels overlapped: on CPUs kernels are interpreted; a step takes seconds"
        )
    from weft.models.jax.distributed import minimum
    from weft.models.jax.mesh import device_of
    from weft.models.jax.runner import JaxRunner
    from weft.models.plan.sizes import block_size

    layout = Layout(config.tp_size, config.ep)
    block = config.block_size
    if block is None:
        seqs, local = config.capacity.max_num_seqs, layout.local(spec)
        decision = block_size(
            local, device_of(devices[0]), dtype, max_num_seqs=seqs, max_model_len=max_model_len
        )
        block = decision.value
        logger.debug("--block-size is %d: %s", decision.value, decision.reason)
    ledger = _plan(config, spec, dtype, block, max_model_len)

    if context.world_size > 1:
        ledger = ledger.with_blocks(minimum(ledger.num_blocks, RANK_TIMEOUT))
    is_first = context.rank == config.replica.number == 0
    if is_first:
        scope = f" of each of {config.tp_size} devices" if config.tp_size > 1 else ""
        scope += f" of each of {config.dp} engine cores" if config.dp > 1 else ""
        log_ledger(f"{scope} ({devices[0].device_kind})", ledger)
    with show_compiling("programs") if is_first else nullcontext(_silent) as show:

        def compiling(name: str, done: int, total: int) -> None:
            context.count_exchange(True)  # counts as progress; all ranks compile the same programs
            show(name, done, total)

        runner = JaxRunner.load(
            path,
            spec,
            devices=devices,
            layout=layout,
            dtype=dtype,
            block_size=block,
            max_num_seqs=config.capacity.max_num_seqs,
            max_num_batched_tokens=config.capacity.max_num_batched_tokens,
            max_model_len=max_model_len,
            kernels=config.kernels,
            progress=progress,
            compiling=compiling,
        )
        runner.allocate_kv_cache(ledger.num_blocks)
        runner.warm_up()
    info = ModelInfo(
        num_blocks=ledger.num_blocks,
        block_size=block,
        vocab_size=spec.vocab_size,
        max_model_len=max_model_len,
        dtype=dtype,
        hidden_size=spec.hidden_size,
    )
    return LoadedModel(runner, info)


def _devices(config: EngineConfig, context: RankContext) -> list[Any]:
    """Connect to the other processes; return all devices in mesh order.

    Raises:
        ConfigError: the number of devices differs from --tp.
    """
    from weft.models.jax import platform

    own = context.own_devices(config)
    platform.prepare(
        len(own),
        config.device,
        own_process=context.world_size > 1,
        interpreting=config.kernels == "overlapped",
    )
    if config.dp > 1 and kind_of(config) == "tpu":
        platform.keep_to(own)
    if context.world_size == 1:
        devices = platform.devices(config.tp_size)
    else:
        from weft.models.jax.distributed import meet

        devices = meet(
            context.rank,
            context.world_size,
            context.rendezvous_port,
            RANK_TIMEOUT,
            host=context.rendezvous_host,
            address=context.address,
        )
        if len(devices) != config.tp_size:
            raise ConfigError(
                f"--tp is {config.tp_size}; with several nodes it must be the number of their "
                f"devices, {len(devices)}"
            )
    platform.keep_compiled(cache_folder(config))
    return devices


def check_settings(config: EngineConfig) -> None:
    """Check that the jax backend supports the settings.

    Raises:
        ConfigError: it does not support the named one.
    """
    for name, only in ONLY.items():
        if (value := getattr(config, name)) != only:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {value}; with --backend jax it must be {only}")
    if config.device == "cuda":
        raise ConfigError("--device is cuda; with --backend jax it must be auto, cpu or tpu")
    if config.tp_size % config.ep:
        raise ConfigError(
            f"--ep is {config.ep} beside --tp {config.tp_size}; with --backend jax it must divide "
            "--tp"
        )
    if config.dp > 1 and len(config.replica.slice) > 1 and kind_of(config) == "tpu":
        raise ConfigError(
            f"--dp is {config.dp} and an engine has TPUs on {len(config.replica.slice)} nodes; "
            "set --dp 1, or choose --devices so that each engine is on one node"
        )


def cache_folder(config: EngineConfig) -> Path:
    """Return the cache folder for compiled programs."""
    if config.compile_cache is not None:
        return Path(config.compile_cache).expanduser()
    return Path.home() / ".cache" / "weft" / "jax"


def _plan(
    config: EngineConfig, spec: ModelSpec, dtype: str, block_size: int, max_model_len: int
) -> Ledger:
    """Compute the memory ledger for each device of this process."""
    import jax

    from weft.models.memory.activations import jax_activations, sampler_state_bytes
    from weft.models.memory.available import available_memory
    from weft.models.memory.plan import MemoryPlan
    from weft.models.spec.layout import Layout

    devices = jax.local_devices()[: config.tp_size]
    if devices[0].platform == "cpu":
        free = config.replica.memory or available_memory()
        free //= len(devices)
    else:
        stats = [device.memory_stats() for device in devices]
        free = min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)
    return MemoryPlan(
        spec=Layout(config.tp_size, config.ep).local(spec),
        dtype=dtype,
        available=free - sampler_state_bytes(spec, config.capacity.max_num_seqs, config.tp_size),
        memory_fraction=config.capacity.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=block_size,
        max_num_seqs=config.capacity.max_num_seqs,
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        max_model_len=max_model_len,
        count_activations=partial(jax_activations, tp=config.tp_size),
    ).ledger()


def _silent(name: str, done: int, total: int) -> None:
    """Show nothing."""
