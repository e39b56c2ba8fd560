"""`weft compile`: a model's steps, compiled for a TPU slice or GPUs on any machine.

compile_gpu.py does it for GPUs. For TPUs, the report shows each chip's memory use, the share of the
traffic between chips that is hidden, and the compile times. Compiled steps stay in the folder where
`weft serve` looks for them. If the model does not fit, the error quotes the compiler and names a
slice that is large enough.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

import click

from weft.errors import ConfigError
from weft.models.memory.ledger import human_bytes
from weft.serving.cli import compile_gpu
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.progress import show_compiling
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings

if TYPE_CHECKING:
    from weft.models.jax.aot import Compiled
    from weft.models.memory.ledger import Ledger
    from weft.models.spec.spec import ModelSpec


@click.command("compile", cls=TopicCommand)
@click.option(
    *("--for", "topology"),
    required=True,
    metavar="SLICE",
    help="TPU chips, such as v5e:4x4, or GPUs, such as h100 or h100:8",
)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, model=True)
def compile_steps(settings: Settings, topology: str, as_json: bool) -> int:
    """Compile MODEL's steps for TPUs or GPUs, on any machine.

    Reads only config.json, not the weights. Compiled steps stay in --compile-cache for `weft
    serve` with the same settings. For TPUs, shows each chip's memory use, and how much of the
    traffic between chips is hidden behind matrix products. Without --tp, a model is compiled for
    all chips of a TPU slice, and for the fewest GPUs with room for it. h100 without a number
    means as many GPUs as the other settings need.

    \b
    weft compile weft-demo --for v5e:2x2
    weft compile Qwen/Qwen3-8B --for v5e:2x4
    weft compile ./Qwen3-30B-A3B --for v6e:2x4 --ep 8 --max-model-len 8192
    weft compile Qwen/Qwen3-8B --for h100 --compile-cache /srv/kernels
    """
    return run(settings.build(EngineConfig), topology, as_json=as_json)


def run(config: EngineConfig, topology: str, *, as_json: bool = False) -> int:
    """Compile the steps, and print the report.

    Raises:
        WeftError: a kernel does not compile.
        ConfigError: a setting does not suit the model or the slice, or the model does not fit.
        ModelError: the checkpoint's config.json is missing or not supported.
    """
    from weft.kernels.devices import DEVICES

    device = compile_gpu.device_of(topology)
    if device is None:
        raise ConfigError(
            f"--for is {topology!r}; the device is unknown. It must be GPUs, such as h100:8, or a "
            f"TPU slice, such as v5e:2x4, with one of {', '.join(DEVICES)}"
        )
    if not device.shapes:
        return compile_gpu.run(config, topology, device, as_json=as_json)
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.jax import platform
    from weft.models.memory.activations import sampler_state_bytes
    from weft.models.plan.sizes import block_size
    from weft.models.spec.layout import Layout, check_layout
    from weft.serving.executor.fetch import fetch
    from weft.serving.executor.jax_loading import cache_folder, check_settings
    from weft.serving.executor.loading import compute_dtype, context_length

    if not platform.is_installed():
        raise ConfigError(f"weft compile needs jax: {platform.INSTALL}")
    from weft.models.jax import aot

    chip = aot.chip_of(topology)
    devices = platform.described_devices(topology)  # before jax looks for this machine's devices
    if config.tp is None:
        config = replace(config, tp=len(devices))
    check_settings(config)
    config = asyncio.run(fetch(config, weights=False))
    spec = read_spec(locate(config.model, config.revision))
    check_layout(spec, config.tp_size, config.ep)
    max_model_len = context_length(config, spec)
    spec = spec.for_context(max_model_len)
    dtype = compute_dtype(config, spec)
    layout = Layout(config.tp_size, config.ep)
    local = layout.local(spec)
    seqs = config.capacity.max_num_seqs
    block = config.block_size or (
        block_size(
            local, DEVICES[chip], dtype, max_num_seqs=seqs, max_model_len=max_model_len
        ).value
    )
    block_bytes = block * local.kv_bytes_per_token(dtype)
    try:
        num_blocks = _ledger(config, spec, dtype, block, max_model_len, chip).num_blocks
    except ConfigError:  # the compiler decides, with the smallest cache that can serve
        num_blocks = -(-max_model_len // block)
    platform.keep_compiled(cache_folder(config))
    try:
        with show_compiling("programs") as compiling:
            programs = aot.compile_model(
                *(spec, topology, layout),
                dtype=dtype,
                block_size=block,
                num_blocks=num_blocks,
                max_num_seqs=config.capacity.max_num_seqs,
                max_num_batched_tokens=config.capacity.max_num_batched_tokens,
                max_model_len=max_model_len,
                kernels=config.kernels,
                progress=compiling,
            )
    except aot.DoesNotFitError as error:
        fits = _slice_that_fits(config, spec, dtype, chip)
        raise ConfigError(f"{config.model} on {topology}: {error}; {fits}") from None
    memory = {
        "weights": local.weight_bytes(dtype),
        "KV cache": num_blocks * block_bytes,
        "sampling": sampler_state_bytes(spec, config.capacity.max_num_seqs, config.tp_size),
        "temporaries": max(program.temporaries for program in programs),
    }
    memory["left"] = aot.hbm_bytes(chip) - sum(memory.values())
    if as_json:
        parts = {"memory": memory, "blocks": num_blocks}
        print(json.dumps(parts | {"programs": [asdict(one) for one in programs]}, indent=2))
        return 0
    _print_report(memory, programs, num_blocks * block, aot.hbm_bytes(chip))
    return 0


def _ledger(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: str,
    block_size: int,
    max_model_len: int,
    chip: str,
) -> Ledger:
    """Calculate a chip's memory use; ConfigError if the chip is too small."""
    from weft.models.jax.aot import hbm_bytes
    from weft.models.memory.activations import jax_activations, sampler_state_bytes
    from weft.models.memory.plan import MemoryPlan
    from weft.models.spec.layout import Layout

    tp = config.tp_size
    return MemoryPlan(
        spec=Layout(tp, config.ep).local(spec),
        dtype=dtype,
        available=hbm_bytes(chip) - sampler_state_bytes(spec, config.capacity.max_num_seqs, tp),
        memory_fraction=config.capacity.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        block_size=block_size,
        max_num_seqs=config.capacity.max_num_seqs,
        max_num_batched_tokens=config.capacity.max_num_batched_tokens,
        max_model_len=max_model_len,
        count_activations=partial(jax_activations, tp=tp),
    ).ledger()


