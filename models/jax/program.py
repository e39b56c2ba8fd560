"""A model's compiled functions on a mesh: made before the first step, for every bucket.

| function | compiled for | |
| --- | --- | --- |
| forward | each bucket | ragged batch -> logits of sampled rows; the cache is donated |
| sample | each number of rows | logits -> tokens; the sampler's state is donated |
| pick, score | each number of tokens; once | rows of hidden states -> prompt log probabilities |
| pool | each number of tokens | hidden states -> their sums, request by request |
| set_slot | once | a new request's history and bias |
| set_masks | once | the tokens that some slots may have |

A step calls compiled functions by its bucket. Any other shape is an error, never a silent
compilation. The same code compiles for devices that are not attached (aot.py), because nothing in
it touches an array.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from weft.models.jax import sampler
from weft.models.jax.buckets import Bucket
from weft.models.jax.kernels import Choice, Shape, choose_kernels, interpreting_on_cpu
from weft.models.jax.mesh import REPLICATED, TENSOR, described, slice_of
from weft.models.jax.model import Batch, Cache, forward, head, normalize
from weft.models.jax.parameters import DTYPES, Norm, Params, cuts, describe, shapes
from weft.models.jax.sampler import MASKS, Rows, Sampled, Scores, State
from weft.models.plan.switches import Torus
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec, NormSpec

logger = logging.getLogger(__name__)

SCORED_ROWS = 64
"""Number of prompt tokens with their logits in memory at once."""

Compiled = Callable[..., Any]
"""A compiled function; called like the original."""


class Task(NamedTuple):
    """One compilation: its name, and the function that runs it."""

    name: str
    compile: Callable[[], Any]


class Program:
    """One model's functions on one mesh.

    Args:
        spec: the whole model.
        layout: its parallel layout; the world is the mesh.
        mesh: [expert, width], see mesh.py; real or described devices.
        dtype: dtype for computing and for the cache.
        block_size, num_blocks: the cache's shape.
        max_num_seqs: number of slots.
        buckets: shapes of steps.
        kernels: --kernels.

    Attributes:
    params, cache, state: descriptions of the data on the devices between steps.
        columns: columns in the logits: the vocabulary, with padding so that it divides.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        *,
        dtype: str,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        buckets: list[Bucket],
        kernels: Choice = "auto",
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._kernels = kernels
        self._block_size = block_size
        self._local = layout.local(spec)
        self._mesh = mesh
        self._buckets = buckets
        self._dtype = np.dtype(DTYPES[dtype])
        self._slots = max_num_seqs
        in_kernels = kernels == "overlapped"
        place = slice_of(mesh)
        self._torus = Torus(place, self._local, layout.tp, dtype, in_kernels=in_kernels)
        self._shapes = {bucket: self._shape(bucket) for bucket in buckets}
        parameters = describe(spec, layout)
        self._cuts = cuts(parameters)
        self.params: Params = shapes(parameters, mesh, dtype)
        self.cache = cache_shapes(spec, layout, mesh, dtype, block_size, num_blocks)
        self.columns = -(-spec.vocab_size // layout.tp) * layout.tp
        self.state = state_shapes(mesh, self.columns // layout.tp, max_num_seqs)
        self._compiled: dict[object, Compiled] = {}

    def tasks(self) -> Iterator[Task]:
        """Yield all compilations, the largest first."""
        for bucket in self._buckets:
            yield self._task(bucket.name, bucket, self.compile_forward)
        for rows in sorted({bucket.rows for bucket in self._buckets}, reverse=True):
            yield self._task(f"sampling of {rows} rows", ("sample", rows), self.compile_sample)
        for tokens, sharded in sorted({self._tokens(bucket) for bucket in self._buckets}):
            key = ("pick", tokens, sharded)
            yield self._task(f"scores of {tokens} tokens", key, self._compile_pick)
            key = ("pool", tokens, sharded)
            yield self._task(f"embeddings of {tokens} tokens", key, self._compile_pool)
        yield self._task("prompt log probabilities", ("score",), self._compile_score)
        yield self._task("new requests", ("set_slot",), self._compile_set_slot)
        yield self._task("masks", ("set_masks",), self._compile_set_masks)

    def _task(self, name: str, key: Any, compile: Callable[..., Any]) -> Task:
        def run() -> Any:
            arguments = (key,) if isinstance(key, Bucket) else key[1:]
            self._compiled[key] = compiled = compile(*arguments)
            return compiled

        return Task(name, run)

    def _tokens(self, bucket: Bucket) -> tuple[int, bool]:
        """Return what the hidden states' shape depends on."""
        return bucket.tokens, self.shape(bucket).sharded

    def shape(self, bucket: Bucket) -> Shape:
        """Return the static arguments that `forward` gets for a bucket."""
        return self._shapes[bucket]

    def _shape(self, bucket: Bucket) -> Shape:
        tokens = bucket.tokens
        shards = self._torus.shards_tokens(tokens)
        kernels = choose_kernels(
            *(self._kernels, self._spec, self._layout),
            on_tpu=self._mesh.devices.flat[0].platform == "tpu",
            block_size=self._block_size,
            tokens=tokens,
            sharded=shards.value,
            table_entries=bucket.rows * bucket.pages,
        )
        logger.debug("%s: sharded is %s: %s", bucket.name, shards.value, shards.reason)
        if not shards.value or kernels.products:
            return Shape(bucket.decodes, shards.value, kernels=kernels)
        gathers = self._torus.gathers_weights(tokens)
        logger.debug("%s: weights travel is %s: %s", bucket.name, gathers.value, gathers.reason)
        return Shape(bucket.decodes, shards.value, gathers.value, kernels)

    # Compiling.

    def compile_forward(self, bucket: Bucket) -> Any:
        """Compile `forward` for one bucket."""
        shape = self.shape(bucket)
        by_head = jax.tree.map(lambda _: CACHE_CUT, self.cache)
        hidden = PartitionSpec(TENSOR) if shape.sharded else REPLICATED
        run = self._shard_map(
            partial(forward, self._local, self._spec.vocab_size, shape),
            (self._cuts, by_head, REPLICATED, REPLICATED),
            (PartitionSpec(None, TENSOR), hidden, by_head),
        )
        whole = partial(described, self._mesh, dtype=jnp.int32)
        batch = Batch(
            tokens=whole((bucket.tokens,)),
            query_start=whole((bucket.rows + 1,)),
            context_len=whole((bucket.rows,)),
            tables=whole((bucket.rows, bucket.pages)),
            rows=whole((bucket.rows,)),
        )
        jitted = jax.jit(run, donate_argnums=1)
        with interpreting_on_cpu(self._mesh):
            lowered = jitted.lower(self.params, self.cache, self.state.newest, batch)
        return lowered.compile()

    def compile_sample(self, rows: int) -> Any:
        """Compile `sample` for a number of rows."""
        with jax.enable_x64(True):
            described_rows = Rows(
                described(self._mesh, (7, rows), jnp.int32),
                described(self._mesh, (5, rows), jnp.float32),
            )
            shardings = self._shardings((REPLICATED, self._state_cuts))
            jitted = jax.jit(
                sampler.sample,
                donate_argnums=2,
                out_shardings=(shardings[0], shardings[1]),
            )
            return jitted.lower(self._logits(rows), described_rows, self.state).compile()

    def _compile_pick(self, tokens: int, sharded: bool) -> Any:
        index = described(self._mesh, (SCORED_ROWS,), jnp.int32)
        jitted = jax.jit(_pick, out_shardings=NamedSharding(self._mesh, REPLICATED))
        return jitted.lower(self._hidden(tokens, sharded), index).compile()

    def _compile_pool(self, tokens: int, sharded: bool) -> Any:
        owner = described(self._mesh, (tokens,), jnp.int32)
        run = partial(_pool, self._spec.norm, self.sums(tokens))
        jitted = jax.jit(run, out_shardings=NamedSharding(self._mesh, REPLICATED))
        return jitted.lower(self.params.norm, self._hidden(tokens, sharded), owner).compile()

    def _hidden(self, tokens: int, sharded: bool) -> jax.ShapeDtypeStruct:
        cut = PartitionSpec(TENSOR) if sharded else REPLICATED
        own = tokens // self._mesh.size if sharded else tokens
        return described(self._mesh, (own, self._spec.hidden_size), self._dtype, cut)

    def _compile_score(self) -> Any:
        rows = described(self._mesh, (SCORED_ROWS, self._spec.hidden_size), self._dtype)
        targets = described(self._mesh, (SCORED_ROWS,), jnp.int32)
        logits = self._shard_map(
            partial(head, self._local, self._spec.vocab_size),
            (self._cuts, REPLICATED),
            PartitionSpec(None, TENSOR),
        )

        def score(params: Params, rows: jax.Array, targets: jax.Array) -> Scores:
            return sampler.score(logits(params, rows), targets)

        jitted = jax.jit(score, out_shardings=NamedSharding(self._mesh, REPLICATED))
        return jitted.lower(self.params, rows, targets).compile()

    def _compile_set_slot(self) -> Any:
        whole = partial(described, self._mesh, (self.columns,))
        jitted = jax.jit(
            sampler.set_slot, donate_argnums=0, out_shardings=self._shardings(self._state_cuts)
        )
        slot = described(self._mesh, (), jnp.int32)
        return jitted.lower(self.state, slot, whole(jnp.int32), whole(jnp.float32)).compile()

    def _compile_set_masks(self) -> Any:
        jitted = jax.jit(
            sampler.set_masks, donate_argnums=0, out_shardings=self._shardings(self._state_cuts)
        )
        words = self.state.mask.shape[1]
        whole = partial(described, self._mesh, dtype=jnp.int32)
        return jitted.lower(self.state, whole((MASKS,)), whole((MASKS, words))).compile()

    def _shard_map(self, function: Callable[..., Any], cut: Any, out: Any) -> Callable[..., Any]:
        """Turn a device's view into a function of whole arrays."""
        split: Callable[..., Any] = jax.shard_map(
            function, mesh=self._mesh, in_specs=cut, out_specs=out, check_vma=False
        )
        return split

    @property
    def _state_cuts(self) -> State:
        specs: State = jax.tree.map(lambda array: array.sharding.spec, self.state)
        return specs

    def _shardings(self, cut: Any) -> Any:
        return jax.tree.map(
            lambda spec: NamedSharding(self._mesh, spec),
            cut,
            is_leaf=lambda value: isinstance(value, PartitionSpec),
        )

    def _logits(self, rows: int) -> jax.ShapeDtypeStruct:
        own = (rows, self.columns // self._mesh.size)
        return described(self._mesh, own, self._dtype, PartitionSpec(None, TENSOR))

    # Running.

    def forward(
        self, bucket: Bucket, params: Params, cache: Cache, newest: jax.Array, batch: Batch
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """See model.forward, with whole arrays; `cache` is donated."""
        result: tuple[jax.Array, jax.Array, Cache] = self._compiled[bucket](
            params, cache, newest, batch
        )
        return result

    def sample(self, logits: jax.Array, rows: Rows, state: State) -> tuple[Sampled, State]:
        """See sampler.sample; `state` is donated."""
        with jax.enable_x64(True):
            result: tuple[Sampled, State] = self._compiled["sample", logits.shape[0]](
                logits, rows, state
            )
        return result

    def score(
        self, bucket: Bucket, params: Params, hidden: jax.Array, rows: Any, ids: Any
    ) -> Scores:
        """Score SCORED_ROWS tokens `ids`, which follow the rows of `hidden`."""
        picked = self._compiled["pick", *self._tokens(bucket)](hidden, rows)
        scores: Scores = self._compiled["score",](params, picked, ids)
        return scores

    def sums(self, tokens: int) -> int:
        """Return how many sums `pool` makes: one for each possible request."""
        return min(tokens, self._slots)

    def pool(self, bucket: Bucket, params: Params, hidden: jax.Array, owner: Any) -> jax.Array:
        """Sum normed hidden states, float32 [sums, hidden].

        `owner`, int32 [T], selects each token's sum; the value `sums` selects none.
        """
        pooled: jax.Array = self._compiled["pool", *self._tokens(bucket)](
            params.norm, hidden, owner
        )
        return pooled

    def set_slot(self, state: State, slot: int, history: Any, bias: Any) -> State:
        """See sampler.set_slot; `state` is donated."""
        new_state: State = self._compiled["set_slot",](state, np.int32(slot), history, bias)
        return new_state

    def set_masks(self, state: State, slots: Any, masks: Any) -> State:
        """See sampler.set_masks; `state` is donated."""
        new_state: State = self._compiled["set_masks",](state, slots, masks)
        return new_state


CACHE_CUT = PartitionSpec(None, TENSOR)


def cache_shapes(
    spec: ModelSpec, layout: Layout, mesh: Mesh, dtype: str, block_size: int, num_blocks: int
) -> Cache:
    """Describe each layer's cache: [num_blocks, Hk, block_size, 2 D], cut by heads."""
    own = (num_blocks, layout.local(spec).num_kv_heads, block_size, 2 * spec.head_dim)
    one: Any = described(mesh, own, DTYPES[dtype], CACHE_CUT)
    return tuple(one for _ in spec.layers)


def state_shapes(mesh: Mesh, words: int, slots: int) -> State:
    """Describe the sampler's state; each device has `words` tokens of the vocabulary."""
    by_word = PartitionSpec(None, TENSOR)
    newest: Any = described(mesh, (slots,), jnp.int32)
    history: Any = described(mesh, (slots, words), jnp.int32, by_word)
    bias: Any = described(mesh, (slots, words), jnp.float32, by_word)
    mask: Any = described(mesh, (slots, -(-words * mesh.size // 32)), jnp.int32)
    return State(newest, history, bias, mask)


def _pick(hidden: jax.Array, index: jax.Array) -> jax.Array:
    return hidden[index]


def _pool(spec: NormSpec, sums: int, norm: Norm, hidden: jax.Array, owner: jax.Array) -> jax.Array:
    states = normalize(spec, norm, hidden).astype(jnp.float32)
    return jax.ops.segment_sum(states, owner, num_segments=sums)  # drops owners beyond `sums`
