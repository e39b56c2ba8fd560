"""Decodes over a KV cache that is split by position among chips: distributed flash decoding.

    distributed_decode_attention(q [T, H, D], 1 / W of the pages, ...) -> [T, H, D], LSE [T, H]

Page p of a request is on chip p mod W, so that chips have equally much, however long the request
grows. Every chip has all queries, and gets all results.

Protocol. A chip goes over the tiles of queries (attend.py) in order, with its own pages. When tile
i is done, its part, the result and the log of the sum of its weights (LSE; -inf where the chip has
no key that is seen), goes to row [r, i] of `parts` on every chip, r being the sender; while it
travels, tile i + 1 is attended.

    barrier    with all chips: all of them write into this one's `parts`
    tile i     wait until the part of tile i - 2 has left slot i mod 2; attend; fill the slot;
               start W - 1 remote DMAs and a local one
    end        wait for the sends of the last two tiles, and for W - 1 parts of every tile

Each place is written once, so there are no credits. `received` counts what came, from whomever: all
parts have one size, and nothing is read before all have come. A chip leaves with a part of every
other one, which was sent after that one's barrier (topology.py); so a core that has no tile sends
an empty one. With two cores, tile i is core i mod 2's, here as there.

XLA then weights the parts with exp(LSE - the largest), in the order of the chips: all of them have
the same bits. Parts are float32, and without the padding that a tile's rows have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from weft.kernels.tpu.attention.kernel import SCALARS, Attention, Scalars, Work, tile_batch, work
from weft.kernels.tpu.attention.query_tiles import (
    LANES,
    Shape,
    column_to_row,
    cost,
    make_shape,
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
"""Parts of a core that are on their way."""


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
    """Attention of queries that all chips have, over pages that are dealt out to them, in
    `jax.shard_map`: reference.distributed_decode_attention.

    Args:
        q: bfloat16 or float32 [T, H, D], the same on all chips.
        kv_pages: q's dtype [P, Hk, page, 2 D], the chip's own.
        query_start: int32 [B + 1].
        context_len: int32 [B], of whole contexts.
        block_table: int32 [B, n]; entry e of chip r is page e * W + r of the request.
        axes: of the mesh; later ones are minor in the numbers of chips.
        scale, sliding_window, softcap, sinks, block_q, block_k: as of `ragged_paged_attention`.

    Returns:
        q's dtype [T, H, D] and float32 [T, H], on every chip.

    Raises:
        NotImplementedError: shapes or dtypes that the kernel does not take.
    """
    shape = make_shape(
        *(q, kv_pages, block_table),
        block_q=block_q,
        block_k=block_k,
        scale=scale,
        window=sliding_window,
        softcap=softcap,
        world=size(axes),
    )
    if shape.block_q * shape.group > LANES:
        raise NotImplementedError(
            f"{shape.block_q} queries of {shape.group} heads are more than {LANES} rows; "
            "lower block_q"
        )
    rank = jnp.reshape(lax.axis_index(names(axes)).astype(jnp.int32), 1)
    scalars, queries = tile_batch(shape, q, query_start, context_len, block_table, rank)
    parts = _attend_and_send(shape, scalars, queries, kv_pages, names(axes))
    out, logs = _merge(shape, parts)
    return scatter_results(shape, out, logs, query_start, len(q), sinks)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a part: the results of all heads, one after the other, then a row of LSE for each."""

    shape: Shape

    @property
    def of_head(self) -> int:
        return self.shape.block_q * self.shape.group

    @property
    def logs(self) -> int:
        """Where the LSE begins."""
        return -(-self.shape.kv_heads * self.of_head // 8) * 8

    @property
    def rows(self) -> int:
        return self.logs + -(-self.shape.kv_heads // 8) * 8


def _attend_and_send(
    shape: Shape, scalars: Scalars, queries: jax.Array, kv_pages: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    """Every chip's parts: float32 [W, N, rows, lanes]; those of tiles that are not in use are
    anything."""
    tiles, heads, rows, lanes = queries.shape
    part, world = _Part(shape), shape.world

    def kernel(*refs: jax.Ref) -> None:
        known, (q_tiles, pages, parts, *rest) = Scalars.of(refs[:SCALARS]), refs[SCALARS:]
        slots, sent, kept, received, *scratch = rest
        count, rank = known.tiles.count, known.rank
        attention = Attention(shape, known, pages, Work(*scratch))
        core, me = pl.program_id(0), rank[0]
        peers = [device(axes, lax.rem(me + step, world)) for step in range(1, world)]
        if peers:
            barrier(peers, core if cores() > 1 else None)
        own = lax.max(1, lax.div(count[0] - core + cores() - 1, cores()))

        def keep(tile: Index, slot: Index) -> Any:
            """A part from its slot to this chip's own row."""
            return pltpu.make_async_copy(slots.at[slot], parts.at[me, tile], kept.at[slot])

        def sends(tile: Index, slot: Index) -> list[Any]:
            """The same to this chip's row on each of the others."""
            return [
                pltpu.make_async_remote_copy(
                    *(slots.at[slot], parts.at[me, tile], sent.at[slot], received),
                    device_id=peer,
                    device_id_type=pl.DeviceIdType.MESH,
                )
                for peer in peers
            ]

        def wait_sent(slot: Index) -> None:
            keep(core, slot).wait()
            for send in sends(core, slot):
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
                    result, log = attention.result(head)
                    place = pl.ds(head * part.of_head, part.of_head)
                    slots[slot, place] = result[: part.of_head]
                    slots[slot, pl.ds(part.logs + head, 1), :LANES] = column_to_row(log)

            for copy in (keep(tile, slot), *sends(tile, slot)):
                copy.start()

        pltpu.emit_pipeline(
            program,
            grid=(own,),
            in_specs=[
                pl.BlockSpec((1, heads, rows, lanes), lambda i: (i * cores() + core, 0, 0, 0))
            ],
        )(q_tiles)

        @pl.loop(lax.max(0, own - SLOTS), own)
        def _(i: jax.Array) -> None:
            wait_sent(lax.rem(i, SLOTS))

        @pl.loop(0, own)
        def _(_: jax.Array) -> None:
            for send in sends(core, 0):
                send.wait_recv()

    shapes = [
        pltpu.VMEM((SLOTS, part.rows, lanes), jnp.float32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA,
        *work(shape),
    ]
    own_cost = cost(shape, tiles, len(scalars.table) // shape.pages)
    sent_bytes = 4 * (world - 1) * tiles * part.rows * lanes
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((world, tiles, part.rows, lanes), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=SCALARS,
            grid=(cores(),),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=shapes,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            collective_id=collective_id(axes) if world > 1 else None,
        ),
        cost_estimate=pl.CostEstimate(
            flops=own_cost.flops,
            bytes_accessed=own_cost.bytes_accessed + sent_bytes,
            transcendentals=own_cost.transcendentals,
            remote_bytes_transferred=sent_bytes,
        ),
        name="distributed_decode_attention",
    )(*scalars.flat, queries, kv_pages)


def _merge(shape: Shape, parts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Results float32 [N, Hk, rows, lanes] and LSE [N, Hk, rows] of parts of all chips."""
    part = _Part(shape)
    world, tiles, _, lanes = parts.shape
    rows = shape.kv_heads * part.of_head
    results = parts[:, :, :rows].reshape(world, tiles, shape.kv_heads, part.of_head, lanes)
    logs = parts[:, :, part.logs : part.logs + shape.kv_heads, : part.of_head]
    top = jnp.max(logs, axis=0)
    top = jnp.where(top == -jnp.inf, 0, top)
    shares = jnp.exp(logs - top)
    total = jnp.sum(shares, axis=0)
    out = jnp.sum(shares[..., None] * results, axis=0)
    return out / jnp.where(total > 0, total, 1)[..., None], top + jnp.log(total)
