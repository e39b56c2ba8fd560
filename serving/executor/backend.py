"""Device, kernels and symmetric memory for a rank.

| device | kernels | implementation |
| --- | --- | --- |
| CPU | plain | CPU kernels; gloo collectives |
| CPU | overlapped | Triton's interpreter; shared memory between processes |
| GPU | plain | Triton; NCCL collectives |
| GPU | overlapped | Triton; peers' memory over NVLink |
| GPUs on several nodes | overlapped | the same, and NVSHMEM between nodes, for experts only |

With a single rank neither kind exchanges anything.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from contextlib import ExitStack
from itertools import groupby, permutations
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.models.memory.plan import NO_RECORDINGS, Recordings
from weft.models.spec.spec import ModelSpec
from weft.serving.config.settings import EngineConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from weft.kernels.symmetric.memory import Home
    from weft.models.spec.layout import Layout
    from weft.models.torch.group import Groups
    from weft.serving.config.slices import Slice


logger = logging.getLogger(__name__)

FP8_CAPABILITY = 89
"""The first compute capability with fp8 numbers, times ten."""


def choose_kernels(config: EngineConfig, layout: Layout, device: torch.device) -> str:
    """Choose the kernels for a device: "overlapped" or "plain".

    auto chooses overlapped kernels on GPUs if the layout supports them, and if each stage has its
    ranks on one node with access to each other's memory. The log says why it does not. On request,
    a stage is on several nodes, if only tokens for experts cross between its ranks.

    Raises:
        ConfigError: the device or the kernels do not support the settings.
    """
    chosen = _choose_kernels(config, layout, device)
    if chosen == "plain" and config.redundant_experts:
        raise ConfigError(
            f"--redundant-experts is {config.redundant_experts}; it needs --kernels overlapped, "
            f"and --kernels {config.kernels} is plain here"
        )
    return chosen


def _choose_kernels(config: EngineConfig, layout: Layout, device: torch.device) -> str:
    gpu = device.type == "cuda"
    if config.kv_cache_dtype != "auto" and not gpu and config.kernels != "overlapped":
        raise ConfigError(
            f"--kv-cache-dtype is {config.kv_cache_dtype}; on CPUs it must be auto, which keeps "
            "keys and values in --dtype. fp8 needs --device cuda"
        )
    if config.kernels == "plain" or not gpu:
        return "overlapped" if config.kernels == "overlapped" else "plain"
    slice = config.replica.slice
    apart = _on_several_nodes(slice, layout, asked=config.kernels == "overlapped")
    apart = apart or _out_of_reach(slice, layout)
    if config.kernels == "overlapped":
        if apart:
            raise ConfigError(
                f"--kernels is overlapped; {apart}. --kernels plain exchanges through NCCL"
            )
        return "overlapped"
    if apart and layout.rank == config.replica.number == 0:
        logger.info("ranks exchange through NCCL (--kernels plain): %s", apart)
    return "overlapped" if layout.can_overlap and not apart else "plain"


def check_target(config: EngineConfig, target: str) -> None:
    """Refuse an fp8 KV cache on GPUs without fp8 numbers; `target` is such as "sm_80".

    Raises:
        ConfigError: the setting does not suit the target.
    """
    capability = target.removeprefix("sm_")
    if config.kv_cache_dtype == "fp8" and capability.isdigit() and int(capability) < FP8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype is fp8; {target} has no fp8 numbers, and needs auto. GPUs have them "
            f"from sm_{FP8_CAPABILITY}"
        )


Stage = list[tuple[int, int]]
"""The node of each rank, and the index of its device there."""


def _stages(slice: Slice, layout: Layout) -> list[Stage]:
    size = layout.stage_size
    locations = [(part.node, index) for part in slice for index in part.devices]
    return [locations[first : first + size] for first in range(0, len(locations), size)]


def ranks_per_node(slice: Slice, layout: Layout) -> int:
    """Return how many neighbouring ranks of a stage share a node; 0 if the numbers differ."""
    stages = _stages(slice, layout)
    runs = {
        len([*run]) for stage in stages for _, run in groupby(stage, key=lambda place: place[0])
    }
    if not runs:
        return layout.stage_size
    return runs.pop() if len(runs) == 1 else 0


def _on_several_nodes(slice: Slice, layout: Layout, *, asked: bool) -> str:
    """Say why overlapped kernels cannot serve stages on several nodes; empty if they can.

    Args:
        slice: the engine's devices.
        layout: this rank's layout.
        asked: overlapped kernels were asked for.
    """
    each = ranks_per_node(slice, layout)
    if each == layout.stage_size:
        return ""
    spread = (stage for stage in _stages(slice, layout) if len({node for node, _ in stage}) > 1)
    where = ", ".join(f"GPU {index} of node {node}" for node, index in next(spread))
    if not asked or layout.dense_size > 1 or layout.dp_size == 1:
        return (
            "ranks that share a layer must be on one node, unless --tp and --cp are 1 and you set "
            f"--kernels overlapped; they are on {where}"
        )
    if not each:
        return f"each node must have as many of a stage's ranks; they are on {where}"
    return ""


def _out_of_reach(slice: Slice, layout: Layout) -> str:
    """Describe ranks in this rank's stage and node without access to each other's memory.

    Returns:
        empty if there are none. GPUs on other nodes cannot be asked.
    """
    import torch

    stages = _stages(slice, layout)
    stage = stages[layout.stage] if stages else []
    own = stage[layout.rank % layout.stage_size][0] if stage else 0
    gpus = [index for node, index in stage if node == own]
    for a, b in permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot read and write the memory of GPU {b}"
        if torch.version.hip is None and not has_native_atomics(a, b):
            return (
                f"GPU {a} has no atomic operations in the memory of GPU {b}, which signals need; "
                "NVLink has them, PCIe has not"
            )
    return ""


_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED in CUDA's driver API."""


