"""The decisions that weft makes for a layout, with the costs that it compares.

They are the decisions of models/jax and models/torch when they serve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.errors import ConfigError
from weft.models.plan.choices import Limits, fewest_ranks
from weft.models.plan.hardware import Slice
from weft.models.plan.sizes import DECODE_PADDING, PADDING, block_size, step_sizes
from weft.models.plan.step import anonymous
from weft.models.plan.switches import Torus
from weft.models.spec.layout import Layout, check_layout
from weft.models.spec.spec import ModelSpec

SMALLEST = 32
"""Smallest number of tokens in the list."""


def decisions(spec: ModelSpec, place: Slice, tp: int | None, dtype: str, limits: Limits) -> str:
    """Return each decision on a slice, in lines.

    Args:
        spec: the model.
        place: the slice.
        tp: number of devices that share the model; None for all in the slice, beside the default.
        dtype: compute dtype.
        limits: the engine's settings.

    Raises:
        ConfigError: the slice or the model's sizes do not allow the layout.
    """
    devices = place.devices if tp is None else tp
    if devices > place.devices:
        raise ConfigError(f"--tp is {tp}; {place} has {place.devices} devices")
    check_layout(spec, devices, 1)
    local = Layout(devices).local(spec)
    head = f"{place} --tp {devices}"
    most = limits.max_num_batched_tokens
    if place.device.shapes:
        lines = _torus(Torus(place, local, devices, dtype), most)
        lines += _sizes(spec, place, Layout(devices), dtype, limits)
    elif not place.device.cpu and 1 < devices <= place.shape[1]:
        lines = [_gpus(local, place, devices, dtype, most)]
    else:
        lines = ["nothing to decide: there is one way to run a step"]
    if tp is None and not place.device.cpu:
        chosen = fewest_ranks(spec, place, limits, Layout(), dtype=dtype)
        lines.insert(0, f"without --tp, it is {chosen.value}: {chosen.reason}")
    return "\n  ".join([head, *lines])


def _torus(torus: Torus, most: int) -> list[str]:
    lines = []
    sizes = [SMALLEST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    for tokens in sizes:
        shards = torus.shards_tokens(tokens)
        what = "tokens are sharded" if shards.value else "tokens are replicated"
        lines.append(f"{tokens}: {what}: {shards.reason}")
        if shards.value:
            gathers = torus.gathers_weights(tokens)
            what = "weights travel" if gathers.value else "tokens travel"
            lines.append(f"{tokens}: {what}: {gathers.reason}")
    return lines


def _sizes(
    spec: ModelSpec, place: Slice, layout: Layout, dtype: str, limits: Limits
) -> Iterator[str]:
    seqs, length = limits.max_num_seqs, limits.max_model_len
    local = layout.local(spec)
    block = block_size(local, place.device, dtype, max_num_seqs=seqs, max_model_len=length)
    yield f"without --block-size, it is {block.value}: {block.reason}"
    decodes, others = step_sizes(
        *(anonymous(spec), layout, place, dtype),
        max_num_seqs=seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        parts=2 * layout.tp,
    )
    yield (
        f"steps with one token for each request are padded to {_listed(decodes)} tokens, others to "
        f"{_listed(others)}: padding adds at most {DECODE_PADDING:.0%} and {PADDING:.0%} to a "
        "step's seconds"
    )


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _gpus(local: ModelSpec, place: Slice, devices: int, dtype: str, most: int) -> str:
    from weft.kernels.gpu.tuning.costs import device_named
    from weft.models.torch.crossover import predicted_limits, products_of

    device = device_named(place.device.like or place.device.name)
    decided = predicted_limits(device, devices, products_of(local), dtype, most)
    few, replicated = decided.value
    figures = "" if device.name == place.device.name else f" (with the figures of {device.name})"
    return (
        f"up to {few} tokens, products send their sums; up to {replicated}, an all-reduce follows "
        f"them; with more, tokens are sharded: {decided.reason}{figures}"
    )
