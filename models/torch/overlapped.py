"""Exchanges that are hidden inside the products: kernels/gpu. See exchange.Exchange.

    few tokens (decode): all on all ranks              many (prefill): some on each rank

     x [T, hidden]                                      x [T / W, hidden]
     norm                                               norm
     matmul              qkv: own heads, all tokens     all_gather_matmul
     rotate_into_cache                                  rotate_into_cache
     paged_attention     own heads                      paged_attention
     matmul_all_reduce   o, + x                         matmul_reduce_scatter
     norm                                               norm
     matmul              silu(gate) * up: own width     all_gather_matmul
     matmul_all_reduce   down, + x                      matmul_reduce_scatter

(Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2, for tokens that
are split between products.) Of experts, each rank runs its part for all tokens:

     all_gather, if tokens are split; route, sort_by_expert
     grouped_matmul          silu(gate) * up, then down: own experts, or own width of all
     all_reduce              or reduce_scatter, if tokens are split; + x

Where ranks share KV heads by position (context parallel), each attends to its own pages with
the heads of all of them:

     decodes                                            all else
     all_gather          q                              all_gather          q
     distributed_decode_attention                       paged_attention     own pages; with LSE
                                                        all_gather          LSE
                                                        reduce_scatter      parts, weighted by LSE
Where experts are dealt out to more ranks than attention is split over, each rank has all of
attention and tokens of its own (models/spec/layout.py); those go to the ranks of their experts:

    route; moe_dispatch     tokens out
    grouped_matmul          silu(gate) * up, then down: own experts, of what has come
    moe_combine             outputs back; + x

In steps of more than DISPATCH_TOKENS, so many at a time: all ranks know how many each has, so
they make the same calls.

How many tokens are few is looked up in the file of tuned configurations (`few_tokens`).

Not handled: experts on more ranks than attention, unless that is whole on each; tokens of
prefill that cross once to each node (moe_dispatch_two_level).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
    ReduceScatterWorkspace,
    reduce_scatter,
    reduce_scatter_workspace,
)
from weft.kernels.gpu.experts.dispatch import LowLatencyWorkspace, moe_workspace
from weft.kernels.gpu.experts.placement import even
from weft.kernels.gpu.matmul.all_gather_matmul import (
    GatherWorkspace,
    all_gather_matmul,
    all_gather_matmul_workspace,
)
from weft.kernels.gpu.matmul.epilogue import Epilogue
from weft.kernels.gpu.matmul.matmul import matmul
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    ReduceWorkspace,
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.crossover import Product, few_rows
from weft.kernels.symmetric.memory import Home
from weft.models.spec.layout import Layout
from weft.models.spec.spec import MlpSpec, ModelSpec, MoeSpec
from weft.models.torch.cpu_layers import LayerCache
from weft.models.torch.exchange import attend
from weft.models.torch.gpu_layers import Experts, Linear

FEW_TOKENS = 64
"""At most so many are the same on all ranks, where nothing was tuned; more are split."""

DISPATCH_TOKENS = 256
"""Of a rank that are sent to their experts at one time."""

Count = Callable[[], None]
"""Called at each exchange with the other ranks."""


@dataclass(frozen=True, slots=True)
class _Workspaces:
    """Of the ops; all layers use them, one after the other.

    Attributes:
        begin, end: of products of split tokens.
        sum: of products of tokens that all ranks have.
        gather, scatter, reduce: of what is no product.
    """

    begin: GatherWorkspace
    end: ReduceWorkspace
    sum: ReduceWorkspace
    gather: AllGatherWorkspace
    scatter: ReduceScatterWorkspace
    reduce: AllReduceWorkspace

    @classmethod
    def make(
        cls, home: Home, max_tokens: int, few: int, hidden: int, dtype: torch.dtype
    ) -> _Workspaces:
        """For steps of at most so many tokens, of which so many are few. Collective."""
        rows = -(-max_tokens // home.world_size)
        few = min(max_tokens, few)
        return cls(
            all_gather_matmul_workspace(home, rows, hidden, dtype),
            matmul_reduce_scatter_workspace(home, rows, hidden, dtype),
            matmul_all_reduce_workspace(home, few, hidden, dtype),
            all_gather_workspace(home, rows * hidden, dtype),
            reduce_scatter_workspace(home, rows * hidden, dtype),
            all_reduce_workspace(home, few * hidden, dtype),
        )

    def __iter__(self) -> Iterator[Workspace]:
        yield from (self.begin, self.end, self.sum, self.gather, self.scatter, self.reduce)


class _SharedPages:
    """Attention of ranks that share KV heads by position: of each rank's heads, to all pages.

    Parts are merged as in distributed_decode_attention: weighted with exp(LSE - that of all). All
    layers use one, one after the other.

    Args:
        home: of these ranks' symmetric memory.
        model: this rank's part of it.
        max_tokens: of a step.
        few: tokens of a step of decodes that is exchanged inside attention, at most.
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
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor:
        """[T, H, D] to the same."""
        tokens, heads, dim = q.shape
        size, rank = self._home.world_size, self._home.rank
        self._count()
        everyones = all_gather(q.view(tokens, -1), self._gather).view(size, tokens, heads * dim)
        everyones = everyones.transpose(0, 1).contiguous().view(tokens, size * heads, dim)
        self._count()
        if batch.max_queries == 1 and tokens <= self._decode.max_requests:
            out = distributed_decode_attention(
                everyones, *cache, batch, self._decode, scale=scale, sliding_window=window
            )
            return out[:, rank * heads :][:, :heads].contiguous()
        lse = torch.empty(tokens, size * heads, device=q.device)
        out = paged_attention(
            *(everyones, *cache, batch),
            scale=scale,
            sliding_window=window,
            lse=lse,
            rank=rank,
            world_size=size,
        )
        of_all = all_gather(lse, self._gather_lse).view(size, tokens, -1).logsumexp(0)
        self._count()
        parts = (out * (lse - of_all).exp()[..., None]).to(out.dtype).view(tokens, size, -1)
        parts = parts.transpose(0, 1).contiguous().view(size * tokens, heads * dim)
        return reduce_scatter(parts, self._scatter).view(tokens, heads, dim)

    def __iter__(self) -> Iterator[Workspace]:
        yield from (self._gather, self._gather_lse, self._scatter, self._decode)


