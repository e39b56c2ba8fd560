"""A decoder whose ranks talk to each other inside its matrix products: kernels/gpu.

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
attention and tokens of its own (models/layout.py); those go to the ranks of their experts:

    route; moe_dispatch     tokens out
    grouped_matmul          silu(gate) * up, then down: own experts, of what has come
    moe_combine             outputs back; + x

In steps of more than DISPATCH_TOKENS, so many at a time: all ranks know how many each has, so
they make the same calls.

It runs on GPUs, and in Triton's interpreter on a CPU: slowly, but through the very same
calls.

Not handled: experts on more ranks than attention, unless that is whole on each; tokens of
prefill that cross once to each node (moe_dispatch_two_level); quantisation; CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, pad

from weft.errors import ConfigError
from weft.kernels.cpu.attention import AttentionPlan
from weft.kernels.cpu.rope import HeadNorms, Rotation
from weft.kernels.gpu.all_gather import AllGatherWorkspace, all_gather, all_gather_workspace
from weft.kernels.gpu.all_gather_matmul import (
    GatherWorkspace,
    all_gather_matmul,
    all_gather_matmul_workspace,
)
from weft.kernels.gpu.all_reduce import AllReduceWorkspace, all_reduce, all_reduce_workspace
from weft.kernels.gpu.attention import paged_attention
from weft.kernels.gpu.attention_inputs import PagedBatch
from weft.kernels.gpu.distributed_decode_attention import (
    DistributedDecodeWorkspace,
    distributed_decode_attention,
    distributed_decode_attention_workspace,
)
from weft.kernels.gpu.epilogue import Epilogue
from weft.kernels.gpu.grouped_matmul import grouped_matmul
from weft.kernels.gpu.matmul import matmul
from weft.kernels.gpu.matmul_reduce_scatter import (
    ReduceWorkspace,
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.moe_dispatch import (
    LowLatencyWorkspace,
    moe_combine,
    moe_dispatch,
    moe_workspace,
)
from weft.kernels.gpu.norm import rms_norm
from weft.kernels.gpu.placement import even
from weft.kernels.gpu.reduce_scatter import (
    ReduceScatterWorkspace,
    reduce_scatter,
    reduce_scatter_workspace,
)
from weft.kernels.gpu.rope import rotate_into_cache
from weft.kernels.gpu.routing import route, sort_by_expert
from weft.kernels.symmetric.memory import Home
from weft.models.interface import Size
from weft.models.spec import LayerSpec, ModelSpec, MoeSpec, WeightSpec
from weft.models.torch.group import Groups
from weft.models.torch.layers import KVCache
from weft.models.torch.logits import Logits
from weft.models.weights import Weights

FEW_TOKENS = 64
"""At most so many are the same on all ranks; more are split between the products."""

DISPATCH_TOKENS = 256
"""Of a rank that are sent to their experts at one time."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What all layers are told of a step.

    Attributes:
        rotation: of its tokens.
        plan: where their keys and values are written.
        batch: which requests they belong to.
        few: whether all ranks have all tokens.
        tokens: how many each copy of attention has, if there are several.
    """

    rotation: Rotation
    plan: AttentionPlan
    batch: PagedBatch
    few: bool
    tokens: tuple[int, ...]


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
    def make(cls, home: Home, max_tokens: int, hidden: int, dtype: torch.dtype) -> _Workspaces:
        """For steps of at most so many tokens. Collective."""
        rows = -(-max_tokens // home.world_size)
        few = min(max_tokens, FEW_TOKENS)
        return cls(
            all_gather_matmul_workspace(home, rows, hidden, dtype),
            matmul_reduce_scatter_workspace(home, rows, hidden, dtype),
            matmul_all_reduce_workspace(home, few, hidden, dtype),
            all_gather_workspace(home, rows * hidden, dtype),
            reduce_scatter_workspace(home, rows * hidden, dtype),
            all_reduce_workspace(home, max_tokens * hidden, dtype),
        )

    def check(self) -> None:
        """Raise KernelError if a wait for another rank has run out."""
        for workspace in (
            *(self.begin, self.end, self.sum),
            *(self.gather, self.scatter, self.reduce),
        ):
            workspace.check()


class _Linear:
    """Some columns or rows of one or several matrices: w [K, N] each, as products take them."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        self.weights = [weight.contiguous().mT for weight in weights]
        self.bias = torch.cat(list(biases)) if biases else None


