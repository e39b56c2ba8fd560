"""Exchanges hidden inside the products (kernels/gpu). See exchange.Exchange.

    few tokens (decode): all on all ranks              many (prefill): some on each rank

     x [T, hidden]                                      x [T / W, hidden]
     norm                                               norm
     torch's product     qkv: own heads, all tokens     all_gather_matmul
     rotate_into_cache                                  rotate_into_cache
     paged_attention     own heads                      paged_attention
     matmul_all_reduce   o, + x                         matmul_reduce_scatter
     norm                                               norm
     torch's product     silu(gate) * up: own width     all_gather_matmul
     matmul_all_reduce   down, + x                      matmul_reduce_scatter

Between few and many, all tokens are on all ranks, too. But matmul_all_reduce would send each sum to
each rank. So torch's product is followed by an all_reduce, and the next norm adds x.

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, for sharding tokens between
products.) With experts, each rank runs its part for all tokens: its own experts, or its own width:

     few tokens                                         many
     route, sort_by_expert                              route, make_plan: own tokens
     grouped_matmul      silu(gate) * up                all_gather_grouped_matmul
     grouped_matmul      down                           grouped_matmul_reduce_scatter: down, + x
     all_reduce          + x

A shared MLP beside the experts runs first in a step with many tokens, as a dense one. Its result is
the x of the experts. With few tokens, each rank adds its part to that of its experts, so one
all_reduce serves both.

Norms over the heads of all ranks take the squares of all heads: mean_squares, and an all_reduce of
two numbers for each token, before rotate_into_cache.

If ranks share KV heads by position (context parallel), each rank attends with all their heads, over
its own pages:

     decodes                                            all other steps
     all_gather          q                              all_gather          q
     distributed_decode_attention                       paged_attention     own pages; with LSE
                                                        all_gather          LSE
                                                        reduce_scatter      parts, weighted by LSE

With data-parallel attention, each rank has all attention weights and its own tokens
(models/spec/layout.py). The tokens go to the ranks with their experts:

    route; moe_dispatch     tokens out
    grouped_matmul          silu(gate) * up, then down: own experts, for the received tokens
    moe_combine             outputs back; + x, and the shared MLP for own tokens

Between ranks without addresses for each other, on several nodes, moe_dispatch_two_level and
moe_combine_two_level do the same. A token then crosses to each node once.

balance.py moves experts between the ranks.

Larger steps are dispatched in chunks of DISPATCH_TOKENS. All ranks know each rank's number of
tokens, so they make the same calls.

The tuning file or the kernels' cost model says how many tokens are few or many (`token_limits`).

Not handled: experts on more ranks than attention, unless each rank has all attention weights;
products and collectives between nodes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.kernels.gpu.attention.distributed_decode import (
    DistributedDecodeWorkspace,
    distributed_decode_attention,
    distributed_decode_attention_workspace,
)
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.collectives.all_gather import (
    AllGatherWorkspace,
    all_gather,
    all_gather_workspace,
)
from weft.kernels.gpu.collectives.all_reduce import (
    AllReduceWorkspace,
    all_reduce,
    all_reduce_workspace,
)
from weft.kernels.gpu.collectives.reduce_scatter import (
    reduce_scatter,
    reduce_scatter_workspace,
)
from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    GatherGroupsWorkspace,
    all_gather_grouped_matmul_workspace,
)
from weft.kernels.gpu.experts.dispatch import moe_workspace
from weft.kernels.gpu.experts.dispatch_two_level import moe_two_level_workspace
from weft.kernels.gpu.experts.grouped_matmul_reduce_scatter import (
    ReduceGroupsWorkspace,
    grouped_matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.experts.placement import doubled, even
from weft.kernels.gpu.matmul.all_gather_matmul import (
    GatherWorkspace,
    all_gather_matmul,
    all_gather_matmul_workspace,
)
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    ReduceWorkspace,
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.rowwise.norm import mean_squares
from weft.kernels.gpu.runtime.workspace import Workspace, counted_together
from weft.kernels.gpu.tuning.costs import device_named
from weft.kernels.gpu.tuning.crossover import measured_ways
from weft.kernels.gpu.tuning.products import EXCHANGES
from weft.kernels.gpu.tuning.search import from_first_rank
from weft.kernels.symmetric.memory import Home
from weft.models.plan import switches
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec, MoeSpec
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.crossover import predicted_limits, products_of
from weft.models.torch.exchange import AttentionForm, Stream, attend, multiply
from weft.models.torch.gpu_layers import DispatchWorkspace, Experts, Linear, SharedMlp

logger = logging.getLogger(__name__)

DISPATCH_TOKENS = 256
"""Maximum number of a rank's tokens that are dispatched to their experts at once."""

