"""Runs a model on a mesh of devices with jax: see models/interface.ModelRunner.

A step is dispatched by `dispatch`, which gives back a function that waits for what it produced:
the next step can be dispatched before. Sampled tokens stay on the devices, where the next step
finds them. All shapes are compiled by `warm_up`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from msgspec.structs import replace

from weft.models.checkpoint.weights import Progress
from weft.models.interface import NO_VECTORS, Float32, Int32, Logprobs, StepInput, StepOutput
from weft.models.jax.buckets import Bucket, Buckets, padded
from weft.models.jax.distributed import leave
from weft.models.jax.kernels import Choice
from weft.models.jax.mesh import make_mesh
from weft.models.jax.model import Cache
from weft.models.jax.parameters import Params, load
from weft.models.jax.platform import CompileCounter
from weft.models.jax.program import SCORED_ROWS, Program
from weft.models.jax.sampler import MAX_TOP, Sampled, Scores, Settings, State
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

CompileProgress = Callable[[str, int, int], None]
"""Told what is compiled next, how much is done, and how much there is in all."""


class JaxRunner:
    """One model on a mesh; made by `load`. A ModelRunner."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        mesh: Mesh,
        params: Params,
        *,
        dtype: str,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kernels: Choice = "auto",
        compiling: CompileProgress | None = None,
    ) -> None:
        self._spec = spec
        self._layout = layout
        self._mesh = mesh
        self._params = params
        self._dtype = dtype
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._kernels = kernels
        self._compiling = compiling
        self._buckets = Buckets(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
        )
        columns = -(-spec.vocab_size // layout.tp) * layout.tp
        self._settings = Settings(spec.vocab_size, columns, max_num_seqs)
        self._program: Program
        self._cache: Cache = ()
        self._state: State
        self._counter: CompileCounter | None = None
        self._free_at = 0.0

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        *,
        devices: list[Any],
        layout: Layout,
        dtype: str,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        kernels: Choice = "auto",
        progress: Progress | None = None,
        compiling: CompileProgress | None = None,
    ) -> JaxRunner:
        """Read the weights of the checkpoint in `path` onto the devices.

        Args:
            path: the checkpoint's directory.
            spec: what it holds, from `checkpoint.read_spec`.
            devices: of jax, `layout.tp` of them, of this process and others that do the same.
            layout: tp and ep, which divides tp.
            dtype: to compute in and to cache keys and values in: "auto", "bfloat16", "float32".
            block_size: tokens in a block of the KV cache.
            max_num_seqs: slots.
            max_num_batched_tokens: most tokens of a step.
            max_model_len: most tokens of a request.
            kernels: which parts of steps are Pallas kernels: see kernels.py.
            progress: told how far reading has come, in bytes.
            compiling: told how far `warm_up` has come.

        Raises:
            ModelError: the checkpoint does not hold what `spec` says.
        """
        mesh = make_mesh(devices, layout.tp, layout.ep)
        dtype = spec.compute_dtype(dtype)
        params = load(path, spec, layout, mesh, dtype, progress)
        return cls(
            *(spec, layout, mesh, params),
            dtype=dtype,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            kernels=kernels,
            compiling=compiling,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of each device's part of one block of keys and values, over all layers."""
        return self._block_size * self._layout.local(self._spec).kv_bytes_per_token(self._dtype)

    @property
    def compiles_after_warm_up(self) -> int:
        """Programs that XLA has compiled in this process since `warm_up`: each held up a step."""
        return 0 if self._counter is None else self._counter.count

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make the cache: for each layer [num_blocks, Hk, block_size, 2 D], cut by heads."""
        self._program = Program(
            *(self._spec, self._layout, self._mesh),
            dtype=self._dtype,
            block_size=self._block_size,
            num_blocks=num_blocks,
            max_num_seqs=self._max_num_seqs,
            buckets=self._buckets.all(),
            kernels=self._kernels,
        )
        self._cache = jax.tree.map(_zeros, self._program.cache)
        self._state = jax.tree.map(_zeros, self._program.state)

    def warm_up(self) -> None:
        """Compile every shape; or fetch it, where a folder keeps what was compiled before."""
        tasks = list(self._program.tasks())
        for done, task in enumerate(tasks):
            if self._compiling is not None:
                self._compiling(task.name, done, len(tasks))
            task.compile()
        if self._compiling is not None:
            self._compiling("", len(tasks), len(tasks))
        self._counter = CompileCounter()

    def step(self, batch: StepInput) -> StepOutput:
        """See `ModelRunner.step`."""
        return self.dispatch(batch)()

    def dispatch(self, batch: StepInput) -> Callable[[], StepOutput]:
        """Begin a step; what is returned waits for its end.

        Steps are dispatched in their order, by one thread; another one may wait for them.
        """
        started = time.perf_counter()
        bucket = self._buckets.of(batch)
        rows = self._rows(batch, bucket)
        arrays = self._buckets.pad(batch, bucket)
        logits, hidden, self._cache = self._program.forward(
            bucket, self._params, self._cache, self._state.newest, arrays
        )
        sampled = None
        if len(batch.sample_index):
            sampled, self._state = self._program.sample(logits, rows, self._state)
            _fetch(sampled)
        scores = self._score_prompts(bucket, hidden, batch)
        sums = self._pool(bucket, hidden, batch)
        tops = self._settings.logprobs(batch.sample_slot)

        def finish() -> StepOutput:
            result = StepOutput(batch.step)
            if sampled is not None:
                result = _output(batch, sampled, tops)
            else:
                logits.block_until_ready()
            prompt = _prompt_logprobs(batch, scores)
            pooled = NO_VECTORS if sums is None else _pooled(batch, sums)
            # The devices have worked on it since the step before was done.
            ended = time.perf_counter()
            seconds, self._free_at = ended - max(started, self._free_at), ended
            return replace(result, prompt_logprobs=prompt, pooled=pooled, seconds=seconds)

        return finish

    def close(self) -> None:
        """Release the weights and the cache, with other processes; no step can follow."""
        if self._counter is not None:
            self._counter.close()
        self._cache = ()
        del self._params, self._state, self._program
        leave()

    def _rows(self, batch: StepInput, bucket: Bucket) -> Any:
        """What the step's rows ask for, once the devices know of its new requests."""
        for settings in batch.new_slots:
            marks = self._settings.set_slot(settings)
            if marks is not None:
                self._state = self._program.mark(self._state, settings.slot, *marks)
        for slots, masks in self._settings.masks(batch):
            self._state = self._program.restrict(self._state, slots, masks)
        return self._settings.rows(batch, bucket.rows)

    def _score_prompts(self, bucket: Bucket, hidden: jax.Array, batch: StepInput) -> list[Scores]:
        """Begin to score prompt tokens, some rows at a time."""
        parts = []
        for start in range(0, len(batch.prompt_logprob_index), SCORED_ROWS):
            some = slice(start, start + SCORED_ROWS)
            index = padded(batch.prompt_logprob_index[some], SCORED_ROWS)
            target = padded(batch.prompt_logprob_target[some], SCORED_ROWS)
            scores = self._program.score(bucket, self._params, hidden, index, target)
            _fetch(scores)
            parts.append(scores)
        if parts and batch.prompt_logprob_top > MAX_TOP:
            top = batch.prompt_logprob_top
            raise ValueError(f"prompt_logprob_top is {top}; it must be at most {MAX_TOP}")
        return parts

    def _pool(self, bucket: Bucket, hidden: jax.Array, batch: StepInput) -> jax.Array | None:
        """Begin to sum hidden states."""
        count = len(batch.pool_count)
        if not count:
            return None
        owner = np.full(bucket.tokens, self._program.sums(bucket.tokens), np.int32)
        owner[batch.pool_index] = np.repeat(np.arange(count, dtype=np.int32), batch.pool_count)
        sums = self._program.pool(bucket, self._params, hidden, owner)
        _fetch(sums)
        return sums


def _zeros(described: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(described.shape, described.dtype, device=described.sharding)


def _fetch(arrays: Any) -> None:
    """Have arrays copied to the host as soon as they are there."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()


def _output(batch: StepInput, sampled: Sampled, tops: Int32) -> StepOutput:
    """What was sampled, on the host."""
    count = len(batch.sample_index)
    token_ids, status = (np.asarray(part)[:count] for part in sampled[:2])
    logprobs = None
    if (asked := tops >= 0).any():
        scores = [np.asarray(part)[:count] for part in sampled.scores]
        chosen, rank, top_ids, top = (_only(part, asked) for part in scores)
        most = int(tops.max())
        logprobs = Logprobs(chosen, rank, top_ids[:, :most], top[:, :most])
    return StepOutput(batch.step, token_ids, status, logprobs)


def _only(values: Any, asked: Any) -> Any:
    """Zeros in the rows that did not ask."""
    return np.where(asked.reshape(-1, *(1,) * (values.ndim - 1)), values, 0).astype(values.dtype)


def _pooled(batch: StepInput, sums: jax.Array) -> Float32:
    """Sums of hidden states, on the host."""
    return np.asarray(sums)[: len(batch.pool_count)]


def _prompt_logprobs(batch: StepInput, parts: list[Scores]) -> Logprobs | None:
    """Prompt tokens' log probabilities, on the host."""
    if not parts:
        return None
    count, most = len(batch.prompt_logprob_index), batch.prompt_logprob_top
    chosen, rank, top_ids, top = (
        np.concatenate([np.asarray(part) for part in column])[:count]
        for column in zip(*parts, strict=True)
    )
    return Logprobs(chosen, rank, top_ids[:, :most], top[:, :most])