def has_native_atomics(gpu: int, peer: int, driver: str = "libcuda.so.1") -> bool:
    """Tell if a GPU can run atomic operations in a peer's memory; torch cannot.

    Args:
        gpu, peer: their indexes.
        driver: the library with CUDA's driver API.
    """
    library = ctypes.CDLL(driver)
    found, devices = ctypes.c_int(0), (ctypes.c_int(gpu), ctypes.c_int(peer))
    for device in devices:
        if library.cuDeviceGet(ctypes.byref(device), device):
            return False
    failed = library.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices)
    return not failed and bool(found.value)


def use_device(device: torch.device) -> None:
    """Let CUDA calls that name no device go to this one.

    Without it, each rank would take memory on GPU 0. Call it before anything else asks for GPUs.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)


def interpret_kernels() -> None:
    """Let Triton's interpreter run kernels; call this before any kernel module is imported."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    from weft.kernels.interpreter.gpu import installed

    scope = ExitStack()
    scope.enter_context(installed())
    atexit.register(scope.close)


def symmetric_bytes(
    config: EngineConfig, spec: ModelSpec, layout: Layout, dtype: str, gpu: str | None
) -> int:
    """Count the bytes in a rank's symmetric memory for overlapped kernels.

    Args:
        config, spec, layout, dtype: the settings, the model, the rank, and the compute type.
        gpu: the GPU's name, as its driver reports it; None on a CPU.
    """
    import torch

    from weft.kernels.symmetric.counting import CountingHome
    from weft.models.torch.overlapped import Overlapped

    name, near = gpu or "CPU", layout.stage_size
    if gpu is not None:
        near = ranks_per_node(config.replica.slice, layout)
    counters = [CountingHome(layout.stage_size, name, near)]
    if layout.cp > 1:
        counters.append(CountingHome(layout.cp, name))
    context_home = counters[1] if layout.cp > 1 else None
    max_tokens = config.capacity.max_num_batched_tokens
    copies = config.redundant_experts // config.ep
    Overlapped(
        *(counters[0], context_home, spec, layout, getattr(torch, dtype), max_tokens),
        copies=copies,
    )
    return sum(home.nbytes if gpu is None else home.segments for home in counters)


def recorded_steps(config: EngineConfig, layout: Layout, kernels: str) -> Recordings:
    """Return the steps that are recorded as CUDA graphs."""
    if not config.cuda_graphs:
        return NO_RECORDINGS
    from weft.models.torch.graphs import recordings

    return recordings(
        layout,
        config.capacity.max_num_seqs,
        config.capacity.max_num_batched_tokens,
        overlapped=kernels == "overlapped",
    )


def require_same(store: Store, rank: int, world_size: int, mine: str) -> None:
    """Check that all ranks have the same device type and kernels.

    auto may choose differently on different nodes.

    Args:
        store: store through which the ranks compare.
        rank, world_size: this rank, and the number of ranks.
        mine: this rank's device type and kernels, in words.

    Raises:
        ConfigError: they differ. Every rank raises it.
    """
    from weft.kernels.symmetric.memory import exchange_through

    found = exchange_through(store, rank, world_size, "device", mine)
    if len(set(found)) > 1:
        by_rank = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise ConfigError(f"ranks differ; set --device and --kernels. {by_rank}")


def homes(
    layout: Layout,
    device: torch.device,
    kernels: str,
    groups: Groups,
    store: Store | None,
    slice: Slice = (),
) -> tuple[Home, Home | None]:
    """Create a rank's symmetric memory, through which Triton kernels reach other ranks.

    With plain kernels, or with one rank, it contains this rank only.

    Args:
        layout, device, kernels: this rank's.
        groups: the ranks.
        store: store through which the ranks compare; None for a single rank.
        slice: the engine's devices.

    Returns:
        the memory shared by the ranks of the stage, and the memory shared by the ranks with the
        same KV heads (None without context parallelism).
    """
    from weft.kernels.symmetric.nvshmem import NvshmemHome
    from weft.kernels.symmetric.p2p import P2pHome
    from weft.kernels.symmetric.shared import SharedHome
    from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

    size = layout.stage_size
    if kernels == "plain" or store is None or size == 1:
        return VirtualHome(VirtualWorld(1, device=str(device)), 0), None
    home: Home
    context_home: Home | None = None
    if device.type == "cuda" and (near := ranks_per_node(slice, layout)) < size:
        from torch.distributed.distributed_c10d import PrefixStore

        of_stage_store = PrefixStore(f"stage-{layout.stage}", store)
        return NvshmemHome(of_stage_store, layout.rank % size, size, device, near), None
    if device.type == "cuda":
        of_stage, of_context = groups.expert.process_group, groups.context.process_group
        assert of_stage is not None, "there are several ranks"
        home = P2pHome(of_stage, store)
        if of_context is not None:
            context_home = P2pHome(of_context, store)
        return home, context_home
    home = SharedHome(store, layout.rank % size, size, name=f"stage-{layout.stage}")
    if layout.cp > 1:
        name = f"context-{layout.rank // layout.cp}"
        context_home = SharedHome(store, layout.context, layout.cp, name)
    return home, context_home
