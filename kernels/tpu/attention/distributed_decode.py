"""Decodes over a KV cache that is split by position over chips: distributed flash decoding.

    distributed_decode_attention(q [T, H, D], 1 / W of the pages, ...) -> [T, H, D], LSE [T, H]

A request's page p is on chip p mod W, so all chips have equally many pages, however long the
request grows. Every chip has all queries, and gets all results.

Protocol. Each chip computes the query tiles (kernel.py) in order, over its own pages. A finished
tile's part is its result and the log of the sum of its weights (LSE; -inf if this chip has no
visible key). Chip r sends the part of tile i to row [r, i] of `parts` on every chip. While it
travels, chip r computes tile i + 1.

    barrier    with all chips: all of them write into this chip's `parts`
    tile i     wait until the part of tile i - 2 has left slot i mod 2; attend; fill the slot;
               start W - 1 remote DMAs and a local one
    end        wait for the sends of the last two tiles, and for W - 1 parts of every tile

Each row is written once, so no credits are needed. `received` counts arrivals from all senders:
parts have equal sizes, and nothing is read before all have arrived. A chip exits with a part from
every other chip, and each was sent after its sender's barrier (topology.py). A core without tiles
therefore sends an empty part. With two cores, core i mod 2 computes tile i, on every chip.

XLA then weights the parts with exp(LSE - the largest LSE), in chip order, so all chips have the
same bits. Parts are float32, and without the padding in a tile's rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.kernel import (
    NUM_SCALARS,
    Attention,
    PrefetchedScalars,
    Scratch,
    scratch_shapes,
    tile_batch,
)
from weft.kernels.tpu.attention.query_tiles import (
    LANES,
    KernelConfig,
    column_to_row,
    cost,
    make_config,
    scatter_results,
)
from weft.kernels.tpu.collectives.all_to_all import device
from weft.kernels.tpu.runtime.topology import (
    Axes,
    Index,
    barrier,
    collective_id,
    cores,
    names,
    size,
)

SLOTS = 2
"""Number of a core's parts in flight."""


