"""Runs a model on a mesh of devices with jax: see models/interface.ModelRunner.

`dispatch` begins a step and returns a function that waits for its result, so the next step can be
dispatched earlier. Sampled tokens stay on the devices for the next step. `warm_up` compiles all
shapes.
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
"""Called with the next program's name, the number compiled so far, and the total."""


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
            *(spec, layout, mesh, dtype),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            kernels=kernels,
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
        """Read the weights from the checkpoint in `path` onto the devices.

        Args:
            path: the checkpoint's directory or GGUF file.
            spec: the checkpoint's model, from `checkpoint.locate.read_spec`.
            devices: `layout.tp` jax devices, from this process and others that do the same.
            layout: tp and ep, which divides tp.
            dtype: dtype for computing and for the KV cache: "auto", "bfloat16", "float32".
            block_size: tokens in a KV cache block.
            max_num_seqs: number of slots.
            max_num_batched_tokens: maximum number of tokens in a step.
            max_model_len: maximum number of tokens in a request.
            kernels: which parts of steps are Pallas kernels: see kernels.py.
            progress: called with the bytes read so far.
            compiling: called with the progress of `warm_up`.

        Raises:
            ModelError: the checkpoint does not match `spec`.
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
        """Each device's bytes per KV cache block, over all layers."""
        return self._block_size * self._layout.local(self._spec).kv_bytes_per_token(self._dtype)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate the cache: [num_blocks, Hk, block_size, 2 D] for each layer, cut by heads."""
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
        """Compile every shape, or read it from the compilation cache."""
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
        """Begin a step; return a function that waits for its result.

        One thread dispatches steps in order; another thread may wait for them.
        """
        started = time.perf_counter()
        bucket = self._buckets.choose(batch)
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

        compilations = 0 if self._counter is None else self._counter.take()

        def finish() -> StepOutput:
            result = StepOutput(batch.step)
            if sampled is not None:
                result = _output(batch, sampled, tops)
            else:
                logits.block_until_ready()
            prompt = _prompt_logprobs(batch, scores)
            pooled = NO_VECTORS if sums is None else _pooled(batch, sums)
            # The devices began this step when the one before was done.
            ended = time.perf_counter()
            seconds, self._free_at = ended - max(started, self._free_at), ended
            return replace(
                result,
                prompt_logprobs=prompt,
                pooled=pooled,
                seconds=seconds,
                compilations=compilations,
            )

        return finish

    def close(self) -> None:
        """Release the weights and the cache, and leave other processes; no step can follow."""
        if self._counter is not None:
            self._counter.close()
        self._cache = ()
        del self._params, self._state, self._program
        leave()

    def _rows(self, batch: StepInput, bucket: Bucket) -> Any:
        """Return the rows' settings, after storing new requests on the devices."""
        for settings in batch.new_slots:
            history_and_bias = self._settings.set_slot(settings)
            if history_and_bias is not None:
                self._state = self._program.set_slot(self._state, settings.slot, *history_and_bias)
        for slots, masks in self._settings.masks(batch):
            self._state = self._program.set_masks(self._state, slots, masks)
        return self._settings.rows(batch, bucket.rows)

    def _score_prompts(self, bucket: Bucket, hidden: jax.Array, batch: StepInput) -> list[Scores]:
        """Begin to score prompt tokens, a few rows at a time."""
        parts = []
        for start in range(0, len(batch.prompt_logprob_index), SCORED_ROWS):
            chunk = slice(start, start + SCORED_ROWS)
            index = padded(batch.prompt_logprob_index[chunk], SCORED_ROWS)
            target = padded(batch.prompt_logprob_target[chunk], SCORED_ROWS)
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
    """Start copying arrays to the host as soon as they are ready."""
    for array in jax.tree.leaves(arrays):
        array.copy_to_host_async()


def _output(batch: StepInput, sampled: Sampled, tops: Int32) -> StepOutput:
    """Fetch the sampled tokens to the host."""
    count = len(batch.sample_index)
    token_ids, status = (np.asarray(part)[:count] for part in sampled[:2])
    logprobs = None
    if (asked := tops >= 0).any():
        scores = [np.asarray(part)[:count] for part in sampled.scores]
        chosen, rank, top_ids, top = (_only(part, asked) for part in scores)
        max_top = int(tops.max())
        logprobs = Logprobs(chosen, rank, top_ids[:, :max_top], top[:, :max_top])
    return StepOutput(batch.step, token_ids, status, logprobs)


def _only(values: Any, asked: Any) -> Any:
    """Zero the rows that did not ask."""
    return np.where(asked.reshape(-1, *(1,) * (values.ndim - 1)), values, 0).astype(values.dtype)


def _pooled(batch: StepInput, sums: jax.Array) -> Float32:
    """Fetch the sums of hidden states to the host."""
    return np.asarray(sums)[: len(batch.pool_count)]


def _prompt_logprobs(batch: StepInput, parts: list[Scores]) -> Logprobs | None:
    """Fetch prompt tokens' log probabilities to the host."""
    if not parts:
        return None
    count, max_top = len(batch.prompt_logprob_index), batch.prompt_logprob_top
    chosen, rank, top_ids, top = (
        np.concatenate([np.asarray(part) for part in column])[:count]
        for column in zip(*parts, strict=True)
    )
    return Logprobs(chosen, rank, top_ids[:, :max_top], top[:, :max_top])
