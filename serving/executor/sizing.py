"""The planner's limits from the settings, and the default tensor-parallel size.

That size is the fewest devices on this machine with room for the model.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from weft.kernels.devices import DEVICES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from weft.models.plan.choices import Limits
    from weft.models.spec.spec import ModelSpec
    from weft.serving.config.settings import EngineConfig
    from weft.serving.executor.placement import Inventory

logger = logging.getLogger(__name__)


def with_tp(config: EngineConfig, inventories: Sequence[Inventory]) -> EngineConfig:
    """Fill in `tp` if it is not set.

    CPUs get one rank with all cores. Several nodes and Ray clusters get one, too: their devices may
    differ.

    Args:
        config: the settings, with the backend and the device decided.
        inventories: the nodes' devices.

    Raises:
        ModelError: the checkpoint cannot be found or understood.
    """
    if config.tp is not None:
        return config
    here = inventories[0]
    memory = {"cuda": here.gpus, "tpu": here.tpus}.get(config.device, ())
    count = len(memory) // config.dp
    if count < 2 or len(inventories) > 1 or config.executor == "ray" or config.devices is not None:
        return replace(config, tp=1)
    return replace(config, tp=_fewest(config, min(memory), count))


def limits_of(config: EngineConfig, spec: ModelSpec) -> Limits:
    """Return an engine's settings as the planner takes them; `device` is decided.

    Raises:
        ConfigError: `max_model_len` exceeds the model's context.
    """
    from weft.models.plan.choices import Limits
    from weft.serving.executor.loading import context_length, kv_dtype

    capacity = config.capacity
    return Limits(
        max_model_len=context_length(config, spec),
        max_num_seqs=capacity.max_num_seqs,
        max_num_batched_tokens=capacity.max_num_batched_tokens,
        block_size=config.block_size,
        memory_fraction=capacity.memory_fraction,
        kv_cache_memory=config.kv_cache_memory,
        kv_dtype=kv_dtype(config),
    )


def _fewest(config: EngineConfig, memory: int, count: int) -> int:
    from weft.models.checkpoint.locate import locate, read_spec
    from weft.models.plan.choices import fewest_ranks
    from weft.models.plan.hardware import Slice
    from weft.models.spec.layout import Layout

    # Of the device, only its kind and memory count.
    device = replace(DEVICES["v5e" if config.device == "tpu" else "H100"], memory=memory)
    spec = read_spec(locate(config.model, config.revision))
    limits = limits_of(config, spec)
    layout = Layout(1, config.ep, cp=config.cp, pp=config.pp)
    decision = fewest_ranks(spec, Slice(device, (count,)), limits, layout, dtype=config.dtype)
    logger.info("--tp is %d: %s", decision.value, decision.reason)
    return decision.value