def _slice_that_fits(config: EngineConfig, spec: ModelSpec, dtype: str, chip: str) -> str:
    """Describe the smallest slice with these chips that is large enough for the model."""
    from weft.kernels.devices import DEVICES
    from weft.models.plan.choices import choices
    from weft.models.plan.hardware import read_slice
    from weft.serving.executor.sizing import limits_of

    limits = limits_of(config, spec)
    for shape in DEVICES[chip].shapes:
        place = read_slice(f"{chip}:{shape}")
        try:
            found = choices(spec, place, limits, dtype=dtype)
        except ConfigError:
            continue
        if whole := [choice.flags for choice in found if choice.layout.tp == place.devices]:
            return f"it would fit on {place}, with {whole[0]}"
    return f"no {chip} slice over which it can be split is large enough"


def _print_report(memory: dict[str, int], programs: list[Compiled], tokens: int, hbm: int) -> None:
    from weft.models.jax.overlap import hidden_share

    notes = {"KV cache": f"{tokens:,} tokens", "left": f"of {human_bytes(hbm)}"}
    print("HBM of each chip")
    for name, size in memory.items():
        print(f"  {name:<12}{human_bytes(size):>11}  {notes.get(name, '')}".rstrip())
    print(f"\n{'program':<32}{'compiled':>9}{'temporary':>12}{'traffic':>12}{'hidden':>8}")
    for one in programs:
        traffic = sum(collective.bytes for collective in one.collectives)
        hidden = f"{hidden_share(one.collectives):.0%}" if traffic else "-"
        print(
            f"{one.name:<32}{one.seconds:>7.1f} s{human_bytes(one.temporaries):>12}"
            f"{human_bytes(traffic):>12}{hidden:>8}"
        )
    _print_step(programs[0])
    print(f"\ncompiled in {sum(one.seconds for one in programs):.1f} s")


def _print_step(step: Compiled) -> None:
    """Print one step's collectives and kernels."""
    print(f"\n{step.name}")
    for kind in dict.fromkeys(one.kind for one in step.collectives):
        alike = [one for one in step.collectives if one.kind == kind]
        beside = sum(bool(one.products) for one in alike)
        size = human_bytes(sum(one.bytes for one in alike))
        print(f"  {len(alike)} x {kind}, {size}, {beside} of them beside a product")
    kernels = ", ".join(f"{count} x {name}" for name, count in sorted(step.kernels.items()))
    print(f"  kernels: {kernels or 'none'}")