Count = Callable[[], None]
"""Called at each exchange with the other ranks."""


class Limits(NamedTuple):
    """The numbers of tokens where another way to exchange them begins.

    Attributes:
        fused: up to so many, products send their sums to all ranks.
        replicated: up to so many, all ranks have all tokens. An all-reduce follows products with
            more than `fused` tokens.
    """

    fused: int
    replicated: int


@dataclass(frozen=True, slots=True)
class _Workspaces:
    """The ops' workspaces, each named after its op; all layers share them in turn."""

    all_gather_matmul: GatherWorkspace
    matmul_reduce_scatter: ReduceWorkspace
    matmul_all_reduce: ReduceWorkspace
    all_gather: AllGatherWorkspace
    all_reduce: AllReduceWorkspace
    all_gather_grouped_matmul: GatherGroupsWorkspace | None
    grouped_matmul_reduce_scatter: ReduceGroupsWorkspace | None
    mean_squares: AllReduceWorkspace | None

    @classmethod
    def make(
        cls, home: Home, max_tokens: int, limits: Limits, spec: ModelSpec, dtype: torch.dtype
    ) -> _Workspaces:
        """Make workspaces for up to `max_tokens`. Collective."""
        hidden, moe = spec.hidden_size, _experts_of(spec)
        rows = -(-max_tokens // home.world_size)
        fused, replicated = (min(max_tokens, limit) for limit in limits)
        methods = (*EXCHANGES["all_reduce"], *(("multimem",) if home.has_multicast else ()))
        gather = reduce = None
        if moe is not None and max_tokens > limits.replicated:
            each = (rows, hidden, moe.router.weight.shape[0], moe.router.top_k, dtype)
            gather = all_gather_grouped_matmul_workspace(home, *each)
            reduce = grouped_matmul_reduce_scatter_workspace(home, *each)
        squares = None
        if any(layer.attention.norms_span_heads for layer in spec.layers):
            squares = all_reduce_workspace(
                home, 2 * max_tokens, torch.float32, EXCHANGES["all_reduce"]
            )
        return cls(
            all_gather_matmul_workspace(home, rows, hidden, dtype),
            matmul_reduce_scatter_workspace(home, rows, hidden, dtype),
            matmul_all_reduce_workspace(home, fused, hidden, dtype),
            all_gather_workspace(home, rows * hidden, dtype),
            all_reduce_workspace(home, replicated * hidden, dtype, methods),
            gather,
            reduce,
            squares,
        )

    def __iter__(self) -> Iterator[Workspace]:
        yield from (
            self.all_gather_matmul,
            self.matmul_reduce_scatter,
            self.matmul_all_reduce,
            self.all_gather,
            self.all_reduce,
        )
        if self.all_gather_grouped_matmul and self.grouped_matmul_reduce_scatter:
            yield from (self.all_gather_grouped_matmul, self.grouped_matmul_reduce_scatter)
        if self.mean_squares:
            yield self.mean_squares


class _ContextParallelAttention:
    """Attention for ranks that share KV heads by position: this rank's heads, over all pages.

    Partial results are merged as in distributed_decode_attention, with weights exp(LSE - LSE over
    all ranks). All layers share one such object in turn.

    Args:
        home: symmetric memory of these ranks.
        model: this rank's part of the model.
        max_tokens: maximum number of tokens in a step.
        dtype: dtype of queries and results.
        few: maximum number of decode tokens exchanged inside the attention kernel.
        count: called at each exchange.
    """

    def __init__(
        self,
        home: Home,
        model: ModelSpec,
        max_tokens: int,
        dtype: torch.dtype,
        few: int,
        count: Count,
    ) -> None:
        self._home = home
        self._count = count
        heads, dim = model.num_heads * home.world_size, model.head_dim
        own = max_tokens * model.num_heads * dim
        few = min(max_tokens, few)
        self._gather = all_gather_workspace(home, own, dtype)
        self._gather_lse = all_gather_workspace(home, max_tokens * heads, torch.float32)
        self._scatter = reduce_scatter_workspace(home, own, dtype)
        self._decode: DistributedDecodeWorkspace = distributed_decode_attention_workspace(
            home, few, heads, dim, dtype
        )

    def __call__(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, form: AttentionForm
    ) -> Tensor:
        """[T, H, D] to the same shape."""
        tokens, heads, dim = q.shape
        size, rank = self._home.world_size, self._home.rank
        self._count()
        all_q = all_gather(q.view(tokens, -1), self._gather).view(size, tokens, heads * dim)
        all_q = all_q.transpose(0, 1).contiguous().view(tokens, size * heads, dim)
        self._count()
        if batch.max_queries == 1 and tokens <= self._decode.max_requests:
            out = distributed_decode_attention(all_q, *cache, batch, self._decode, **form.options)
            return out[:, rank * heads :][:, :heads].contiguous()
        lse = torch.empty(tokens, size * heads, device=q.device)
        out = paged_attention(
            *(all_q, *cache, batch),
            **form.options,
            lse=lse,
            rank=rank,
            world_size=size,
        )
        total_lse = all_gather(lse, self._gather_lse).view(size, tokens, -1).logsumexp(0)
        self._count()
        parts = (out * (lse - total_lse).exp()[..., None]).to(out.dtype).view(tokens, size, -1)
        parts = parts.transpose(0, 1).contiguous().view(size * tokens, heads * dim)
        return reduce_scatter(parts, self._scatter).view(tokens, heads, dim)

    def __iter__(self) -> Iterator[Workspace]:
        yield from (self._gather, self._gather_lse, self._scatter, self._decode)


class Overlapped:
    """Exchanges between a stage's ranks. All ranks construct it together.

    Args:
        home: symmetric memory of the ranks.
        context_home: symmetric memory of the ranks that share KV heads with this one, if any.
        spec: the whole model.
        layout: this rank's layout; must satisfy `can_overlap`.
        dtype: compute dtype.
        max_tokens: maximum number of tokens in a step.
        count: called at each exchange.
        copies: slots for experts on each rank beyond one for each of its own.

    Attributes:
        workspaces: the workspaces of all ops.
        dispatch: that of moe_dispatch, with data-parallel attention.

    Raises:
        TuningError: rank 0's tuning file is damaged.
    """

    def __init__(
        self,
        home: Home,
        context_home: Home | None,
        spec: ModelSpec,
        layout: Layout,
        dtype: torch.dtype,
        max_tokens: int,
        count: Count = lambda: None,
        copies: int = 0,
    ) -> None:
        assert layout.can_overlap, layout
        self._home, self._count = home, count
        self._workspaces: _Workspaces | None = None
        self.dispatch: DispatchWorkspace | None = None
        self._context_attention: _ContextParallelAttention | None = None
        local = layout.local(spec)
        self._limits = limits = token_limits(home, local, dtype, max_tokens)
        if layout.dp_size > 1:
            self.dispatch = _dispatch_workspace(home, spec, max_tokens, dtype, copies)
        else:
            self._workspaces = _Workspaces.make(home, max_tokens, limits, spec, dtype)
        if context_home is not None:
            self._context_attention = _ContextParallelAttention(
                context_home, local, max_tokens, dtype, limits.replicated, count
            )
        parts = (
            self._workspaces or (),
            self._context_attention or (),
            [self.dispatch] if self.dispatch else (),
        )
        self.workspaces: list[Workspace] = [workspace for part in parts for workspace in part]

    def step(self) -> AbstractContextManager[None]:
        """See Exchange."""
        return counted_together(self.workspaces)

    def is_sharded(self, tokens: int) -> bool:
        """See Exchange: true for many tokens."""
        return self._workspaces is not None and tokens > self._limits.replicated

    def shard(self, x: Tensor) -> Tensor:
        """See Exchange."""
        size, rank = self._home.world_size, self._home.rank
        each = -(-len(x) // size)
        x = _with_rows(x, each * size)
        return x[rank * each :][:each].contiguous()

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """See Exchange."""
        assert self._workspaces is not None
        self._count()
        return all_gather(x, self._workspaces.all_gather)[:tokens]

    def column_parallel(
        self, x: Tensor, linear: Linear, *, silu_multiply: bool, sharded: bool
    ) -> Tensor:
        """See Exchange."""
        if not sharded or self._workspaces is None:
            return multiply(x, linear, silu_multiply=silu_multiply)
        self._count()
        epilogue = Epilogue(bias=linear.bias, silu_multiply=silu_multiply)
        return all_gather_matmul(
            x, linear.dense(), self._workspaces.all_gather_matmul, epilogue=epilogue
        )

    def row_parallel(
        self, x: Tensor, linear: Linear, residual: Tensor | None, *, sharded: bool
    ) -> Stream:
        """See Exchange."""
        if self._workspaces is None:  # each rank has the whole product
            return Stream.of(residual, linear(x))
        self._count()
        if not sharded and (linear.is_packed or len(x) > self._limits.fused):
            own = linear(x, biased=self._home.rank == 0)
            return Stream.of(residual, all_reduce(own, self._workspaces.all_reduce))
        epilogue = Epilogue(bias=linear.bias, residual=residual)
        (weight,) = linear.dense()
        if not sharded:
            of_all = self._workspaces.matmul_all_reduce
            return Stream(matmul_all_reduce(x, weight, of_all, epilogue=epilogue))
        scattered = self._workspaces.matmul_reduce_scatter
        size = scattered.world_size
        x = _with_rows(x, -(-len(x) // size) * size)
        return Stream(matmul_reduce_scatter(x, weight, scattered, epilogue=epilogue))

    def mean_squares(self, qkv: Tensor, queries: int, keys: int) -> Tensor:
        """See Exchange."""
        if self._workspaces is None:  # each rank has all heads
            return mean_squares(qkv, queries, keys)
        assert self._workspaces.mean_squares is not None, "made for such norms"
        own = mean_squares(qkv, queries, keys, ranks=self._home.world_size)
        self._count()
        return all_reduce(own, self._workspaces.mean_squares)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, form: AttentionForm
    ) -> Tensor:
        """See Exchange."""
        if self._context_attention is None:
            return attend(q, cache, batch, form)
        return self._context_attention(q, cache, batch, form)

    def run_experts(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, sharded: bool
    ) -> Stream:
        """See Exchange."""
        if self._workspaces is None:
            assert self.dispatch is not None
            own = experts.run_dispatched(normed, max(tokens), self.dispatch, self._count)
            return Stream(x, experts.with_shared(own, normed, biased=True))
        if sharded:
            if experts.shared is not None:
                x = self._add_shared(experts.shared, x, normed)
            gather = self._workspaces.all_gather_grouped_matmul
            reduce = self._workspaces.grouped_matmul_reduce_scatter
            assert gather is not None, "made for steps of this size"
            assert reduce is not None
            return Stream(experts.run_sharded(normed, x, gather, reduce, self._count))
        self._count()
        own = experts.with_shared(experts(normed), normed, biased=self._home.rank == 0)
        return Stream(x, all_reduce(own, self._workspaces.all_reduce))

    def _add_shared(self, shared: SharedMlp, x: Tensor, normed: Tensor) -> Tensor:
        """In a sharded step: run an MLP on all ranks, and add its result to x."""
        inner = self.column_parallel(normed, shared.gate_up, silu_multiply=True, sharded=True)
        if not shared.is_gated:
            return self.row_parallel(inner, shared.down, x, sharded=True).x
        out = self.row_parallel(inner, shared.down, None, sharded=True).x
        return shared.add(x, normed, out)

    def faults(self) -> list[Tensor]:
        """See Exchange."""
        return [workspace.fault for workspace in self.workspaces]

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """See Exchange."""
        for workspace, fault in zip(self.workspaces, faults, strict=True):
            workspace.report(fault)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """Pad [T, n] with zeros to [rows, n]; x itself if it already fits."""
    return x if len(x) == rows else pad(x, (0, 0, 0, rows - len(x)))


def token_limits(home: Home, local: ModelSpec, dtype: torch.dtype, max_tokens: int) -> Limits:
    """Return where another way to exchange tokens is faster. Collective.

    The tuning file decides, for all products in a layer; without times there, the kernels' cost
    model.

    Args:
        home: symmetric memory of the ranks.
        local: this rank's part of the model; its first layer stands for all.
        dtype: compute dtype.
        max_tokens: maximum number of tokens in a step.
    """
    products = products_of(local)
    if measured := measured_ways(home, *products, dtype):
        decided, source = switches.limits(measured, max_tokens), "measured"
    else:
        device = device_named(from_first_rank(home, lambda: home.device_name))
        name = str(dtype).removeprefix("torch.")
        decided = predicted_limits(device, home.world_size, products, name, max_tokens)
        source = "predicted"
    limits = Limits(*decided.value)
    logger.debug(
        "up to %d tokens are on all GPUs, and up to %d, products send their sums; %s: %s",
        *(limits.replicated, limits.fused, source, decided.reason),
    )
    return limits


def _dispatch_workspace(
    home: Home, spec: ModelSpec, max_tokens: int, dtype: torch.dtype, copies: int
) -> DispatchWorkspace:
    """Make one workspace for all expert layers, which have equally many experts. Collective."""
    moe = _experts_of(spec)
    assert moe is not None, "only experts are split beyond attention"
    placement = doubled(even(moe.gate.shape[0], home.world_size), copies)
    max_dispatched = min(max_tokens, DISPATCH_TOKENS)
    made = (home, max_dispatched, spec.hidden_size, moe.router.top_k, dtype, placement)
    if home.ranks_per_node < home.world_size:
        return moe_two_level_workspace(*made, ranks_per_node=home.ranks_per_node)
    return moe_workspace(*made)


def _experts_of(spec: ModelSpec) -> MoeSpec | None:
    """Return a layer's experts; all layers with experts have equally many. None without experts."""
    blocks = (layer.feed_forward for layer in spec.layers)
    return next((block for block in blocks if isinstance(block, MoeSpec)), None)