class Overlapped:
    """Exchanges of the ranks of a stage. Made by all of them together.

    Args:
        home: of the ranks' symmetric memory.
        context_home: of that of the ranks that share KV heads with this one, if there are any.
        spec: the whole model.
        layout: how it is split, and which part is this rank's; one that `can_overlap`.
        dtype: to compute in.
        max_tokens: of a step.
        count: called at each exchange.

    Attributes:
        workspaces: of all ops.

    Raises:
        TuningError: the first rank's file of tuned configurations is damaged.
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
    ) -> None:
        assert layout.can_overlap, layout
        self._home, self._count = home, count
        self._ws: _Workspaces | None = None
        self._dispatch: LowLatencyWorkspace | None = None
        self._shared: _SharedPages | None = None
        local = layout.local(spec)
        self._few = few = few_tokens(home, local, dtype)
        if layout.dp_size > 1:
            self._dispatch = _dispatch_workspace(home, spec, max_tokens, dtype)
        else:
            self._ws = _Workspaces.make(home, max_tokens, few, spec.hidden_size, dtype)
        if context_home is not None:
            self._shared = _SharedPages(context_home, local, max_tokens, dtype, few, count)
        parts = (self._ws or (), self._shared or (), [self._dispatch] if self._dispatch else ())
        self.workspaces: list[Workspace] = [workspace for part in parts for workspace in part]

    def is_split(self, tokens: int) -> bool:
        """See Exchange: where there are more than few."""
        return self._ws is not None and tokens > self._few

    def shard(self, x: Tensor) -> Tensor:
        """See Exchange."""
        size, rank = self._home.world_size, self._home.rank
        each = -(-len(x) // size)
        x = _with_rows(x, each * size)
        return x[rank * each :][:each].contiguous()

    def unshard(self, x: Tensor, tokens: int) -> Tensor:
        """See Exchange."""
        assert self._ws is not None
        self._count()
        return all_gather(x, self._ws.gather)[:tokens]

    def begin(self, x: Tensor, linear: Linear, *, silu_multiply: bool, split: bool) -> Tensor:
        """See Exchange."""
        epilogue = Epilogue(bias=linear.bias, silu_multiply=silu_multiply)
        if not split or self._ws is None:
            return matmul(x, linear.weights, epilogue=epilogue)
        self._count()
        return all_gather_matmul(x, linear.weights, self._ws.begin, epilogue=epilogue)

    def end(self, x: Tensor, linear: Linear, residual: Tensor, *, split: bool) -> Tensor:
        """See Exchange."""
        epilogue = Epilogue(bias=linear.bias, residual=residual)
        (weight,) = linear.weights
        if self._ws is None:  # each rank has all of it
            return matmul(x, weight, epilogue=epilogue)
        self._count()
        if not split:
            return matmul_all_reduce(x, weight, self._ws.sum, epilogue=epilogue)
        x = _with_rows(x, len(residual) * self._ws.end.world_size)
        return matmul_reduce_scatter(x, weight, self._ws.end, epilogue=epilogue)

    def attend(
        self, q: Tensor, cache: LayerCache, batch: PagedBatch, scale: float, window: int | None
    ) -> Tensor:
        """See Exchange."""
        if self._shared is None:
            return attend(q, cache, batch, scale, window)
        return self._shared(q, cache, batch, scale, window)

    def mix(
        self, experts: Experts, x: Tensor, normed: Tensor, tokens: Sequence[int], *, split: bool
    ) -> Tensor:
        """See Exchange."""
        if self._ws is None:
            assert self._dispatch is not None
            return x + experts.exchange(normed, max(tokens), self._dispatch, self._count)
        self._count()
        if not split:
            return x + all_reduce(experts(normed), self._ws.reduce)
        return x + reduce_scatter(experts(all_gather(normed, self._ws.gather)), self._ws.scatter)

    def faults(self) -> list[Tensor]:
        """See Exchange."""
        return [workspace.fault for workspace in self.workspaces]

    def check(self, faults: Sequence[Sequence[int]]) -> None:
        """See Exchange."""
        for workspace, fault in zip(self.workspaces, faults, strict=True):
            workspace.report(fault)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """[T, n] -> [rows, n], with zeros behind; x itself, and no copy, if it has as many."""
    return x if len(x) == rows else pad(x, (0, 0, 0, rows - len(x)))


def few_tokens(home: Home, local: ModelSpec, dtype: torch.dtype) -> int:
    """Up to how many tokens a step is faster when all ranks have all of them. Collective.

    By what was tuned for all of a layer's products, else FEW_TOKENS.

    Args:
        local: this rank's part of the model, whose first layer stands for all.
    """
    layer, hidden = local.layers[0], local.hidden_size
    heads = local.num_heads * local.head_dim
    begins = [Product(heads + 2 * local.num_kv_heads * local.head_dim, hidden)]
    ends = [Product(hidden, heads)]
    if isinstance(layer.feed_forward, MlpSpec):
        width = layer.feed_forward.gate.weight.shape[0]
        begins.append(Product(2 * width, hidden))
        ends.append(Product(hidden, width))
    tuned = few_rows(home, begins, ends, dtype)
    return FEW_TOKENS if tuned is None else tuned


def _dispatch_workspace(
    home: Home, spec: ModelSpec, max_tokens: int, dtype: torch.dtype
) -> LowLatencyWorkspace:
    """Of all layers with experts, which are as many in each. Collective."""
    blocks = [layer.feed_forward for layer in spec.layers]
    moe = next(block for block in blocks if isinstance(block, MoeSpec))
    placement = even(moe.gate.shape[0], home.world_size)
    most = min(max_tokens, DISPATCH_TOKENS)
    return moe_workspace(home, most, spec.hidden_size, moe.top_k, dtype, placement)
