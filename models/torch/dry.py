"""A rank's model without memory: its steps launch what the real ones launch.

The model's own code runs, with its exchange and its workspaces, but every tensor is on torch's meta
device, which only computes shapes. Triton's launches must not run: `ahead.compile_ahead` compiles
their kernels, and benchmarks record them (kernels/gpu/runtime).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.gpu.runtime.ahead import Ahead, Progress, compile_ahead
from weft.kernels.gpu.tuning.costs import meta_device
from weft.kernels.packed import PAIRED, PackedForm, PackedMatrix
from weft.kernels.symmetric.absent import AbsentGpu, AbsentHome
from weft.models.checkpoint.packing import form_of
from weft.models.interface import Size, StepInput
from weft.models.memory.plan import NO_RECORDINGS, Recordings
from weft.models.spec.layout import Layout
from weft.models.spec.spec import FP8_CACHE, LayerSpec, ModelSpec, WeightSpec
from weft.models.torch import warm_up
from weft.models.torch.balance import Balancer
from weft.models.torch.exchange import Exchange, Plain
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.gpu_sampler import GpuSampler
from weft.models.torch.graphs import Buffers
from weft.models.torch.group import ALONE, Group, Groups
from weft.models.torch.inputs import StepTensors, put, put_step
from weft.models.torch.logits import Logits
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.rounding import rounded_form

META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a server's steps; see `TorchRunner.load`.

    Attributes:
        num_blocks: blocks in the KV cache.
        kv_dtype: the KV cache's dtype, by its torch name; None is the compute dtype.
        recordings: steps that are recorded as CUDA graphs.
        copies: copies of experts on a rank.
        quantization: of weights that the checkpoint stores without.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    recordings: Recordings = NO_RECORDINGS
    copies: int = 0
    kv_dtype: str | None = None
    quantization: str = "none"


class DryModel:
    """One rank's model on the meta device. Pipeline stages count as one, with all layers.

    Args:
        spec: the whole model.
        layout: the rank's.
        dtype: compute dtype, by its torch name.
        sizes: of the steps.
        gpu: the GPUs.
        overlapped: kernels exchange with other ranks; otherwise torch does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        dtype: str,
        sizes: Sizes,
        gpu: AbsentGpu,
        *,
        overlapped: bool,
    ) -> None:
        layout = replace(layout, rank=layout.rank % layout.stage_size, pp=1)
        compute: torch.dtype = getattr(torch, dtype)
        self._layout, self._sizes, self._gpu = layout, sizes, gpu
        groups = absent_groups(layout)
        with meta_device(gpu.name, gpu.processors):
            exchange: Exchange = Plain(groups)
            if overlapped and layout.world_size > 1:
                home = AbsentHome(layout.rank, layout.world_size, gpu)
                of_context = AbsentHome(layout.context, layout.cp, gpu) if layout.cp > 1 else None
                most = sizes.max_num_batched_tokens
                exchange = Overlapped(
                    *(home, of_context, spec, layout, compute, most), copies=sizes.copies
                )
            weights = NoWeights(spec, layout, sizes.quantization)
            self._model = GpuModel(
                *(spec, weights, compute),
                device=META,
                exchange=exchange,
                groups=groups,
                copies=sizes.copies,
                fp8_cache=sizes.kv_dtype == FP8_CACHE,
            )
            if sizes.copies and isinstance(exchange, Overlapped) and exchange.dispatch is not None:
                Balancer(self._model.experts, exchange.dispatch, groups.expert)
        local = layout.local(spec)
        shape = (sizes.num_blocks, local.num_kv_heads, sizes.block_size, local.head_dim)
        kept: torch.dtype = getattr(torch, sizes.kv_dtype or dtype)
        self._cache = [(meta(shape, kept), meta(shape, kept)) for _ in spec.layers]
        self._sampler = GpuSampler(spec.vocab_size, sizes.max_num_seqs, META)

    def step(self, batch: StepInput) -> None:
        """Launch a step's kernels."""
        cp, rank = self._layout.cp, self._layout.context
        plan = AttentionPlan.build(
            batch.query_start,
            batch.context_len,
            batch.block_table,
            block_size=self._sizes.block_size,
            rank=rank,
            world_size=cp,
        )
        rows = None
        if len(batch.sample_index) < len(batch.token_ids):
            rows = put(META, batch.sample_index)[0].long()
        logits = self.forward(
            put_step(META, batch, plan, self._sizes.max_model_len), rows, batch.group_sizes
        )
        self._sampler.set_slots(batch.new_slots)
        slots, index = torch.from_numpy(batch.sample_slot), torch.from_numpy(batch.output_index)
        with torch.inference_mode():
            self._sampler.sample(logits, slots, index)

    def forward(
        self, step: StepTensors, rows: Tensor | None = None, sizes: Sequence[Size] = ()
    ) -> Logits:
        """Launch the kernels from embedding to logits; see `GpuModel`."""
        model = self._model
        with meta_device(self._gpu.name, self._gpu.processors), torch.inference_mode():
            x = model.embed(step.token_ids)
            return model.logits(model(x, step.positions, self._cache, step.plan, rows, sizes))

    def warm_up(self) -> None:
        """Launch the kernels of `TorchRunner.warm_up` on a GPU."""
        sizes, groups = self._sizes, self._layout.dp_size
        pages = -(-sizes.max_model_len // sizes.block_size)
        buffers = Buffers.make(sizes.recordings, sizes.max_num_seqs, pages, META)
        decodes, mixed = sizes.recordings
        for inputs in (
            *(buffers.decodes(size, sizes.max_model_len) for size in decodes),
            *(buffers.mixed(size, sizes.max_model_len) for size in mixed),
        ):
            tokens = len(inputs.token_ids)
            self.forward(inputs, sizes=(Size(tokens, tokens),) * groups if groups > 1 else ())
        for step in warm_up.steps(
            self._layout,
            block_size=sizes.block_size,
            max_num_seqs=sizes.max_num_seqs,
            max_tokens=min(sizes.max_num_batched_tokens, sizes.max_model_len),
            max_model_len=sizes.max_model_len,
            on_gpu=True,
            recorded=max(decodes, default=0),
        ):
            self.step(step)


def compile_warm_up(
    spec: ModelSpec,
    layouts: Sequence[Layout],
    dtype: str,
    sizes: Sizes,
    gpu: AbsentGpu,
    *,
    overlapped: bool,
    threads: int,
    progress: Progress,
    share: tuple[int, int] = (0, 1),
) -> Ahead:
    """Compile a warm-up's kernels for the active driver's device; see `compile_ahead`.

    Args:
        spec: the whole model.
        layouts: the ranks.
        dtype, sizes, gpu, overlapped: see DryModel.
        threads, progress, share: see `compile_ahead`.
    """
    spec = replace(spec, layers=_first_of_each(spec.layers))

    def launch() -> None:
        for layout in layouts:
            DryModel(spec, layout, dtype, sizes, gpu, overlapped=overlapped).warm_up()

    return compile_ahead(launch, threads=threads, progress=progress, share=share)


def meta(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Make a tensor without memory."""
    return torch.empty(tuple(shape), dtype=dtype, device=META)


def _first_of_each(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the first layers, up to the last new form or new pair of neighbours.

    A layer's first norm adds what the layer before has left to add, so neighbours count.
    """
    seen, end = set(), 0
    before: Any = None
    for number, layer in enumerate(layers, 1):
        form = _form(layer)
        if (before, form) not in seen:
            end = number
        seen.add((before, form))
        before = form
    return tuple(layers[:end])


def _form(value: Any) -> Any:
    """Return what decides a layer's kernels: everything except names."""
    if isinstance(value, WeightSpec):
        return value.shape, value.stored
    if is_dataclass(value):
        return type(value), *(_form(getattr(value, field.name)) for field in fields(value))
    return value


class NoWeights:
    """Stands in for a checkpoint: shapes without contents. See gpu_layers.WeightSource."""

    def __init__(self, spec: ModelSpec, layout: Layout, quantization: str = "none") -> None:
        self.layout, self._spec, self._quantization = layout, spec, quantization

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        return self.layout.parts(self._spec, weight)

    def read(self, weight: WeightSpec) -> Tensor:
        return meta([part.stop - part.start for part in self.parts(weight)])

    def cache_scale(self, weight: WeightSpec, which: str) -> float:
        return 1.0

    def packed_form(self, weight: WeightSpec) -> PackedForm | None:
        if (stored := weight.stored) is None:
            return rounded_form(self._quantization, self.parts(weight))
        rows, columns = self.parts(weight)[-2:]
        shape = weight.shape[-2], weight.shape[-1]
        if (form := form_of(stored, shape, rows, columns)) is None or not weight.head_order:
            return form
        kind, block, has_zeros = form
        return kind, (1, block[1]), has_zeros  # the rows are sorted

    def read_packed(self, weight: WeightSpec) -> Iterator[PackedMatrix]:
        form = self.packed_form(weight)
        assert form is not None
        *experts, rows, columns = (part.stop - part.start for part in self.parts(weight))
        kind, block, has_zeros = form
        grid = [-(-n // (size or n)) for n, size in zip((rows, columns), block, strict=True)]
        codes = meta([rows, columns // 2 if kind in PAIRED else columns], torch.uint8)
        zeros = meta(grid, torch.int8) if has_zeros else None
        for _ in range(experts[0] if experts else 1):
            yield PackedMatrix(kind, codes, meta(grid, torch.float32), zeros, block)

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        experts, *rest = self.parts(weight)
        for _ in range(experts.start, experts.stop):
            yield meta([part.stop - part.start for part in rest])


class _Shapes(Group):
    """A group whose other ranks are not here: its results have the right shapes."""

    def __init__(self, size: int, index: int) -> None:
        super().__init__(range(size), index, None)

    def gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return x.new_empty(sum(rows), x.shape[1])

    def scatter_sum(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        return x.new_empty(rows[self.index], x.shape[1], dtype=torch.float32)


def absent_groups(layout: Layout) -> Groups:
    """Return a rank's groups without the other ranks: only the shapes of results are right."""
    if layout.world_size == 1:
        return ALONE
    return Groups(
        tensor=_Shapes(layout.dense_size, layout.rank % layout.dense_size),
        data=_Shapes(layout.dp_size, layout.dp_group),
        expert=_Shapes(layout.world_size, layout.rank),
        context=_Shapes(layout.cp, layout.context),
        pipe=ALONE.pipe,
    )
