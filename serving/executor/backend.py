"""What a rank's model runs on: its device, its kernels, and the memory that kernels share.

| device | kernels | |
| --- | --- | --- |
| CPU | plain | kernels for CPUs; collectives of gloo |
| CPU | overlapped | Triton's interpreter; memory that processes share |
| GPU | plain | Triton; collectives of NCCL |
| GPU | overlapped | Triton; peers' memory over NVLink or PCIe |

A rank alone exchanges nothing, whatever its kernels are called.
"""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from itertools import permutations
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.models.spec.spec import ModelSpec
from weft.serving.config.settings import EngineConfig

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from weft.kernels.symmetric.memory import Home
    from weft.models.spec.layout import Layout
    from weft.models.torch.group import Groups
    from weft.serving.config.slices import Slice


def choose_kernels(config: EngineConfig, layout: Layout, device: torch.device) -> str:
    """ "overlapped" or "plain", for a device.

    auto is overlapped on GPUs where the ranks of each stage are on one machine and reach each
    other's memory, wherever the layout can be.

    Raises:
        ConfigError: the device or the kernels cannot run what the settings say.
    """
    gpu = device.type == "cuda"
    if (gpu or config.kernels == "overlapped") and config.quantization != "none":
        which = "on GPUs" if gpu else "with --kernels overlapped"
        raise ConfigError(
            f"--quantization is '{config.quantization}'; {which} it must be none, which computes "
            "in --dtype. --device cpu --kernels plain has int8"
        )
    if config.kernels == "plain" or not gpu:
        return "overlapped" if config.kernels == "overlapped" else "plain"
    apart = _apart(config.replica.slice, layout)
    if config.kernels == "overlapped":
        if apart:
            raise ConfigError(
                f"--kernels is overlapped; {apart}. --kernels plain exchanges through NCCL"
            )
        return "overlapped"
    return "overlapped" if layout.can_overlap and not apart else "plain"


def _apart(slice: Slice, layout: Layout) -> str:
    """Which GPUs of a stage cannot read and write each other's memory; nothing if all can.

    Of other machines' GPUs it is known only that those of a stage are on one machine.
    """
    import torch

    size = layout.stage_size
    places = [(share.machine, index) for share in slice for index in share.devices]
    stages = [places[first : first + size] for first in range(0, len(places), size)]
    for stage in stages:
        machines = sorted({machine for machine, _ in stage})
        if len(machines) > 1:
            where = ", ".join(f"GPU {index} of machine {machine}" for machine, index in stage)
            return f"ranks that share a layer must be on one machine; they are on {where}"
    gpus = [index for _, index in stages[layout.stage]] if stages else []
    for a, b in permutations(gpus, 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot read and write the memory of GPU {b}"
    return ""


def prepare_triton(device: torch.device) -> None:
    """Before a kernel's module is imported: on a CPU they are interpreted."""
    if device.type == "cuda":
        import torch

        torch.cuda.set_device(device)
        return
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel's module is imported
    from weft.kernels.interpreter.gpu import installed

    scope = ExitStack()
    scope.enter_context(installed())
    atexit.register(scope.close)


def symmetric_bytes(
    config: EngineConfig, spec: ModelSpec, layout: Layout, dtype: str, device: torch.device
) -> int:
    """Bytes of a rank's symmetric memory, with overlapped kernels."""
    import torch

    from weft.kernels.symmetric.counting import CountingHome
    from weft.models.torch.overlapped import Overlapped

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    of = [CountingHome(layout.stage_size, name)]
    if layout.cp > 1:
        of.append(CountingHome(layout.cp, name))
    most = config.max_num_batched_tokens
    context_home = of[1] if layout.cp > 1 else None
    Overlapped(of[0], context_home, spec, layout, getattr(torch, dtype), most)
    return sum(home.nbytes for home in of)


def recorded_requests(config: EngineConfig, layout: Layout) -> int:
    """Requests of the largest step that is recorded as a CUDA graph; 0 if none is."""
    if not config.cuda_graphs:
        return 0
    from weft.models.torch.graphs import buckets

    sizes = buckets(layout, config.max_num_seqs, config.max_num_batched_tokens)
    return max(sizes, default=0)


def require_same(store: Store, rank: int, world_size: int, mine: str) -> None:
    """Refuse ranks of different kinds, which auto may choose on machines that differ.

    Raises:
        ConfigError: on every rank.
    """
    from weft.kernels.symmetric.memory import exchange_through

    found = exchange_through(store, rank, world_size, "device", mine)
    if len(set(found)) > 1:
        by_rank = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(found))
        raise ConfigError(f"ranks must be alike; set --device and --kernels. {by_rank}")


def homes(
    layout: Layout, device: torch.device, kernels: str, groups: Groups, store: Store | None
) -> tuple[Home, Home | None]:
    """Where Triton kernels find others of the stage, and those that share KV heads, if any do.

    With plain kernels, or one rank, that is this rank alone.
    """
    from weft.kernels.symmetric.p2p import P2pHome
    from weft.kernels.symmetric.shared import SharedHome
    from weft.kernels.symmetric.virtual import VirtualHome, VirtualWorld

    size = layout.stage_size
    if kernels == "plain" or store is None or size == 1:
        return VirtualHome(VirtualWorld(1, device=str(device)), 0), None
    home: Home
    context_home: Home | None = None
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