def distributed_decode_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    query_start: jax.Array,
    context_len: jax.Array,
    block_table: jax.Array,
    axes: Axes,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with the same queries on all chips, over pages split by position.

    Call it in `jax.shard_map`. The oracle is reference.distributed_decode_attention.

    Args:
        q: bfloat16 or float32 [T, H, D], the same on all chips.
        kv_pages: q's dtype [P, Hk, page, 2 D], this chip's pages.
        query_start: int32 [B + 1].
        context_len: int32 [B], whole contexts.
        block_table: int32 [B, n]; entry e on chip r is the request's page e * W + r.
        axes: mesh axes; later ones are minor in the chips' order.
        scale, sliding_window, softcap, sinks, block_q, block_k: as in `ragged_paged_attention`.

    Returns:
        q's dtype [T, H, D] and float32 [T, H], on every chip.

    Raises:
        NotImplementedError: the kernel does not support these shapes or dtypes.
    """
    config = make_config(
        *(q, kv_pages, block_table),
        block_q=block_q,
        block_k=block_k,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        world_size=size(axes),
    )
    if config.block_q * config.group > LANES:
        raise NotImplementedError(
            f"{config.block_q} queries of {config.group} heads are more than {LANES} rows; "
            "lower block_q"
        )
    rank = jnp.reshape(lax.axis_index(names(axes)).astype(jnp.int32), 1)
    scalars, queries = tile_batch(config, q, query_start, context_len, block_table, rank)
    parts = _attend_and_send(config, scalars, queries, kv_pages, names(axes))
    out, lse = _merge(config, parts)
    return scatter_results(config, out, lse, query_start, len(q), sinks)


@dataclass(frozen=True, slots=True)
class _Part:
    """Row layout of a part: the results of all heads in turn, then one LSE row per head."""

    config: KernelConfig

    @property
    def rows_per_head(self) -> int:
        return self.config.block_q * self.config.group

    @property
    def lse_row(self) -> int:
        """First LSE row."""
        return -(-self.config.kv_heads * self.rows_per_head // 8) * 8

    @property
    def rows(self) -> int:
        return self.lse_row + -(-self.config.kv_heads // 8) * 8


def _attend_and_send(
    config: KernelConfig,
    scalars: PrefetchedScalars,
    queries: jax.Array,
    kv_pages: jax.Array,
    axes: tuple[str, ...],
) -> jax.Array:
    """Return every chip's parts: float32 [W, N, rows, lanes]; arbitrary for unused tiles."""
    tiles, heads, rows, lanes = queries.shape
    part, world_size = _Part(config), config.world_size

    def kernel(*refs: jax.Ref) -> None:
        batch, (q_tiles, pages, parts, *rest) = (
            PrefetchedScalars.from_args(refs[:NUM_SCALARS]),
            refs[NUM_SCALARS:],
        )
        slots, sent, copied, received, *scratch = rest
        count, rank = batch.tiles.count, batch.rank
        attention = Attention(config, batch, pages, Scratch(*scratch))
        core, me = pl.program_id(0), rank[0]
        peers = [device(axes, lax.rem(me + step, world_size)) for step in range(1, world_size)]
        if peers:
            barrier(peers, core if cores() > 1 else None)
        num_tiles = lax.max(1, lax.div(count[0] - core + cores() - 1, cores()))

        def copy_local(tile: Index, slot: Index) -> Any:
            """Copy a part from its slot to this chip's own row."""
            return pltpu.make_async_copy(slots.at[slot], parts.at[me, tile], copied.at[slot])

        def remote_copies(tile: Index, slot: Index) -> list[Any]:
            """Copy it to this chip's row on each other chip."""
            return [
                pltpu.make_async_remote_copy(
                    *(slots.at[slot], parts.at[me, tile], sent.at[slot], received),
                    device_id=peer,
                    device_id_type=pl.DeviceIdType.MESH,
                )
                for peer in peers
            ]

        def wait_sent(slot: Index) -> None:
            copy_local(core, slot).wait()
            for send in remote_copies(core, slot):
                send.wait_send()

        def program(q: jax.Ref) -> None:
            i = pl.program_id(0)
            tile, slot = i * cores() + core, lax.rem(i, SLOTS)
            pl.when(i >= SLOTS)(lambda: wait_sent(slot))
            slots[slot] = jnp.zeros(slots.shape[1:], slots.dtype)

            @pl.when(tile < count[0])
            def _() -> None:
                attention.attend(tile, i == 0, tile + cores(), q.at[0])
                for head in range(heads):
                    result, head_lse = attention.result(head)
                    head_rows = pl.ds(head * part.rows_per_head, part.rows_per_head)
                    slots[slot, head_rows] = result[: part.rows_per_head]
                    slots[slot, pl.ds(part.lse_row + head, 1), :LANES] = column_to_row(head_lse)

            for copy in (copy_local(tile, slot), *remote_copies(tile, slot)):
                copy.start()

        pltpu.emit_pipeline(
            program,
            grid=(num_tiles,),
            in_specs=[
                pl.BlockSpec((1, heads, rows, lanes), lambda i: (i * cores() + core, 0, 0, 0))
            ],
        )(q_tiles)

        @pl.loop(lax.max(0, num_tiles - SLOTS), num_tiles)
        def _(i: jax.Array) -> None:
            wait_sent(lax.rem(i, SLOTS))

        @pl.loop(0, num_tiles)
        def _(_: jax.Array) -> None:
            for send in remote_copies(core, 0):
                send.wait_recv()

    shapes = [
        pltpu.VMEM((SLOTS, part.rows, lanes), jnp.float32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA,
        *scratch_shapes(config),
    ]
    own_cost = cost(config, tiles, len(scalars.block_table) // config.pages_per_request)
    sent_bytes = 4 * (world_size - 1) * tiles * part.rows * lanes
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((world_size, tiles, part.rows, lanes), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=NUM_SCALARS,
            grid=(cores(),),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=shapes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            collective_id=collective_id(axes) if world_size > 1 else None,
        ),
        cost_estimate=pl.CostEstimate(
            flops=own_cost.flops,
            bytes_accessed=own_cost.bytes_accessed + sent_bytes,
            transcendentals=own_cost.transcendentals,
            remote_bytes_transferred=sent_bytes,
        ),
        name="distributed_decode_attention",
    )(*scalars.args, queries, kv_pages)


def _merge(config: KernelConfig, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge all chips' parts to results float32 [N, Hk, rows, lanes] and LSE [N, Hk, rows]."""
    part = _Part(config)
    world_size, tiles, _, lanes = parts.shape
    rows = config.kv_heads * part.rows_per_head
    results = parts[:, :, :rows].reshape(
        world_size, tiles, config.kv_heads, part.rows_per_head, lanes
    )
    lse = parts[:, :, part.lse_row : part.lse_row + config.kv_heads, : part.rows_per_head]
    max_lse = jnp.max(lse, axis=0)
    max_lse = jnp.where(max_lse == -jnp.inf, 0, max_lse)
    weights = jnp.exp(lse - max_lse)
    total = jnp.sum(weights, axis=0)
    out = jnp.sum(weights[..., None] * results, axis=0)
    return out / jnp.where(total > 0, total, 1)[..., None], max_lse + jnp.log(total)
