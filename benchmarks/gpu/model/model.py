"""A model of a known shape with random weights on its device, and the steps that it is given."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from weft.kernels.packed import PackedMatrix
from weft.kernels.symmetric.memory import Home
from weft.models.interface import SlotSampling, StepInput
from weft.models.memory.plan import Recordings
from weft.models.spec.build import build_spec
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec, WeightSpec
from weft.models.torch.exchange import Exchange, Plain
from weft.models.torch.gpu_model import GpuModel
from weft.models.torch.graphs import MIXED_TOKENS
from weft.models.torch.group import ALONE, Groups
from weft.models.torch.overlapped import Overlapped
from weft.models.torch.runner import DispatchingTorchRunner, TorchRunner

PAGE = 16
STD, STD_OF_CACHE = 0.02, 1.0
GREEDY = SlotSampling(slot=0)


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
        prompt: tokens in a prompt, and new tokens of a request beside decodes.
        models: checkpoints whose tokens are compared with the CPU's.
        chain: tokens of each request that are compared.
        product: rows, columns and depth of the product whose rate is the device's.
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
    prompt: tuple[int, int]
    models: tuple[str, ...]
    chain: int
    product: tuple[int, int, int]

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

    def cache_scale(self, weight: WeightSpec, which: str) -> float:
        """See gpu_layers.WeightSource."""
        return 1.0

    def packed_form(self, weight: WeightSpec) -> None:
        """See gpu_layers.WeightSource; no weight is quantised."""

    def read_packed(self, weight: WeightSpec) -> Iterator[PackedMatrix]:
        """See gpu_layers.WeightSource; never called."""
        raise NotImplementedError

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
    graph_sizes: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> tuple[TorchRunner, Exchange]:
    """A runner that is ready for `decodes`, and how its layers exchange. Collective.

    Args:
        groups: the ranks, if the others run, too; else nothing but their buffers is there.
        graph_sizes: numbers of users with a recorded decode; None means all. If there are any,
            mixed steps are recorded, too.
        max_tokens: in a step; None means one for each user.
    """
    max_tokens = max_tokens or users
    dtype: torch.dtype = getattr(torch, scale.dtype)
    exchange: Exchange = Plain(ALONE)
    if layout.world_size > 1:
        exchange = Overlapped(home, None, scale.spec, layout, dtype, max_tokens=max_tokens)
    with torch.inference_mode():
        model = GpuModel(
            *(scale.spec, RandomWeights(scale, layout), dtype),
            device=home.device,
            exchange=exchange,
            groups=groups,
        )
    local = layout.local(scale.spec)
    decodes = (users,) if graph_sizes is None else tuple(graph_sizes)
    mixed = tuple(size for size in MIXED_TOKENS if size <= max_tokens) if decodes else ()
    runner = DispatchingTorchRunner(
        model,
        local,
        pipe=ALONE.pipe,
        vocab_size=scale.spec.vocab_size,
        dtype=scale.dtype,
        kv_dtype=scale.dtype,
        block_size=PAGE,
        max_num_seqs=users,
        max_tokens=max_tokens,
        layout=layout,
        device=home.device,
        max_model_len=max(scale.context, scale.prompt[0]),
        recordings=Recordings(decodes, mixed),
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


def decodes(scale: Scale, users: int, number: int, settings: SlotSampling = GREEDY) -> StepInput:
    """A step in which each user's last token is decoded, again and again.

    Args:
        settings: every user's; step 0 brings them.
    """
    return mixed_step(scale, [1] * users, [scale.context] * users, number, settings)


def mixed_step(
    scale: Scale,
    queries: Sequence[int],
    contexts: Sequence[int],
    number: int,
    settings: SlotSampling = GREEDY,
) -> StepInput:
    """A step of requests with so many new tokens each, at the end of their contexts."""
    users = len(queries)
    each = np.arange(users, dtype=np.int32)
    start = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    ids = np.zeros(start[-1], np.int32)
    if number:  # a decode follows what was sampled
        ids[[start[i] for i in range(users) if queries[i] == 1]] = -1 - each[np.equal(queries, 1)]
    pages = -(-max(contexts) // PAGE)
    positions = [np.arange(c - q, c) for q, c in zip(queries, contexts, strict=True)]
    step = StepInput(
        step=number,
        token_ids=ids,
        positions=np.concatenate(positions).astype(np.int32),
        query_start=start,
        context_len=np.array(contexts, np.int32),
        block_table=np.arange(users * pages, dtype=np.int32).reshape(users, -1),
        slot=each,
        sample_index=start[1:] - 1,
        sample_slot=each,
        output_index=np.zeros(users, np.int32) + number,
    )
    if number:
        return step
    slots = (dataclasses.replace(settings, slot=slot) for slot in range(users))
    return replace(step, new_slots=tuple(slots))