class _Experts:
    """This rank's experts, or its part of all."""

    def __init__(self, spec: MoeSpec, load: _Load) -> None:
        self._router = load(spec.router).mT
        self._first = load.parts(spec.gate)[0].start
        self._gate_up = [load.stack(spec.gate).mT, load.stack(spec.up).mT]
        self._down = load.stack(spec.down).mT
        self._top_k = spec.top_k
        self._normalize = spec.normalize

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden], to be summed over the ranks."""
        ids, weights = self._route(x)
        places = sort_by_expert(ids - self._first, len(self._down))
        out = self._run(x[places.order // self._top_k], places.offsets)
        own = out[places.inverse.clamp(min=0)].float()  # [T, k, hidden]
        own.masked_fill_((places.inverse < 0)[..., None], 0)  # of other ranks
        return (own * weights[..., None]).sum(1).to(x.dtype)

    def exchange(
        self, x: Tensor, most: int, workspace: LowLatencyWorkspace, count: Callable[[], None]
    ) -> Tensor:
        """[T, hidden] -> [T, hidden], of the experts of all ranks. Collective.

        Args:
            x: of this rank; T may be 0.
            most: tokens of a rank.
            workspace: of the experts' even placement.
            count: called before each exchange.
        """
        ids, weights = self._route(x)
        mixed = []
        for start in range(0, most, workspace.max_tokens):
            some = slice(start, start + workspace.max_tokens)
            count()
            sent = moe_dispatch(x[some], ids[some], workspace)
            # There is room for all that could come; about as many come as go.
            out = self._run(sent.rows, sent.offsets, ids[some].numel())
            count()
            mixed.append(moe_combine(out, weights[some], sent, workspace))
        return torch.cat(mixed) if mixed else x

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token, int32 [T, k], and their weights, float32 [T, k]."""
        return route(matmul(x, self._router), self._top_k, normalize=self._normalize)

    def _run(self, rows: Tensor, offsets: Tensor, expected: int = 0) -> Tensor:
        """[R, hidden], in the order of the experts here, to the same; `expected` rows, or all."""
        silu = Epilogue(silu_multiply=True)
        inner = grouped_matmul(rows, self._gate_up, offsets, epilogue=silu, expected=expected)
        return grouped_matmul(inner, self._down, offsets, expected=expected)


