"""Runs a model, or one rank's part of it, on a CPU or a GPU: see models/interface.ModelRunner.

A step resolves token ids that only the device knows, plans attention, runs the layers, samples, and
stores the sampled tokens. State between steps is the KV cache, the sampler's slots, and each slot's
newest token. All ranks in a data-parallel attention group run the same steps and sample the same
tokens. With pipeline stages, the first one embeds, the last one samples, and hidden states pass
between neighbours.

On a GPU, `dispatch` begins a step without waiting for the device, and returns a function that waits
for its result. The host can therefore prepare the next step meanwhile. Pipeline stages exchange
tokens through their hosts, so they run one step after the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.symmetric.memory import Home
from weft.models.checkpoint.weights import Progress, Weights
from weft.models.interface import (
    NO_VECTORS,
    Int32,
    Logprobs,
    Size,
    StepInput,
    StepOutput,
)
from weft.models.memory.plan import NO_RECORDINGS, Recordings
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.spec import FP8_CACHE, ModelSpec
from weft.models.torch import warm_up
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.cpu_model import CpuModel
from weft.models.torch.group import ALONE, Groups
from weft.models.torch.logits import Logits
from weft.models.torch.pipe import Pipe
from weft.models.torch.results import Results
from weft.models.torch.sampler import Masks, Sampler, Scores, score

if TYPE_CHECKING:
    from weft.kernels.gpu.runtime.compilations import Compilations
    from weft.models.torch.balance import Balancer
    from weft.models.torch.exchange import Exchange
    from weft.models.torch.gpu_layers import WeightSource
    from weft.models.torch.gpu_model import GpuModel
    from weft.models.torch.graphs import Forward, Graphs
    from weft.models.torch.inputs import StepTensors

Int64 = npt.NDArray[np.int64]

CPU = torch.device("cpu")

PROMPT_LOGPROB_ROWS = 64
"""Rows of logits in memory at once when a prompt is scored."""


class TorchRunner:
    """One model on its device; made by `load`. A ModelRunner."""

    def __init__(
        self,
        model: CpuModel | GpuModel,
        spec: ModelSpec,
        *,
        pipe: Pipe,
        vocab_size: int,
        dtype: str,
        kv_dtype: str,
        block_size: int,
        max_num_seqs: int,
        max_tokens: int,
        layout: Layout,
        device: torch.device = CPU,
        max_model_len: int = 0,
        recordings: Recordings = NO_RECORDINGS,
        balancer: Balancer | None = None,
    ) -> None:
        """Make a runner; call `load` instead.

        Args:
            model: this rank's layers.
            spec: this rank's part of the model.
            pipe: the connection to other stages.
            vocab_size: the whole vocabulary's size.
            dtype: compute dtype.
            kv_dtype: the KV cache's dtype.
            block_size: tokens in a KV cache block.
            max_num_seqs: number of slots.
            max_tokens: maximum number of tokens in a warm-up step.
            layout: this rank's layout.
            device: the model's device.
            max_model_len: maximum number of tokens in a request, for steps on a GPU.
            recordings: steps to record as CUDA graphs.
            balancer: moves experts between ranks; None if they stay.
        """
        self._balancer = balancer
        self._layout = layout
        self._model = model
        self._spec = spec
        self._pipe = pipe
        self._dtype = dtype
        self._kv_dtype = kv_dtype
        self._block_size = block_size
        self._max_tokens = max_tokens
        self._max_model_len = max_model_len
        self._cache: list[LayerCache] = []
        self._device = device
        if isinstance(model, CpuModel):
            self._sampler = Sampler(vocab_size, max_num_seqs, device)
        else:
            from weft.models.torch.gpu_sampler import GpuSampler  # imports triton

            self._sampler = GpuSampler(vocab_size, max_num_seqs, device)
        self._free_at = 0.0
        self._newest_token = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._compilations: Compilations | None = None
        self._recordings = recordings
        self._graphs: Graphs | None = None
        if any(recordings):
            from weft.models.torch.graphs import Graphs  # imports triton

            self._graphs = Graphs(
                self._forward,
                device,
                sizes=recordings,
                max_num_seqs=max_num_seqs,
                block_size=block_size,
                max_model_len=max_model_len,
                dp_size=layout.dp_size,
                log=layout.rank == 0,
            )

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        *,
        dtype: str,
        kv_dtype: str | None = None,
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
        cuda_graphs: bool = True,
        redundant_experts: int = 0,
    ) -> TorchRunner:
        """Read and pack this rank's weights from the checkpoint in `path`.

        Args:
            path: the checkpoint's directory or GGUF file.
            spec: the checkpoint's model, from `checkpoint.locate.read_spec`.
            dtype: dtype for computing: "auto", "bfloat16", "float32".
            kv_dtype: the KV cache's dtype; None is `dtype`. `FP8_CACHE` needs Triton kernels.
            block_size: tokens in a KV cache block, on each rank that shares it.
            max_num_seqs: number of slots.
            max_num_batched_tokens: maximum number of tokens in a step.
            max_model_len: maximum number of tokens in a request.
            quantization: of the matrices; see cpu_model.CpuModel.
            compress_weights: keep bfloat16 matrices in 12 bits a number, without loss, if kernels
                support it.
            threads: torch's threads in this process; None leaves them as they are.
            progress: called with the bytes read so far.
            layout: this rank's layout.
            groups: the other ranks.
            home: selects Triton kernels, on its device. If it spans the stage's ranks (several),
                the kernels are overlapped. If it has only this rank, ranks exchange through
                `groups`. None selects CPU kernels.
            context_home: spans the ranks that share KV heads with this one, for overlapped kernels.
            cuda_graphs: with Triton kernels, record small steps and replay them.
            redundant_experts: slots for experts on all ranks together, beyond one for each expert;
                needs overlapped kernels and data-parallel attention on each rank alone.

        Raises:
            ModelError: the checkpoint does not match `spec`.
        """
        recorded = NO_RECORDINGS
        balancer: Balancer | None = None
        copies = redundant_experts // layout.ep
        if threads is not None:
            torch.set_num_threads(threads)
        dtype = spec.compute_dtype(dtype)
        weights = Weights(path, spec, progress, layout)
        with torch.inference_mode(), weights.read_ahead():
            compute: torch.dtype = getattr(torch, dtype)
            max_tokens = max_num_batched_tokens
            model: CpuModel | GpuModel
            if home is not None:
                from weft.models.torch.gpu_model import GpuModel  # imports triton
                from weft.models.torch.graphs import recordings
                from weft.models.torch.rounding import Rounded

                source: WeightSource = weights
                if quantization != "none":
                    source = Rounded(weights, quantization, compute)
                if cuda_graphs:
                    recorded = recordings(
                        layout, max_num_seqs, max_tokens, overlapped=home.world_size > 1
                    )
                exchange = _make_exchange(
                    home, context_home, spec, layout, compute, max_tokens, groups, copies
                )
                model = GpuModel(
                    *(spec, source, compute),
                    device=home.device,
                    exchange=exchange,
                    groups=groups,
                    copies=copies,
                    fp8_cache=kv_dtype == FP8_CACHE,
                )
                if copies and model.experts:
                    balancer = _make_balancer(model, groups)
            else:
                model = CpuModel(
                    spec,
                    weights,
                    compute,
                    quantization=quantization,
                    compress=compress_weights,
                    groups=groups,
                )
        dispatches = home is not None and layout.pp == 1
        return (DispatchingTorchRunner if dispatches else cls)(
            model,
            layout.local(spec),
            pipe=groups.pipe,
            vocab_size=spec.vocab_size,
            dtype=dtype,
            kv_dtype=kv_dtype or dtype,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_tokens=min(max_num_batched_tokens, max_model_len),
            layout=layout,
            device=CPU if home is None else home.device,
            max_model_len=max_model_len,
            recordings=recorded,
            balancer=balancer,
        )

    @property
    def bytes_per_block(self) -> int:
        """This rank's bytes per KV cache block, over its layers."""
        return self._block_size * self._spec.kv_bytes_per_token(self._kv_dtype)

    @property
    def quantized_lines(self) -> list[str]:
        """Say what became of the checkpoint's quantised weights, on CPUs."""
        return self._model.quantized.lines if isinstance(self._model, CpuModel) else []

    @property
    def saved_bytes(self) -> int:
        """This rank's weight bytes without memory; see `CpuModel`."""
        return self._model.saved_bytes if isinstance(self._model, CpuModel) else 0

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Allocate keys and values: [num_blocks, kv_heads, block_size, head_dim] for each layer."""
        shape = (num_blocks, self._spec.num_kv_heads, self._block_size, self._spec.head_dim)
        dtype: torch.dtype = getattr(torch, self._kv_dtype)
        new_cache = partial(torch.empty, shape, dtype=dtype, device=self._device)
        self._cache = [(new_cache(), new_cache()) for _ in self._spec.layers]

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a short prompt and two decodes in block 0, before any request owns that block.

        On a GPU, also record the CUDA graphs, and run the steps in warm_up.py, so that no kernel is
        compiled later.
        """
        if self._graphs is not None:
            self._graphs.record()
        # Also steps that are replayed: others that are not share kernels with them.
        graphs, self._graphs = self._graphs, None
        on_gpu = self._device.type == "cuda"
        for step in warm_up.steps(
            self._layout,
            block_size=self._block_size,
            max_num_seqs=len(self._newest_token),
            max_tokens=self._max_tokens,
            max_model_len=self._max_model_len,
            on_gpu=on_gpu,
            recorded=max(self._recordings.decodes, default=0),
        ):
            self.step(step)
        self._graphs = graphs
        if on_gpu:
            from weft.kernels.gpu.runtime.compilations import Compilations  # imports triton

            self._compilations = Compilations()
        if self._balancer is not None:
            self._balancer.restart()

    def step(self, batch: StepInput) -> StepOutput:
        """See `ModelRunner.step`."""
        return self._begin(batch)()

    @torch.inference_mode()
    def _begin(self, batch: StepInput) -> Callable[[], StepOutput]:
        """Run a step, or launch it on a GPU; return a function that waits for its result."""
        began = self._clock()
        results = Results(self._device)
        if self._balancer is not None:
            self._balancer.step()
        output = self._launch(batch, results)
        faults = []
        if not isinstance(self._model, CpuModel):
            faults = [results.fetch(fault) for fault in self._model.exchange.faults()]
        results.end()
        compilations = 0 if self._compilations is None else self._compilations.take()
        rows = (0.0, 0.0)
        if self._balancer is not None and len(batch.token_ids):  # only such steps are reported
            rows = self._balancer.take()

        def finish() -> StepOutput:
            results.wait()
            if not isinstance(self._model, CpuModel):
                # If a wait for another rank timed out, all results after it are garbage.
                self._model.exchange.check([fault.tolist() for fault in faults])
            result = output()
            # The device began this step when it had done the one before.
            ended = self._clock()
            seconds, self._free_at = ended - max(began, self._free_at), ended
            return replace(
                result,
                step=batch.step,
                seconds=seconds,
                compilations=compilations,
                expert_rows=rows,
            )

        return finish

    def _launch(self, batch: StepInput, results: Results) -> Callable[[], StepOutput]:
        """Run a step, or launch it; return a function that reads what `results` has fetched."""
        if not len(batch.token_ids):
            self._model.run_empty(batch.group_sizes)
            return lambda: StepOutput(batch.step)
        plan = AttentionPlan.build(
            batch.query_start,
            batch.context_len,
            batch.block_table,
            block_size=self._block_size,
            rank=self._layout.context,
            world_size=self._layout.cp,
        )
        # Sorted, so that searchsorted can find a row.
        needed_rows = (batch.sample_index, batch.prompt_logprob_index, batch.pool_index)
        rows = np.unique(np.concatenate(needed_rows)).astype(np.int64)
        replayed = None if self._graphs is None else self._graphs.replay(batch, plan)
        if replayed is not None:
            hidden, rows = replayed.hidden, np.arange(len(batch.token_ids))
        else:
            hidden = self._run(batch, plan, rows)
        if not self._pipe.is_last:
            self._pipe.send(hidden)
            return lambda: StepOutput(batch.step)
        logits = None if replayed is None else replayed.logits
        sampled = self._sample(hidden, rows, batch, logits, results)
        scores = [part.each(results.fetch) for part in self._score_prompts(hidden, rows, batch)]
        sums = self._pool(hidden, rows, batch)
        pooled = None if sums is None else results.fetch(sums)

        def read() -> StepOutput:
            output = StepOutput(batch.step) if sampled is None else self._read_tokens(*sampled)
            return replace(
                output,
                prompt_logprobs=_joined([part.on_host() for part in scores]),
                pooled=NO_VECTORS if pooled is None else pooled.numpy(),
            )

        return read

    def _clock(self) -> float:
        """Read a clock in seconds that stops while this rank waits for other stages."""
        return time.perf_counter() - self._pipe.waited

    def close(self) -> None:
        """Release the weights and the cache; no step can follow."""
        if self._compilations is not None:
            self._compilations.close()
        self._pipe.close()
        self._cache.clear()
        self._graphs = None
        del self._model

    def _run(self, batch: StepInput, plan: AttentionPlan, rows: Int64) -> Tensor:
        """Run the layers; return [S, hidden] for `rows` in the last stage, else for all tokens."""
        selected = None
        if self._pipe.is_last and len(rows) < len(batch.token_ids):
            selected = self._indices(rows)
        if isinstance(self._model, CpuModel):
            x = self._first_input(torch.tensor(batch.token_ids), batch)
            positions = torch.tensor(batch.positions)
            return self._model(x, positions, self._cache, plan, selected, batch.group_sizes)
        from weft.models.torch.inputs import put_step

        step = put_step(self._device, batch, plan, self._max_model_len)
        x = self._first_input(step.token_ids, batch)
        return self._model(x, step.positions, self._cache, step.plan, selected, batch.group_sizes)

    def _forward(self, step: StepTensors) -> Forward:
        """Run the whole model, for a recording; decodes also get logits."""
        from weft.models.torch.graphs import Forward

        assert not isinstance(self._model, CpuModel)
        x = self._model.embed(self._resolve_ids(step.token_ids))
        groups = self._layout.dp_size
        sizes = (Size(len(x), len(x)),) * groups if groups > 1 else ()
        hidden = self._model(x, step.positions, self._cache, step.plan, None, sizes)
        decodes = step.plan.batch.max_queries == 1
        return Forward(hidden, self._model.logits(hidden) if decodes else None)

    def _first_input(self, token_ids: Tensor, batch: StepInput) -> Tensor:
        """Return the first layer's input here, [T, hidden]."""
        if not self._pipe.is_first:
            dtype: torch.dtype = getattr(torch, self._dtype)
            return self._pipe.receive(len(batch.token_ids), self._spec.hidden_size, dtype)
        if not self._pipe.is_last:
            named = torch.tensor(batch.token_ids, dtype=torch.int64)
            for slots, tokens in self._pipe.receive_tokens(-1 - named[named < 0]):
                on_device = self._indices(slots.numpy()), self._indices(tokens.numpy())
                self._newest_token[on_device[0]] = on_device[1]
        x = self._model.embed(self._resolve_ids(token_ids))
        if not self._pipe.is_last:
            self._pipe.expect_tokens(torch.tensor(batch.sample_slot, dtype=torch.int64))
        return x

    def _resolve_ids(self, token_ids: Tensor) -> Tensor:
        """Replace negative ids by their slots' newest tokens."""
        ids = token_ids.long()
        return torch.where(ids < 0, self._newest_token[(-1 - ids).clamp_(min=0)], ids)

    def _indices(self, array: Int32 | Int64) -> Tensor:
        """Copy indices to the device, as int64."""
        if self._device.type == "cpu":
            return torch.tensor(array, dtype=torch.int64)
        from weft.models.torch.inputs import put

        return put(self._device, array)[0].long()

    def _sample(
        self,
        hidden: Tensor,
        rows: Int64,
        batch: StepInput,
        logits: Logits | None,
        results: Results,
    ) -> tuple[Tensor, Tensor, Scores | None] | None:
        """Choose the next token for each sampled row, and store it as its slot's newest.

        Args:
            hidden: [S, hidden], for the tokens `rows`.
            rows: int64 [S], sorted.
            batch: the step.
            logits: [S, vocab_size], if already computed.
            results: fetches what is returned: tokens, status and log probabilities.
        """
        self._sampler.set_slots(batch.new_slots)
        if not len(batch.sample_index):
            return None
        slots = torch.tensor(batch.sample_slot, dtype=torch.int64)
        positions = np.searchsorted(rows, batch.sample_index)
        index: Tensor | slice = slice(None)
        if len(positions) < len(rows) or (np.diff(positions) < 0).any():
            index = self._indices(positions)
        logits = self._model.logits(hidden[index]) if logits is None else logits.select(index)
        sampled = self._sampler.sample(
            logits, slots, torch.tensor(batch.output_index), self._masks(batch)
        )
        if self._pipe.is_first:
            self._newest_token[self._indices(batch.sample_slot)] = sampled.token_ids
        logprobs = None if sampled.logprobs is None else sampled.logprobs.each(results.fetch)
        return results.fetch(sampled.token_ids), results.fetch(sampled.status), logprobs

    def _read_tokens(
        self, token_ids: Tensor, status: Tensor, logprobs: Scores | None
    ) -> StepOutput:
        """Read what `_sample` fetched."""
        if not self._pipe.is_first:
            self._pipe.send_back(token_ids)
        return StepOutput(
            0,
            token_ids.numpy().astype(np.int32),
            status.numpy(),
            None if logprobs is None else logprobs.on_host(),
        )

    def _masks(self, batch: StepInput) -> Masks | None:
        """Copy the grammar masks to the device, if any row has one."""
        if not len(batch.masked):
            return None
        if self._device.type == "cpu":
            bits = torch.tensor(batch.token_mask)
        else:
            from weft.models.torch.inputs import put

            bits = put(self._device, batch.token_mask)[0]
        return Masks(batch.masked.tolist(), bits)

    def _score_prompts(self, hidden: Tensor, rows: Int64, batch: StepInput) -> list[Scores]:
        """Score prompt tokens, a few rows at a time; arguments as in `_sample`."""
        count = len(batch.prompt_logprob_index)
        if not count:
            return []
        scored_rows = self._indices(np.searchsorted(rows, batch.prompt_logprob_index))
        targets = self._indices(batch.prompt_logprob_target)
        parts = []
        for start in range(0, count, PROMPT_LOGPROB_ROWS):
            chunk = slice(start, start + PROMPT_LOGPROB_ROWS)
            logits = self._model.logits(hidden[scored_rows[chunk]])
            parts.append(score(logits, targets[chunk], batch.prompt_logprob_top))
        return parts

    def _pool(self, hidden: Tensor, rows: Int64, batch: StepInput) -> Tensor | None:
        """Sum hidden states, float32 [E, hidden]; arguments as in `_sample`."""
        if not len(batch.pool_count):
            return None
        index = self._indices(np.searchsorted(rows, batch.pool_index))
        states = self._model.final_norm(hidden[index]).float()
        # Sum each request separately, so that non-finite numbers stay in their own sum.
        sums = [own.sum(0) for own in states.split_with_sizes(batch.pool_count.tolist())]
        return torch.stack(sums)


