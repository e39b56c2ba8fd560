"""The ops as tuning calls them: workspaces, operands and calls for one problem.

    tune_op(home, Problem("all_gather_matmul", 8, rows=8192, n=7168, k=8192))

Operands are random, because a GPU multiplies zeros faster. A product has one workspace, made for
the smallest tile that is tried. moe_dispatch has one workspace for each chunk size. A collective
has one for each method, because creating a workspace fails for a method that the home lacks
(multicast).

Not handled: epilogues, several weights, and methods between nodes. Several weights use the
configuration for one weight with the same total number of columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.inputs import PagedBatch
from weft.kernels.gpu.attention.mla import mla_decode_attention
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.sequence_parallel import (
    sequence_parallel_attention,
    sequence_parallel_attention_workspace,
)
from weft.kernels.gpu.collectives.all_gather import all_gather, all_gather_workspace
from weft.kernels.gpu.collectives.all_reduce import all_reduce, all_reduce_workspace
from weft.kernels.gpu.collectives.collective import MAX_ONE_TRIP_BYTES, ONE_TRIP
from weft.kernels.gpu.collectives.reduce_scatter import reduce_scatter, reduce_scatter_workspace
from weft.kernels.gpu.experts.all_gather_grouped_matmul import (
    all_gather_grouped_matmul,
    all_gather_grouped_matmul_workspace,
    make_plan,
)
from weft.kernels.gpu.experts.dispatch import moe_combine, moe_dispatch, moe_workspace
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.gpu.experts.grouped_matmul_reduce_scatter import (
    grouped_matmul_reduce_scatter,
    grouped_matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.experts.placement import even
from weft.kernels.gpu.matmul.all_gather_matmul import all_gather_matmul, all_gather_matmul_workspace
from weft.kernels.gpu.matmul.matmul_reduce_scatter import (
    matmul_all_reduce,
    matmul_all_reduce_workspace,
    matmul_reduce_scatter,
    matmul_reduce_scatter_workspace,
)
from weft.kernels.gpu.runtime.arguments import KernelError
from weft.kernels.gpu.runtime.workspace import Workspace
from weft.kernels.gpu.tuning.clock import Call
from weft.kernels.gpu.tuning.costs import CHUNKS, DTYPES, PAYLOADS, Config, Problem, latent_rank
from weft.kernels.gpu.tuning.products import PRODUCT_METHODS
from weft.kernels.gpu.tuning.search import Measured, Prepare, options_of, tune
from weft.kernels.symmetric.memory import Home

METHODS = {
    "all_gather": ("push", "pull", "copy_engine", "ll", "ll128", "multimem"),
    "reduce_scatter": ("push",),
    "all_reduce": ("one_shot", "two_shot", "ll", "multimem"),
    **PRODUCT_METHODS,
    "moe_dispatch": ("push",),
    "paged_attention": ("local",),
    "decode_attention": ("local",),
    "mla_decode_attention": ("local",),
    "sequence_parallel_attention": ("push",),
}
"""Methods for each op, within a node."""

COLLECTIVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Workspace]]] = {
    "all_gather": (all_gather, all_gather_workspace),
    "reduce_scatter": (reduce_scatter, reduce_scatter_workspace),
    "all_reduce": (all_reduce, all_reduce_workspace),
}
PRODUCTS: dict[str, Callable[..., Tensor]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
    "grouped_matmul": grouped_matmul,
    "all_gather_grouped_matmul": all_gather_grouped_matmul,
    "grouped_matmul_reduce_scatter": grouped_matmul_reduce_scatter,
}


PAGE = 16
"""Number of tokens in a cache block."""


def tune_op(home: Home, problem: Problem, **options: Any) -> list[Measured]:
    """Tune a problem's op; options go to `search.tune`. Collective.

    Raises:
        KernelError: the number of rows is not a multiple of the number of ranks.
        TuningError: as `search.tune`.
    """
    methods, prepare = prepare_op(home, problem)
    return tune(home, problem, methods, prepare, **options)


def prepare_op(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    """Return the op's methods on this home, and a function that makes its calls. Collective."""
    size, rows = home.world_size, problem.rows
    top_k = 1 if problem.attends else problem.top_k
    if problem.attends and not problem.payload:
        return _prepare_attention(home, problem)
    if problem.op != "grouped_matmul" and rows % (size * top_k):
        tokens = f", {top_k} for each token" if top_k > 1 else ""
        raise KernelError(
            f"{problem.op}: rows is {rows}; it must be a multiple of {size} ranks{tokens}"
        )
    if problem.attends:
        return _prepare_sequence(home, problem)
    if problem.op == "moe_dispatch":
        return _prepare_exchange(home, problem)
    if "grouped" in problem.op:
        return _prepare_groups(home, problem)
    return (_prepare_product if problem.multiplies else _prepare_collective)(home, problem)