class _SharedPages:
    """Attention of ranks that share KV heads by position: of each rank's heads, to all pages.

    Parts are merged as in distributed_decode_attention: weighted with exp(LSE - that of all). All
    layers use one, one after the other.

    Args:
        home: of these ranks' symmetric memory.
        model: this rank's part of it.
        max_tokens: of a step.
        count: called at each exchange.
    """

    def __init__(
        self,
        home: Home,
        model: ModelSpec,
        max_tokens: int,
        dtype: torch.dtype,
        count: Callable[[], None],
    ) -> None:
        self._home = home
        self._count = count
        heads, dim = model.num_heads * home.world_size, model.head_dim
        own = max_tokens * model.num_heads * dim
        few = min(max_tokens, FEW_TOKENS)
        self._gather = all_gather_workspace(home, own, dtype)
        self._gather_lse = all_gather_workspace(home, max_tokens * heads, torch.float32)
        self._scatter = reduce_scatter_workspace(home, own, dtype)
        self._decode: DistributedDecodeWorkspace = distributed_decode_attention_workspace(
            home, few, heads, dim, dtype
        )

    def __call__(
        self, q: Tensor, cache: KVCache, batch: PagedBatch, scale: float, window: int | None
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

    def check(self) -> None:
        """As `_Workspaces.check`."""
        for workspace in (self._gather, self._gather_lse, self._scatter, self._decode):
            workspace.check()


class _Layer:
    """One layer's part on this rank."""

    def __init__(
        self,
        model: ModelSpec,
        spec: LayerSpec,
        load: _Load,
        workspaces: _Workspaces | None,
        dispatch: LowLatencyWorkspace | None,
        shared: _SharedPages | None,
        *,
        alone: bool,
        count: Callable[[], None],
    ) -> None:
        attention, block = spec.attention, spec.feed_forward
        self._alone = alone
        self._count = count
        self._model = model
        self._window = attention.sliding_window
        self._ws, self._dispatch, self._shared = workspaces, dispatch, shared
        self._norms = load(spec.attention_norm), load(spec.feed_forward_norm)
        self._head_norms = None
        if attention.q_norm is not None and attention.k_norm is not None:
            q, k = load(attention.q_norm), load(attention.k_norm)
            self._head_norms = HeadNorms(q, k, model.norm_eps)

        def linear(*specs: object) -> _Linear:
            return _Linear(
                [load(s.weight) for s in specs],  # type: ignore[attr-defined]
                [load(s.bias) for s in specs if s.bias is not None],  # type: ignore[attr-defined]
            )

        self._qkv = linear(attention.q, attention.k, attention.v)
        self._o = linear(attention.o)
        self._experts = None
        if isinstance(block, MoeSpec):
            self._experts = _Experts(block, load)
        else:
            self._gate_up = linear(block.gate, block.up)
            self._down = linear(block.down)

    def __call__(self, x: Tensor, step: _Step, cache: KVCache) -> Tensor:
        """[T, hidden], or this rank's rows [T / W, hidden], to the same."""
        tokens = len(step.plan.pages)
        qkv = self._begin(x, self._norms[0], self._qkv, step)[:tokens]
        q, _ = rotate_into_cache(
            qkv.contiguous(),
            step.rotation,
            *cache,
            step.plan.pages,
            step.plan.slots,
            heads=self._model.num_heads,
            norms=self._head_norms,
        )
        scale = self._model.head_dim**-0.5
        if self._shared is not None:
            out = self._shared(q, cache, step.batch, scale, self._window)
        else:
            out = paged_attention(q, *cache, step.batch, scale=scale, sliding_window=self._window)
        x = self._end(out.view(tokens, -1), self._o, x, step)
        if self._experts is not None:
            return self._mix(self._experts, x, step)
        inner = self._begin(x, self._norms[1], self._gate_up, step, silu_multiply=True)
        return self._end(inner[:tokens], self._down, x, step)

    def _begin(
        self, x: Tensor, norm: Tensor, linear: _Linear, step: _Step, *, silu_multiply: bool = False
    ) -> Tensor:
        """All tokens' norm times this rank's columns."""
        normed = rms_norm(x, norm, self._model.norm_eps).out
        epilogue = Epilogue(bias=linear.bias, silu_multiply=silu_multiply)
        if step.few or self._ws is None:
            return matmul(normed, linear.weights, epilogue=epilogue)
        self._count()
        return all_gather_matmul(normed, linear.weights, self._ws.begin, epilogue=epilogue)

    def _end(self, x: Tensor, linear: _Linear, residual: Tensor, step: _Step) -> Tensor:
        """All tokens times this rank's rows, summed over the ranks; plus the residual."""
        epilogue = Epilogue(bias=linear.bias, residual=residual)
        (weight,) = linear.weights
        if self._alone or self._ws is None:
            return matmul(x, weight, epilogue=epilogue)
        self._count()
        if step.few:
            return matmul_all_reduce(x, weight, self._ws.sum, epilogue=epilogue)
        x = pad(x, (0, 0, 0, len(residual) * self._ws.end.world_size - len(x)))
        return matmul_reduce_scatter(x, weight, self._ws.end, epilogue=epilogue)

    def take_part(self, none: Tensor, tokens: Sequence[int]) -> None:
        """Without a token, [0, hidden], for those of other copies of attention."""
        if self._experts is not None:
            self._exchange(self._experts, none, tokens)

    def _exchange(self, experts: _Experts, normed: Tensor, tokens: Sequence[int]) -> Tensor:
        """What the experts of all ranks add, where each has tokens of its own."""
        assert self._dispatch is not None
        return experts.exchange(normed, max(tokens), self._dispatch, self._count)

    def _mix(self, experts: _Experts, x: Tensor, step: _Step) -> Tensor:
        """x and what the experts of all ranks add to it."""
        normed = rms_norm(x, self._norms[1], self._model.norm_eps).out
        if self._ws is None:
            return x + self._exchange(experts, normed, step.tokens)
        self._count()
        if step.few:
            return x + all_reduce(experts(normed), self._ws.reduce)
        return x + reduce_scatter(experts(all_gather(normed, self._ws.gather)), self._ws.scatter)


class _Load:
    """Reads this rank's part of weights, in the type to compute in."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device

    def __call__(self, weight: WeightSpec) -> Tensor:
        return self._weights.read(weight).to(self._device, self._dtype, copy=True)

    def stack(self, weight: WeightSpec) -> Tensor:
        """Of a weight that has a tensor per expert, those of this rank."""
        tensors = (x.to(self._device, self._dtype) for x in self._weights.read_each(weight))
        return torch.stack(list(tensors))

    def parts(self, weight: WeightSpec) -> tuple[slice, ...]:
        """Which part of a weight that is, by axis."""
        return self._weights.parts(weight)


def _dispatch_workspace(
    home: Home, spec: ModelSpec, max_tokens: int, dtype: torch.dtype
) -> LowLatencyWorkspace:
    """Of all layers with experts, which are as many in each. Collective."""
    blocks = [layer.feed_forward for layer in spec.layers]
    moe = next(block for block in blocks if isinstance(block, MoeSpec))
    placement = even(moe.gate.shape[0], home.world_size)
    most = min(max_tokens, DISPATCH_TOKENS)
    return moe_workspace(home, most, spec.hidden_size, moe.top_k, dtype, placement)


class OverlappedModel:
    """`model.Model`, on overlapped kernels.

    Args:
        spec: what it is.
        weights: where this rank's tensors come from.
        dtype: to compute in.
        home: of the ranks' symmetric memory.
        context_home: of that of the ranks that share KV heads with this one, if there are any.
        groups: the ranks, for what is not worth overlapping: embedding and logits.
        max_tokens: of a step.

    Raises:
        ConfigError: experts are on more ranks than attention, which is split, too.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: torch.dtype,
        *,
        home: Home,
        context_home: Home | None,
        groups: Groups,
        max_tokens: int,
    ) -> None:
        split, ep = weights.layout.split, weights.layout.ep
        if 1 < split < ep:
            sizes = {"--tp": weights.layout.tp, "--cp": weights.layout.cp}
            given = " and ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
            raise ConfigError(
                f"--ep is {ep}; with --kernels overlapped and {given} it must be at most {split}"
            )
        self._alone = split == 1
        load = _Load(weights, dtype, home.device)
        stage, local = weights.layout.of_stage(spec), weights.layout.local(spec)
        self._home, self._group, self._dtype = home, groups.tensor, dtype
        self._inv_freq = torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim))
        workspaces: _Workspaces | None = None
        dispatch: LowLatencyWorkspace | None = None
        shared: _SharedPages | None = None
        alone, count = self._alone, groups.expert.count
        if weights.layout.copies > 1:
            dispatch = _dispatch_workspace(home, spec, max_tokens, dtype)
        else:
            workspaces = _Workspaces.make(home, max_tokens, spec.hidden_size, dtype)
        if context_home is not None:
            shared = _SharedPages(context_home, local, max_tokens, dtype, count)
        self._ws, self._dispatch, self._shared = workspaces, dispatch, shared
        self._layers = [
            _Layer(local, layer, load, workspaces, dispatch, shared, alone=alone, count=count)
            for layer in stage.layers
        ]
        if stage.is_first:
            self._table = load(spec.embedding)
        if stage.is_last:
            self._norm, self._eps = load(spec.norm), spec.norm_eps
            tied = stage.is_first and spec.lm_head is None
            head = self._table if tied else load(spec.lm_head or spec.embedding)
            self._lm_head = _Linear([head], [])
        self._vocabulary = weights.parts(spec.embedding)[0]
        self._vocab_size, self._hidden_size = spec.vocab_size, spec.hidden_size

    def __call__(
        self,
        x: Tensor,
        positions: Tensor,
        cache: Sequence[KVCache],
        plan: AttentionPlan,
        rows: Tensor | None = None,
        copies: Sequence[Size] = (),
    ) -> Tensor:
        """Run the layers; see `model.Model`.

        Raises:
            KernelError: a wait for another rank has run out.
        """
        tokens, size, rank = len(x), self._home.world_size, self._home.rank
        batch = PagedBatch.build(
            plan.query_start,
            plan.context_len,
            plan.block_table,
            block_size=plan.block_size,
            device=self._home.device,
            world_size=plan.world_size,
        )
        rotation = Rotation.of(positions, self._inv_freq, self._dtype)
        few = self._alone or tokens <= FEW_TOKENS
        told = _Step(rotation, plan, batch, few, tuple(copy.tokens for copy in copies))
        if not told.few:
            each = -(-tokens // size)
            x = pad(x, (0, 0, 0, each * size - tokens))[rank * each :][:each].contiguous()
        for layer, layer_cache in zip(self._layers, cache, strict=True):
            x = layer(x, told, layer_cache)
        if not told.few and self._ws is not None:
            self._group.count()
            x = all_gather(x, self._ws.gather)[:tokens]
        self._check()
        return x if rows is None else x[rows]

    def take_part(self, copies: Sequence[Size]) -> None:
        """See `model.Model.take_part`; KernelError as of a call."""
        none = torch.empty(0, self._hidden_size, dtype=self._dtype, device=self._home.device)
        for layer in self._layers:
            layer.take_part(none, [copy.tokens for copy in copies])
        self._check()

    def _check(self) -> None:
        """Raise KernelError if a wait for another rank has run out: all after it is garbage."""
        for workspace in (self._ws, self._dispatch, self._shared):
            if workspace is not None:
                workspace.check()

    def logits(self, hidden: Tensor) -> Logits:
        """[S, hidden] of the tokens that matter -> [S, vocab_size]."""
        normed = rms_norm(hidden.contiguous(), self._norm, self._eps).out
        return Logits(matmul(normed, self._lm_head.weights), self._vocab_size, self._group)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Int [T] -> [T, hidden]; each rank knows some tokens."""
        here = (token_ids >= self._vocabulary.start) & (token_ids < self._vocabulary.stop)
        x = embedding(torch.where(here, token_ids - self._vocabulary.start, 0), self._table)
        return self._group.sum(x.masked_fill(~here[:, None], 0))