class DispatchingTorchRunner(TorchRunner):
    """A TorchRunner on a GPU, without other pipeline stages. A DispatchingRunner."""

    def dispatch(self, batch: StepInput) -> Callable[[], StepOutput]:
        """See `DispatchingRunner.dispatch`."""
        return self._begin(batch)


def _joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    """Concatenate the log probabilities of several chunks; None if there are none."""
    if not parts:
        return None
    return Logprobs(
        chosen=np.concatenate([part.chosen for part in parts]),
        rank=np.concatenate([part.rank for part in parts]),
        top_ids=np.concatenate([part.top_ids for part in parts]),
        top=np.concatenate([part.top for part in parts]),
    )


def _make_exchange(
    home: Home,
    context_home: Home | None,
    spec: ModelSpec,
    layout: Layout,
    dtype: torch.dtype,
    max_tokens: int,
    groups: Groups,
    copies: int,
) -> Exchange:
    """Choose overlapped kernels if the home spans several ranks."""
    if home.world_size == 1:
        from weft.models.torch.exchange import Plain

        return Plain(groups)
    from weft.models.torch.overlapped import Overlapped

    count = groups.expert.count
    return Overlapped(home, context_home, spec, layout, dtype, max_tokens, count, copies)


def _make_balancer(model: GpuModel, groups: Groups) -> Balancer:
    from weft.models.torch.balance import Balancer
    from weft.models.torch.overlapped import Overlapped

    assert isinstance(model.exchange, Overlapped), "the settings were checked"
    assert model.exchange.dispatch is not None
    return Balancer(model.experts, model.exchange.dispatch, groups.expert)
