"""Chooses Pallas kernels (kernels/tpu) for parts of a step; the rest are XLA's operators.

This choice is made here, for each step shape, and nowhere else.

| part | `overlapped`, kernels/tpu | `auto`, on TPUs |
| --- | --- | --- |
| attention | `ragged_paged_attention`, `write_pages` | the same |
| experts | `grouped_gate_up`, `grouped_matmul` | the same |
| products | `all_gather_matmul`, `matmul_reduce_scatter` | rings of XLA (collectives.py) |
| exchange | `moe_dispatch`, `moe_combine` | XLA's all-gather and reduce-scatter |

| part | kernels support |
| --- | --- |
| attention | heads of multiples of 64, blocks of multiples of 16, tables that fit scalar memory |
| experts | all |
| products | steps that shard tokens, a multiple of 32 on each device |
| exchange | the same, if an expert is on one device, and the hidden size a multiple of 128 |

If a kernel does not support a step, this part runs as in `plain`, without kernels. `auto`
on CPUs is `plain`. No kernel has been timed on hardware yet. `auto` uses kernels that save memory
on paper, where XLA would copy the cache or gather pages before reading them. It does not use
kernels that XLA's schedule matches, with a product beside nearly every hop in its rings.

On CPUs, kernels run in Pallas' TPU interpreter: for tests, about a thousand times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from weft.models.plan.sizes import BLOCK_UNIT, TABLE_BYTES, TABLE_ENTRY
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

Choice = Literal["auto", "overlapped", "plain"]

HEAD_UNIT = 64
"""Attention kernels need a multiple of this many elements in a head."""

TOKEN_UNIT = 32
"""Product kernels need a multiple of this many tokens per device: 8 for each of four lanes."""

ROW_UNIT = 128
"""The exchange needs a multiple of this hidden size."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Parts of a step that are kernels, by default none: see the table above."""

    attention: bool = False
    experts: bool = False
    products: bool = False
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """The facts about a step that are known when it is compiled.

    Attributes:
        decodes: whether each request has at most one token.
        sharded: whether each device has some of the tokens between blocks.
        weights_travel: whether a dense MLP's weights go round, and these tokens stay.
        kernels: the choice of kernels.
    """

    decodes: bool
    sharded: bool
    weights_travel: bool = False
    kernels: Kernels = Kernels()


def choose_kernels(
    choice: Choice,
    spec: ModelSpec,
    layout: Layout,
    *,
    on_tpu: bool,
    block_size: int,
    tokens: int,
    sharded: bool,
    table_entries: int,
) -> Kernels:
    """Choose the kernels for a step.

    Args:
        choice: --kernels.
        spec: the whole model.
        layout: tp and ep.
        on_tpu: whether the devices are TPUs.
        block_size: tokens in a cache block.
        tokens: the step's tokens.
        sharded: whether each device has some of them between blocks.
        table_entries: entries in its block tables.
    """
    if choice == "plain" or (choice == "auto" and not on_tpu):
        return Kernels()
    rings = choice == "overlapped" and sharded and tokens % (TOKEN_UNIT * layout.tp) == 0
    return Kernels(
        attention=spec.head_dim % HEAD_UNIT == 0
        and block_size % BLOCK_UNIT == 0
        and TABLE_ENTRY * table_entries <= TABLE_BYTES,
        experts=True,
        products=rings,
        exchange=rings and layout.ep == layout.tp and spec.hidden_size % ROW_UNIT == 0,
    )


@contextmanager
def interpreting_on_cpu(mesh: Mesh) -> Iterator[None]:
    """Allow kernels on CPUs while tracing a step: they are interpreted, as on a v5e's core."""
    if mesh.devices.flat[0].platform != "cpu":
        yield
        return
    from weft.kernels.interpreter import tpu as interpreter

    interpreter.emulate_chip(cores=1)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")):
        yield
