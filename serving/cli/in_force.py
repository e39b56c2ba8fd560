"""A server's effective values for settings with `auto` or no value.

They depend on the checkpoint and on this machine, and are found as `weft serve` finds them. A
setting stays as it is if the model is not here, or if other machines decide, too.
"""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from weft.errors import ConfigError, ModelError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings, Value


def in_force(settings: Settings, config: EngineConfig) -> Settings:
    """Return a copy with the effective values of defaults.

    Args:
        settings: all settings.
        config: the engine's settings.
    """
    found = Settings(settings)
    for name, (value, why) in _decided(config).items():
        if settings[name].value in (None, "auto"):
            found[name] = Value(value, f"{settings[name].source}: {why}")
    return found


def _decided(config: EngineConfig) -> dict[str, tuple[Any, str]]:
    """Return effective values for `auto` or no value, each with its reason."""
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.spec.layout import Layout
    from weft.models.spec.pooling import read_pooling
    from weft.serving.executor.loading import context_length, plan_memory
    from weft.serving.executor.nodes.inventory import own_inventory
    from weft.serving.executor.placement import decided

    try:
        path = locate(config.model, config.revision)
        spec = read_spec(path)
        length = context_length(config, spec)
        dtype = spec.compute_dtype(config.dtype)
        values: dict[str, tuple[Any, str]] = {
            "tokenizer": (str(path), "the model's"),
            "max_model_len": (length, "the model's context"),
            "dtype": (dtype, "the checkpoint's"),
            "pooling": (read_pooling(path).kind, "the checkpoint's"),
        }
    except (ConfigError, ModelError):
        return {}
    if config.nodes > 1 or config.executor == "ray":
        return values
    inventory = own_inventory(config)
    config = decided(config, [inventory])
    values["backend"] = (config.backend, "this machine's devices")
    values["device"] = (config.device, "this machine's devices")
    values["tp"] = (config.tp_size, "the fewest devices that hold the model")
    for each in fields(config.capacity):
        values[each.name] = (getattr(config.capacity, each.name), "for this kind of device")
    if config.backend != "torch" or config.device != "cpu":
        return values
    values["kernels"] = ("plain", "on CPUs")
    ranks = config.dp * config.world_size
    values["threads"] = (_threads(ranks), "this machine's cores")
    if config.kernels != "overlapped":
        layout = Layout(config.tp_size, config.ep, 0, config.cp, config.pp)
        try:
            ledger = plan_memory(
                config,
                spec,
                layout,
                dtype=dtype,
                max_model_len=length,
                free=inventory.memory // ranks,
            ).ledger()
        except ConfigError:  # weft serve says so
            return values
        why = "what the free memory allows" if ledger.limited_by_memory else "what requests can use"
        values["kv_cache_memory"] = (ledger.kv_cache, why)
    return values


def _threads(ranks: int) -> int:
    """Return each rank's threads."""
    import torch

    if ranks == 1:
        return torch.get_num_threads()
    return max(1, len(os.sched_getaffinity(0)) // ranks)
