"""`weft compile` for GPUs: the kernels of `weft serve`, in Triton's cache, on any machine.

Triton finds a kernel by a hash of its source, its variant, the GPU's architecture, the options, and
the version of Triton. A server with the same versions and settings therefore finds these kernels.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError, WeftError
from weft.kernels.devices import DEVICES, Device
from weft.models.memory.ledger import human_bytes
from weft.models.plan.hardware import Slice, read_slice
from weft.serving.config.progress import show_compiling
from weft.serving.config.settings import EngineConfig

if TYPE_CHECKING:
    from weft.kernels.gpu.tuning.costs import Gpu
    from weft.models.spec.layout import Layout
    from weft.models.spec.spec import ModelSpec

MULTICAST = ("sm_90", "sm_100")
"""Targets with multicast addresses; the GPUs are assumed to have an NVLink switch."""


def device_of(topology: str) -> Device | None:
    """Return the device that `--for` names, such as h100 in h100:8; None if it is unknown."""
    name = topology.partition(":")[0].lower()
    return next((device for key, device in DEVICES.items() if key.lower() == name), None)


def run(config: EngineConfig, topology: str, device: Device, *, as_json: bool = False) -> int:
    """Compile the kernels, and print the report.

    Raises:
        ConfigError: a setting does not suit the model or the GPUs, the model does not fit, or
            Triton is missing.
        ModelError: the checkpoint's config.json is missing or not supported.
        WeftError: a kernel does not compile.
    """
    gpu = _gpu(topology, device)
    for name, allowed in (("device", ("auto", "cuda")), ("backend", ("auto", "torch"))):
        if (value := getattr(config, name)) not in allowed:
            raise ConfigError(
                f"--{name} is {value}; with --for {topology} it must be {' or '.join(allowed)}"
            )
    os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel's module is imported
    import torch
    from triton import knobs
    from triton.runtime.driver import driver

    from weft.kernels.gpu.runtime.absent import NoDevice
    from weft.kernels.symmetric.absent import AbsentGpu
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.spec.layout import Layout, check_layout
    from weft.models.torch.dry import compile_warm_up
    from weft.serving.executor.backend import (
        check_target,
        choose_kernels,
        recorded_steps,
        symmetric_bytes,
    )
    from weft.serving.executor.fetch import fetch
    from weft.serving.executor.loading import (
        compute_dtype,
        context_length,
        keep_kernels,
        plan_memory,
        step_sizes,
    )

    config = asyncio.run(fetch(replace(config, device="cuda"), weights=False))
    config, place = _placed(config, topology, device)
    spec = read_spec(locate(config.model, config.revision))
    overlapped = config.kernels == "overlapped"
    check_layout(
        *(spec, config.tp_size, config.ep, config.cp, config.pp),
        overlapped=overlapped,
        redundant_experts=config.redundant_experts,
    )
    last = Layout(config.tp_size, config.ep, config.world_size - 1, config.cp, config.pp)
    kernels = choose_kernels(config, last, torch.device("cuda"))
    check_target(config, gpu.target)
    if kernels == "overlapped" and last.stage_size > place.shape[1]:
        if overlapped:
            raise ConfigError(
                f"--kernels is overlapped; {last.stage_size} ranks share each layer, and a node of "
                f"{place} has {place.shape[1]}. --kernels plain exchanges through NCCL"
            )
        kernels = "plain"
    max_model_len = context_length(config, spec)
    dtype = compute_dtype(config, spec)
    buffers, recorded = 0, recorded_steps(config, last, kernels)
    if kernels == "overlapped" and last.stage_size > 1:
        buffers = symmetric_bytes(config, spec, last, dtype, gpu.name)
    plan = plan_memory(
        config,
        spec,
        last,
        dtype=dtype,
        max_model_len=max_model_len,
        free=device.memory,
        triton=True,
        buffers=buffers,
        recorded=recorded,
    )
    try:
        ledger = plan.ledger()
    except ConfigError as error:
        fits = _that_fits(config, spec, last, device)
        raise ConfigError(f"{config.model} on {place}: {error}; {fits}") from None
    keep_kernels(config)
    driver.set_active(NoDevice(gpu.target))
    with show_compiling("kernels") as show:
        done = compile_warm_up(
            spec,
            [replace(last, rank=rank) for rank in range(last.stage_size)],
            dtype,
            step_sizes(config, plan, ledger.num_blocks),
            AbsentGpu(_tuned_name(gpu), gpu.processors, multicast=gpu.target in MULTICAST),
            overlapped=kernels == "overlapped",
            threads=config.threads or len(os.sched_getaffinity(0)),
            progress=lambda done, total: show("", done, total),
        )
    if done.failed:
        name, why = next(iter(done.failed.items()))
        raise WeftError(
            f"{len(done.failed)} of {done.kernels} kernels do not compile for {gpu.target}: "
            f"{name}: {why}"
        )
    cache = Path(knobs.cache.dir)
    size = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    if as_json:
        report = {"kernels": done.kernels, "compiled": done.compiled, "seconds": done.seconds}
        place_of = {"target": gpu.target, "cache": str(cache), "cache_bytes": size}
        print(json.dumps(report | place_of, indent=2))
        return 0
    print(
        f"{done.kernels} kernels for {place} ({gpu.target}), {_flags(last)}, --kernels {kernels}\n"
        f"{done.compiled} compiled, {done.kernels - done.compiled} found in the cache, "
        f"in {done.seconds:.1f} s\n"
        f"cache: {cache}, {human_bytes(size)}\n"
        "A server with the same settings and the same versions of weft and Triton finds them, if "
        "the cache is at this path."
    )
    return 0


def _gpu(topology: str, device: Device) -> Gpu:
    """Return the figures of a device for which kernels can be compiled here."""
    if importlib.util.find_spec("triton") is None or importlib.util.find_spec("torch") is None:
        raise ConfigError(f"--for is {topology!r}; it needs triton: pip install 'triton>=3.6'")
    from weft.kernels.gpu import lacks_triton_for_amd
    from weft.kernels.gpu.tuning.costs import GPUS

    gpu = next((gpu for gpu in GPUS if gpu.name == device.name), None)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ConfigError(
            f"--for is {topology!r}; CPUs need none compiled. It must be a TPU slice, or one of "
            f"{known}"
        )
    if gpu.target.startswith("gfx") and (lack := lacks_triton_for_amd()):
        raise ConfigError(f"--for is {topology!r}; {lack}")
    return gpu


def _placed(config: EngineConfig, topology: str, device: Device) -> tuple[EngineConfig, Slice]:
    """Decide the ranks as `weft serve` does on these GPUs, and the GPUs as the ranks need."""
    from weft.serving.executor.placement import Inventory
    from weft.serving.executor.sizing import with_tp

    if ":" not in topology:
        ranks = config.world_size
        shape = -(-ranks // device.node), min(ranks, device.node)
        return replace(config, tp=config.tp_size), Slice(device, shape)
    place = read_slice(topology)
    nodes, each = place.shape
    config = with_tp(config, [Inventory(gpus=(device.memory,) * each)] * nodes)
    if config.world_size * config.dp > place.devices:
        raise ConfigError(
            f"--tp is {config.tp_size}, --cp {config.cp}, --ep {config.ep}, --pp {config.pp} and "
            f"--dp {config.dp}: {config.world_size * config.dp} ranks; {place} has {place.devices}"
        )
    return config, place


def _tuned_name(gpu: Gpu) -> str:
    """Return the name in this machine's tuning file, so that its entries count; else the GPU's."""
    from weft.kernels.gpu.tuning import table

    names = (key.device for key in table.load(table.default_path()) if gpu.name in key.device)
    return next(names, gpu.name)


def _that_fits(config: EngineConfig, spec: ModelSpec, layout: Layout, device: Device) -> str:
    """Describe the smallest --tp with which the model fits in a node."""
    from weft.models.plan.choices import fewest_ranks
    from weft.serving.executor.sizing import limits_of

    limits = limits_of(config, spec)
    layout = replace(layout, rank=0)
    node = Slice(device, (1, device.node))
    found = fewest_ranks(spec, node, limits, layout, dtype=config.dtype)
    return f"on {node}, {found.reason}"


def _flags(layout: Layout) -> str:
    sizes = {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "pp": layout.pp}
    given = [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    return " ".join(given) or "--tp 1"