def _prepare_collective(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    function, make = COLLECTIVES[problem.op]
    shard = problem.rows // home.world_size
    rows = shard if problem.op == "all_gather" else problem.rows
    x = _random(home, problem, rows, problem.n)
    numel = (problem.rows if problem.op == "all_reduce" else shard) * problem.n
    workspaces: dict[str, Workspace] = {}
    large = x.nbytes > MAX_ONE_TRIP_BYTES
    for method in METHODS[problem.op]:
        if large and method in ONE_TRIP:
            continue
        try:
            workspaces[method] = make(home, numel, x.dtype, (method,))
        except KernelError as error:
            if "multicast" not in str(error):
                raise

    def prepare(config: Config) -> Call:
        return partial(function, x, workspaces[config.method], **options_of(problem, config))

    return list(workspaces), prepare


def _prepare_product(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    shard = problem.rows // home.world_size
    gathers = PAYLOADS[problem.op] == "input"
    x = _random(home, problem, shard if gathers else problem.rows, problem.k)
    w = _random(home, problem, problem.k, problem.n)
    travels = torch.bfloat16 if x.itemsize == 1 and not gathers else x.dtype
    workspace: Workspace
    if gathers:
        workspace = all_gather_matmul_workspace(home, shard, problem.k, travels)
    elif problem.op == "matmul_reduce_scatter":
        workspace = matmul_reduce_scatter_workspace(home, shard, problem.n, travels)
    else:
        workspace = matmul_all_reduce_workspace(home, problem.rows, problem.n, travels)
    function = PRODUCTS[problem.op]

    def prepare(config: Config) -> Call:
        return partial(function, x, w, workspace, **options_of(problem, config))

    return list(METHODS[problem.op]), prepare


def _prepare_groups(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    """Prepare grouped products. Each token goes to random experts, the same on all ranks."""
    size, rows, experts, top_k = home.world_size, problem.rows, problem.groups, problem.top_k
    w = _random(home, problem, experts * problem.k, problem.n).view(experts, problem.k, problem.n)
    numbers = torch.Generator().manual_seed(rows)
    plans = []
    for _ in range(size):
        ids = torch.randint(experts, (rows // size // top_k, top_k), generator=numbers)
        plans.append(make_plan(ids, torch.ones(ids.shape), experts).to(home.device))
    tokens = len(ids)
    operands: tuple[Any, ...]
    if problem.op == "grouped_matmul":
        ids = torch.randint(experts, (rows,), generator=numbers)
        offsets = torch.searchsorted(ids.sort().values, torch.arange(experts + 1))
        operands = (_random(home, problem, rows, problem.k), w, offsets.int().to(home.device))
    elif PAYLOADS[problem.op] == "input":
        dtype = DTYPES[problem.dtype]
        x = _random(home, problem, tokens, problem.k)
        gather = all_gather_grouped_matmul_workspace(home, tokens, problem.k, experts, top_k, dtype)
        operands = (x, w, plans[home.rank], gather)
    else:
        x = _random(home, problem, rows, problem.k)
        travels = torch.bfloat16 if x.itemsize == 1 else x.dtype
        scatter = grouped_matmul_reduce_scatter_workspace(
            home, tokens, problem.n, experts, top_k, travels
        )
        operands = (x, w, torch.stack(plans), scatter)
    function = PRODUCTS[problem.op]

    def prepare(config: Config) -> Call:
        return partial(function, *operands, **options_of(problem, config))

    return list(METHODS[problem.op]), prepare


def _prepare_exchange(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    """Prepare calls to moe_dispatch and then moe_combine. Each token goes to random experts."""
    size, experts, top_k = home.world_size, problem.groups, problem.top_k
    tokens, dtype = problem.rows // size // top_k, DTYPES[problem.dtype]
    numbers = torch.Generator().manual_seed(home.rank)
    ids = torch.rand(tokens, experts, generator=numbers).topk(top_k).indices.int().to(home.device)
    x = _random(home, problem, tokens, problem.n)
    weights = torch.full(ids.shape, 1 / top_k, device=home.device)
    made = (tokens, problem.n, top_k, dtype, even(experts, size))
    workspaces = {chunk: moe_workspace(home, *made, chunk=chunk) for chunk in CHUNKS}

    def prepare(config: Config) -> Call:
        workspace = workspaces[options_of(problem, config)["chunk"]]

        def there_and_back(x: Tensor) -> Tensor:
            sent = moe_dispatch(x, ids, workspace)
            return moe_combine(sent.rows, weights, sent, workspace)

        return partial(there_and_back, x)

    return list(METHODS[problem.op]), prepare


def _prepare_attention(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    """Prepare attention on one rank: one decode request for each row, or one prefill.

    Every request has problem.n tokens. Cache blocks are in random order.
    """
    requests, queries = (problem.rows, 1) if problem.decodes else (1, problem.rows)
    context = max(problem.n, queries)
    pages = -(-context // PAGE)
    dtype = DTYPES[problem.dtype]
    cache = (requests * pages, problem.groups, PAGE, problem.k)
    keys, values = (torch.randn(cache, device=home.device).to(dtype) for _ in range(2))
    heads = problem.groups * problem.top_k
    q = torch.randn(problem.rows, heads, problem.k, device=home.device)
    q = q.to(dtype if dtype.itemsize > 1 else torch.bfloat16)
    batch = PagedBatch.build(
        np.arange(requests + 1, dtype=np.int32) * queries,
        np.full(requests, context, np.int32),
        np.random.default_rng(0).permutation(cache[0]).astype(np.int32).reshape(requests, pages),
        block_size=PAGE,
        device=home.device,
    )
    attend: Callable[..., Tensor]
    scale = {"scale": problem.k**-0.5}
    if problem.op == "mla_decode_attention":
        rank = latent_rank(problem.k)
        attend = partial(mla_decode_attention, q, keys[:, 0], batch, kv_lora_rank=rank, **scale)
    else:
        op = decode_attention if problem.decodes else paged_attention
        attend = partial(op, q, keys, values, batch, **scale)

    def prepare(config: Config) -> Call:
        return partial(attend, **options_of(problem, config))

    return list(METHODS[problem.op]), prepare


def _prepare_sequence(home: Home, problem: Problem) -> tuple[list[str], Prepare]:
    """Prepare attention on one sequence over all ranks, in zigzag order if each part is even."""
    tokens, dtype = problem.rows // home.world_size, DTYPES[problem.dtype]
    kv = (tokens, problem.groups, problem.k)
    k, v = (torch.randn(kv, device=home.device).to(dtype) for _ in range(2))
    heads = problem.groups * problem.top_k
    q = torch.randn(tokens, heads, problem.k, device=home.device).to(dtype)
    workspace = sequence_parallel_attention_workspace(home, *kv, dtype)
    how: dict[str, Any] = {"scale": problem.k**-0.5, "zigzag": tokens % 2 == 0}

    def prepare(config: Config) -> Call:
        options = options_of(problem, config)
        return partial(sequence_parallel_attention, q, k, v, workspace, **how, **options)

    return list(METHODS[problem.op]), prepare


def _random(home: Home, problem: Problem, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=home.device).to(DTYPES[problem.dtype])
