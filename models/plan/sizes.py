"""Sizes that a server fixes before its first step: KV cache blocks, and padded steps.

A kernel on a TPU copies whole blocks from memory, and starts a copy while the one before runs. So
reading a block should take as long as starting a copy:

    tokens in a block >= copy seconds x bandwidth / bytes of a token in one layer

All block tables must fit the chip's scalar memory. Smaller blocks are better for the rest: a
request's last block is half empty, and the prefix cache knows whole blocks only. GPUs and CPUs read
single rows, so they get the kernels' smallest block.

XLA compiles a program for each shape of a step, so steps are padded to a few shapes. Few are needed
while a step's time is that of reading the weights, and more when it grows with the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weft.kernels.devices import Device
from weft.models.plan.batch import Batch
from weft.models.plan.hardware import Slice
from weft.models.plan.step import Precision
from weft.models.plan.switches import Decision
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

BLOCK_UNIT = 16
"""Attention kernels need a multiple of this many tokens in a block."""

TABLE_ENTRY, TABLE_BYTES = 4, 512 << 10
"""Bytes for a block in a table, and maximum for a step's tables in scalar memory, which has 1 MiB.
"""

GROUP_TOKENS = 128
"""Minimum number of tokens in a group of blocks, which attention without kernels processes at once.
"""

MIN_DECODES, MIN_TOKENS = 8, 32
"""Smallest padded steps, with one token for each request and others; kernels need multiples."""

DECODE_PADDING, PADDING = 0.25, 0.5
"""A padded step takes at most this much longer than one without padding. With less, a server
compiles more shapes before it is ready. Steps with one token for each request get less: they are
the most, and each is a wait between two tokens.
"""


def block_size(
    local: ModelSpec, device: Device, dtype: str, *, max_num_seqs: int, max_model_len: int
) -> Decision[int]:
    """Decide the number of tokens in a KV cache block.

    Args:
        local: one device's part of the model.
        device: the device.
        dtype: the KV cache's dtype.
        max_num_seqs: number of block tables.
        max_model_len: maximum number of tokens in a request.

    Returns:
        BLOCK_UNIT, times a power of two.
    """
    if not device.copy:
        return Decision(BLOCK_UNIT, f"{device.name} reads single rows of a block")
    token = local.kv_bytes_per_token(dtype) / len(local.layers)
    hiding = device.copy * device.bandwidth / token
    fitting = BLOCK_UNIT
    while table_width(max_model_len, fitting) * max_num_seqs * TABLE_ENTRY > TABLE_BYTES:
        if fitting >= max_model_len:
            break
        fitting *= 2
    block = fitting
    while block < min(hiding, max_model_len):
        block *= 2
    return Decision(
        block,
        f"a copy starts in {device.copy * 1e9:.3g} ns, while {device.name} reads {hiding:.3g} "
        f"tokens; with {fitting} tokens or more, {max_num_seqs} block tables fit scalar memory",
    )


def table_width(max_model_len: int, block_size: int) -> int:
    """Return the entries in a request's block table, in whole groups."""
    group = group_pages(block_size)
    return group * -(-max_model_len // (group * block_size))


def group_pages(block_size: int) -> int:
    """Return the number of blocks that attention processes at once."""
    return max(1, GROUP_TOKENS // block_size)


def step_sizes(
    spec: ModelSpec,
    layout: Layout,
    place: Slice,
    dtype: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    parts: int,
) -> tuple[list[int], list[int]]:
    """Decide the numbers of tokens to which steps are padded.

    Args:
        spec: the whole model.
        layout: its parallel layout.
        place: the slice that it covers.
        dtype: compute dtype.
        max_num_seqs: maximum number of requests in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        parts: a step that is cut over devices has a multiple of this many tokens.

    Returns:
        Sizes of steps in which each request has one token, and sizes of other steps; ascending.
    """
    overlapped = layout.tp > 1 and not place.device.cpu
    engine = Engine(spec, layout, place, Precision(dtype), overlapped=overlapped)

    def decoding(tokens: int) -> float:
        return engine.seconds(Batch(decodes=tokens))

    def mixed(tokens: int) -> float:
        return engine.seconds(Batch(prefills=min(tokens, max_num_seqs), prefill_tokens=tokens))

    max_decodes = min(max_num_seqs, max_num_batched_tokens)
    return (
        fewest_sizes(decoding, candidates(max_decodes, MIN_DECODES, parts), DECODE_PADDING),
        fewest_sizes(mixed, candidates(max_num_batched_tokens, MIN_TOKENS, parts), PADDING),
    )


def fewest_sizes(
    seconds: Callable[[int], float], candidates: Sequence[int], padding: float
) -> list[int]:
    """Choose the fewest sizes that keep padding cheap.

    A step may be padded to a size if that takes at most 1 + `padding` times the seconds of the
    smallest candidate in which the step fits. The largest candidate is always chosen.

    Args:
        seconds: the time of a step with a candidate's size.
        candidates: possible sizes, ascending.
        padding: largest share of a step's seconds that padding adds.

    Returns:
        Some candidates, ascending.
    """
    chosen = [candidates[-1]]
    longest = seconds(candidates[-1])
    for size in reversed(candidates):
        own = seconds(size)
        if longest > (1 + padding) * own:
            chosen.append(size)
            longest = own
    return chosen[::-1]


def candidates(most: int, unit: int, parts: int) -> list[int]:
    """List possible sizes: multiples of `unit`, and of `parts` as soon as there are enough tokens.

    Args:
        most: maximum number of tokens in a step; the last size is not below it.
        unit: number of tokens in the smallest size.
        parts: a step that is cut over devices has a multiple of this many tokens.
    """
    cut = math.lcm(unit, parts)
    if most <= cut - unit:
        return [*range(unit, most + unit, unit)]
    return [*range(unit, cut, unit), *range(cut, most + cut, cut)]
