"""Which parts of a step are Pallas kernels (kernels/tpu), the rest being XLA's operators: decided
here, for each shape of a step, and nowhere else.

| part | `overlapped`, kernels/tpu | `auto`, on TPUs |
| --- | --- | --- |
| attention | `ragged_paged_attention`, `write_pages` | the same |
| experts | `grouped_gate_up`, `grouped_matmul` | the same |
| products | `all_gather_matmul`, `matmul_reduce_scatter` | rings of XLA (collectives.py) |
| exchange | `moe_dispatch`, `moe_combine` | XLA's all-gather and reduce-scatter |

| part | kernels take |
| --- | --- |
| attention | heads of a multiple of 64, blocks of 16, block tables that fit in scalar memory |
| experts | all |
| products | steps that deal out tokens, a multiple of 32 to each device |
| exchange | the same, if an expert is on one device, and the hidden size a multiple of 128 |

What kernels do not take is done as in `plain`, which is none of them; `auto` on CPUs is `plain`.
No kernel has been timed on hardware yet. `auto` has those that spare memory on paper, where XLA
would copy the cache, or gather pages before it reads them; not those of which XLA's schedule does
as well, with a product beside nearly every hop of its rings.

On CPUs kernels run in Pallas' TPU interpreter: for tests, some thousand times slower.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

Choice = Literal["auto", "overlapped", "plain"]

MIN_SHARD_TOKENS = 32
"""Of each device, from which on tokens are dealt out: fewer do not hide a hop."""

HEAD_UNIT, BLOCK_UNIT = 64, 16
"""Numbers of a head, and tokens of a block, of which kernels of attention take multiples."""

MAX_TABLE_BYTES = 512 << 10
"""Of a step's block tables, in scalar memory, which has 1 MiB."""

TOKEN_UNIT = 32
"""Tokens of a device, of which kernels of products take multiples: 8 for each of four lanes."""

ROW_UNIT = 128
"""Numbers of a token, of which the exchange takes multiples."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which parts of a step are kernels, by default none: see the table above."""

    attention: bool = False
    experts: bool = False
    products: bool = False
    exchange: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a step is known when it is compiled.

    Attributes:
        decodes: whether each request has one token, or none.
        sharded: whether each device has some of the tokens between blocks.
        kernels: which of its parts are kernels.
    """

    decodes: bool
    sharded: bool
    kernels: Kernels = Kernels()


def shards_tokens(tokens: int, devices: int) -> bool:
    """Whether a step of so many tokens deals them out."""
    return devices > 1 and tokens % (2 * devices) == 0 and tokens >= MIN_SHARD_TOKENS * devices


def gathers_weights(tokens: int, width: int) -> bool:
    """Whether fewer bytes travel if the three matrices of an MLP do, and not its tokens twice."""
    return 2 * tokens > 3 * width


def choose_kernels(
    choice: Choice,
    spec: ModelSpec,
    layout: Layout,
    *,
    on_tpu: bool,
    block_size: int,
    tokens: int,
    table_entries: int,
) -> Kernels:
    """What does the parts of a step.

    Args:
        choice: --kernels.
        spec: the whole model.
        layout: tp and ep.
        on_tpu: whether the devices are TPUs.
        block_size: tokens in a block of the cache.
        tokens: of the step.
        table_entries: of its block tables.
    """
    if choice == "plain" or (choice == "auto" and not on_tpu):
        return Kernels()
    rings = (
        choice == "overlapped"
        and shards_tokens(tokens, layout.tp)
        and tokens % (TOKEN_UNIT * layout.tp) == 0
    )
    return Kernels(
        attention=spec.head_dim % HEAD_UNIT == 0
        and block_size % BLOCK_UNIT == 0
        and 4 * table_entries <= MAX_TABLE_BYTES,
        experts=True,
        products=rings,
        exchange=rings and layout.ep == layout.tp and spec.hidden_size % ROW_UNIT == 0,
    )


@contextmanager
def runnable(mesh: Mesh) -> Iterator[None]:
    """While a step is traced: on CPUs its kernels will be interpreted, as on the cores of a v5e."""
    if mesh.devices.flat[0].platform != "cpu":
        yield
        return
    from weft.kernels.interpreter import tpu as interpreter

    interpreter.be(cores=1)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(dma_execution_mode="eager")):
        yield
