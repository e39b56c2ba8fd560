"""A model of a known shape with random weights on its device, and the steps that it is given."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.kernels.symmetric.memory import Home
from weft.models.interface import SlotSampling, StepInput
from weft.models.spec.families import build_spec
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec, WeightSpec
from weft.models.torch.exchange import Exchange, Plain
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.group import ALONE, Groups
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.runner import TorchRunner

PAGE = 16
STD, STD_OF_CACHE = 0.02, 1.0


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        config: of the model, as in a config.json.
        users: numbers of them.
        context: tokens of each user's request.
        worlds: numbers of ranks of `shard`.
        steps: that are timed together.
        copied: bytes that the copy moves.
    """

    tiny: bool
    device: str
    dtype: str
    config: dict[str, Any]
    users: tuple[int, ...]
    context: int
    worlds: tuple[int, ...]
    steps: int
    copied: int

    @cached_property
    def spec(self) -> ModelSpec:
        """The whole model."""
        return build_spec(self.config, Path("config.json"))

    @property
    def pages(self) -> int:
        """Of a request."""
        return -(-self.context // PAGE)

    def bytes_read(self, layout: Layout, users: int) -> int:
        """By a step of decodes on one rank: weights but for the embedding, and the cache."""
        local = layout.local(self.spec)
        item: int = getattr(torch, self.dtype).itemsize
        weights = local.weight_bytes(self.dtype) - local.embedding.size * item
        return weights + users * self.context * local.kv_bytes_per_token(self.dtype)


class RandomWeights:
    """Stands in for a checkpoint's tensors, the same ones for all ranks; norms are 1."""

    def __init__(self, scale: Scale, layout: Layout) -> None:
        self.layout = layout
        self._spec, self._device = scale.spec, scale.device
        self._dtype: torch.dtype = getattr(torch, scale.dtype)

    def read(self, weight: WeightSpec) -> Tensor:
        """See gpu_layers.WeightSource."""
        parts = self.parts(weight)
        if len(parts) == 1:
            shape = parts[0].stop - parts[0].start
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(weight.name.encode()))
        whole = torch.empty(weight.shape, dtype=self._dtype, device=self._device)
        return whole.normal_(0.0, STD, generator=generator)[parts].clone()

    def read_each(self, weight: WeightSpec) -> Iterator[Tensor]:
        """See gpu_layers.WeightSource; the model has no experts."""
        yield self.read(weight)

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """See gpu_layers.WeightSource."""
        return self.layout.parts(self._spec, weight)


def make_runner(
    scale: Scale,
    home: Home,
    layout: Layout,
    users: int,
    *,
    groups: Groups = ALONE,
    cuda_graphs: bool = True,
) -> tuple[TorchRunner, Exchange]:
    """A runner that is ready for `decodes`, and how its layers exchange. Collective.

    Args:
        groups: the ranks, if the others run, too; else nothing but their buffers is there.
    """
    dtype: torch.dtype = getattr(torch, scale.dtype)
    exchange: Exchange = Plain(ALONE)
    if layout.world_size > 1:
        exchange = Overlapped(home, None, scale.spec, layout, dtype, max_tokens=users)
    with torch.inference_mode():
        model = GpuModel(
            *(scale.spec, RandomWeights(scale, layout), dtype),
            device=home.device,
            exchange=exchange,
            groups=groups,
        )
    local = layout.local(scale.spec)
    runner = TorchRunner(
        model,
        local,
        pipe=ALONE.pipe,
        vocab_size=scale.spec.vocab_size,
        dtype=scale.dtype,
        block_size=PAGE,
        max_num_seqs=users,
        max_tokens=users,
        layout=layout,
        device=home.device,
        max_model_len=scale.context,
        graph_sizes=[users] if cuda_graphs else [],
    )
    runner.allocate_kv_cache(users * scale.pages)
    fill_cache(runner, STD_OF_CACHE)
    return runner, exchange


def fill_cache(runner: TorchRunner, std: float) -> None:
    """As if there had been prompts: random numbers of that deviation."""
    with torch.inference_mode():
        for cache in runner._cache:
            for tensor in cache:
                tensor.normal_(0.0, std)


def decodes(scale: Scale, users: int, number: int) -> StepInput:
    """A step in which each user's last token is decoded, again and again."""
    each = np.arange(users, dtype=np.int32)
    zeros = np.zeros(users, np.int32)
    step = StepInput(
        step=number,
        token_ids=-1 - each if number else zeros,
        positions=zeros + scale.context - 1,
        query_start=np.arange(users + 1, dtype=np.int32),
        context_len=zeros + scale.context,
        block_table=np.arange(users * scale.pages, dtype=np.int32).reshape(users, -1),
        slot=each,
        sample_index=each,
        sample_slot=each,
        output_index=zeros + number,
    )
    if number:
        return step
    return replace(step, new_slots=tuple(SlotSampling(slot=slot) for slot in range(users)))
