"""Runs a model, or one rank's part of it, on the CPU: see models/interface.ModelRunner.

A step is: name the tokens that were sampled on the device, plan attention, run
the layers, sample, remember the sampled tokens. State between steps is the KV
cache, the sampler's slots, and each slot's newest token. Ranks that share a copy
of attention are given the same steps; each of them samples, the same tokens. Of stages,
the first one names, the last one samples, and hidden states go from each to the next.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.symmetric.memory import Home
from weft.models.interface import Int32, Logprobs, SlotSampling, StepInput, StepOutput
from weft.models.layout import WHOLE, Layout
from weft.models.spec import ModelSpec
from weft.models.torch.group import ALONE, Groups
from weft.models.torch.layers import KVCache
from weft.models.torch.model import Model
from weft.models.torch.pipe import Pipe
from weft.models.torch.sampler import Sampler
from weft.models.weights import Progress, Weights

if TYPE_CHECKING:
    from weft.models.torch.overlapped import OverlappedModel

Int64 = npt.NDArray[np.int64]

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits in memory at once when a prompt is scored."""

NONE: Int32 = np.empty(0, np.int32)

WARM_UP_TOKENS = 32
"""Tokens of the prompt that `warm_up` runs, at most."""


class TorchRunner:
    """One model on the CPU; made by `load`. A ModelRunner."""

    def __init__(
        self,
        model: Model | OverlappedModel,
        spec: ModelSpec,
        *,
        pipe: Pipe,
        vocab_size: int,
        dtype: str,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        layout: Layout,
    ) -> None:
        """`spec` is this rank's part of the model; `vocab_size` is of all ranks."""
        self._layout = layout
        self._model = model
        self._spec = spec
        self._pipe = pipe
        self._dtype = dtype
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._cache: list[KVCache] = []
        self._sampler = Sampler(vocab_size, max_num_seqs)
        self._newest_token = torch.zeros(max_num_seqs, dtype=torch.int64)

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        *,
        dtype: str,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        quantization: str = "none",
        compress_weights: bool = True,
        threads: int | None = None,
        progress: Progress | None = None,
        layout: Layout = WHOLE,
        groups: Groups = ALONE,
        home: Home | None = None,
        context_home: Home | None = None,
    ) -> TorchRunner:
        """Read and pack this rank's weights of the checkpoint in `path`.

        Args:
            path: the checkpoint's directory.
            spec: what it holds, from `checkpoint.read_spec`.
            dtype: to compute in and to cache keys and values in: "auto", "bfloat16", "float32".
            block_size: tokens in a block of the KV cache, on each rank that has some of them.
            max_num_seqs: slots.
            max_num_batched_tokens: most tokens of a step.
            max_model_len: most tokens of a request.
            quantization: of the matrices: "none", or "int8" with a scale per output channel.
            compress_weights: keep matrices of bfloat16 in 12 bits a number, without loss, where
                there are kernels for it.
            threads: of torch, in this whole process; as they are if None.
            progress: told how far reading has come, in bytes.
            layout: how the model is split, and which part is this rank's.
            groups: the ranks that have the others.
            home: of this rank's symmetric memory, to run on overlapped kernels; plain if None.
            context_home: of that of the ranks that share KV heads with this one, if there are any.

        Raises:
            ModelError: the checkpoint does not hold what `spec` says.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        dtype = spec.compute_dtype(dtype)
        with torch.inference_mode():
            weights = Weights(path, spec, progress, layout)
            compute: torch.dtype = getattr(torch, dtype)
            max_tokens = max_num_batched_tokens
            model: Model | OverlappedModel
            if home is not None:
                from weft.models.torch.overlapped import OverlappedModel  # imports triton

                model = OverlappedModel(
                    spec,
                    weights,
                    compute,
                    home=home,
                    context_home=context_home,
                    groups=groups,
                    max_tokens=max_tokens,
                )
            else:
                model = Model(
                    spec,
                    weights,
                    compute,
                    quantization=quantization,
                    compress=compress_weights,
                    groups=groups,
                )
        return cls(
            model,
            layout.local(spec),
            pipe=groups.pipe,
            vocab_size=spec.vocab_size,
            dtype=dtype,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_tokens=min(max_num_batched_tokens, max_model_len),
            layout=layout,
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of this rank's part of one block of keys and values, over its layers."""
        return self._block_size * self._spec.kv_bytes_per_token(self._dtype)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Make the cache: for each layer [num_blocks, kv_heads, block_size, head_dim], twice."""
        shape = (num_blocks, self._spec.num_kv_heads, self._block_size, self._spec.head_dim)
        dtype: torch.dtype = getattr(torch, self._dtype)
        self._cache = [
            (torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype))
            for _ in self._spec.layers
        ]

    def warm_up(self) -> None:
        """Run a short prompt and decode it once, in block 0, before any request owns that."""
        tokens = min(WARM_UP_TOKENS, self._block_size, self._max_tokens)
        for step in (
            _single_request(range(tokens), SlotSampling(slot=0)),
            _single_request(range(tokens - 1, tokens)),
        ):
            self.step(replace(step, copies=self._layout.copies * (step.size,)))

    @torch.inference_mode()
    def step(self, batch: StepInput) -> StepOutput:
        """See `ModelRunner.step`."""
        started = self._clock()
        if not len(batch.token_ids):
            self._model.take_part(batch.copies)
            return StepOutput(batch.step, NONE, NONE, seconds=self._clock() - started)
        plan = AttentionPlan.build(
            batch.query_start,
            batch.context_len,
            batch.block_table,
            block_size=self._block_size,
            rank=self._layout.context,
            world_size=self._layout.cp,
        )
        x, positions = self._begin(batch), torch.tensor(batch.positions)
        if not self._pipe.is_last:
            x = self._model(x, positions, self._cache, plan, copies=batch.copies)
            self._pipe.send(x)
            return StepOutput(batch.step, NONE, NONE, seconds=self._clock() - started)
        # Sorted, so that a row's place among them can be searched.
        rows = np.union1d(batch.sample_index, batch.prompt_logprob_index).astype(np.int64)
        hidden = self._model(
            x,
            positions,
            self._cache,
            plan,
            torch.from_numpy(rows) if len(rows) < len(batch.token_ids) else None,
            batch.copies,
        )
        token_ids, status, logprobs = self._sample(hidden, rows, batch)
        return StepOutput(
            step=batch.step,
            token_ids=token_ids,
            status=status,
            logprobs=logprobs,
            prompt_logprobs=self._score_prompts(hidden, rows, batch),
            seconds=self._clock() - started,
        )

    def _clock(self) -> float:
        """Seconds, which stand still while this rank waits for other stages."""
        return time.perf_counter() - self._pipe.waited

    def close(self) -> None:
        """Release the weights and the cache; no step can follow."""
        self._pipe.close()
        self._cache.clear()
        del self._model

    def _begin(self, batch: StepInput) -> Tensor:
        """[T, hidden], as this stage's first layer takes it."""
        if not self._pipe.is_first:
            dtype: torch.dtype = getattr(torch, self._dtype)
            return self._pipe.receive(len(batch.token_ids), self._spec.hidden_size, dtype)
        x = self._model.embed(self._known_tokens(batch.token_ids))
        if not self._pipe.is_last:
            self._pipe.expect(torch.tensor(batch.sample_slot, dtype=torch.int64))
        return x

    def _known_tokens(self, token_ids: Int32) -> Tensor:
        """Put the slots' newest tokens in the place of the negative ids that stand for them."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        if not self._pipe.is_last:
            for slots, tokens in self._pipe.sampled(-1 - ids[ids < 0]):
                self._newest_token[slots] = tokens
        if token_ids.min() >= 0:
            return ids
        return torch.where(ids < 0, self._newest_token[(-1 - ids).clamp_(min=0)], ids)

    def _sample(
        self, hidden: Tensor, rows: Int64, batch: StepInput
    ) -> tuple[Int32, Int32, Logprobs | None]:
        """Choose the next token of each sampled row, and keep it as its slot's newest.

        Args:
            hidden: [S, hidden], of the tokens `rows`.
            rows: int64 [S], sorted.
            batch: the step.
        """
        self._sampler.set_slots(batch.new_slots)
        if not len(batch.sample_index):
            return NONE, NONE, None
        slots = torch.tensor(batch.sample_slot, dtype=torch.int64)
        sampled_rows = torch.from_numpy(np.searchsorted(rows, batch.sample_index))
        logits = self._model.logits(hidden[sampled_rows])
        sampled = self._sampler.sample(logits, slots, torch.tensor(batch.output_index))
        if self._pipe.is_first:
            self._newest_token[slots] = sampled.token_ids
        else:
            self._pipe.send_back(sampled.token_ids)
        token_ids = sampled.token_ids.numpy().astype(np.int32)
        return token_ids, sampled.status.numpy(), sampled.logprobs

    def _score_prompts(self, hidden: Tensor, rows: Int64, batch: StepInput) -> Logprobs | None:
        """Log probabilities of prompt tokens, a few rows at a time; arguments as in `_sample`."""
        count = len(batch.prompt_logprob_index)
        if not count:
            return None
        scored_rows = torch.from_numpy(np.searchsorted(rows, batch.prompt_logprob_index))
        parts = []
        for start in range(0, count, PROMPT_LOGPROB_ROWS):
            some = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[scored_rows[some]])
            targets = torch.tensor(batch.prompt_logprob_target[some], dtype=torch.int64)
            parts.append(self._sampler.prompt_logprobs(logits, targets, batch.prompt_logprob_top))
        return Logprobs(
            chosen=np.concatenate([part.chosen for part in parts]),
            rank=np.concatenate([part.rank for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
        )


def _single_request(positions: range, *new_slots: SlotSampling) -> StepInput:
    """A step of one request in slot 0 and block 0 whose tokens are all 0."""
    tokens = len(positions)
    zero = np.zeros(1, np.int32)
    return StepInput(
        step=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=np.array(positions, np.int32),
        query_start=np.array([0, tokens], np.int32),
        context_len=np.array([positions.stop], np.int32),
        block_table=np.zeros((1, 1), np.int32),
        slot=zero,
        sample_index=np.array([tokens - 1], np.int32),
        sample_slot=zero,
        output_index=zero,
        new_slots=new_slots,
    )
