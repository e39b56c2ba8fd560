"""Arguments for attention over a paged cache, and their checks.

The host refuses wrong arguments before any launch, as far as it can see them. If a kernel finds a
bad request, it flags the request in the batch's status and still serves the others.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, RESULTS
from weft.kernels.gpu.runtime.arguments import KernelError, Require, require, require_tensor
from weft.kernels.gpu.runtime.target import target

Int32 = npt.NDArray[np.int32]

OUT_OF_POOL, LONGER_THAN_TABLE, SHORTER_THAN_QUERIES, ON_ANOTHER_RANK = 1, 2, 4, 8
FLAGS = {
    OUT_OF_POOL: "its block table has an entry outside the pool",
    LONGER_THAN_TABLE: "its context is longer than its block table",
    SHORTER_THAN_QUERIES: "its context is shorter than its queries",
    ON_ANOTHER_RANK: "another rank flagged it",
}
"""Bits of a request's status word, with their messages."""

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Maximum number of query heads per KV head: the rows of the largest tile."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The requests of one step, on the device; all layers share it.

    The fields follow models/interface.StepInput.

    Attributes:
        query_start: int32 [B + 1]; request b has rows query_start[b]:query_start[b + 1] of q.
        context_len: int32 [B]; number of tokens in the cache, including this step's.
        block_table: int32 [B, n]; each request's pages in order. Entries that no query sees are
            ignored. If W ranks share the pages, rank r lists the pages p with p % W == r.
        status: int32 [B]; bits of FLAGS. Kernels set bits and never clear them.
        max_queries: maximum number of queries in a request. A captured graph serves only steps
            within this maximum.
        max_context: context length for which decodes are split; contexts may be shorter or longer.
        decodes: maximum number of requests with one query.
    """

    query_start: Tensor
    context_len: Tensor
    block_table: Tensor
    status: Tensor
    max_queries: int
    max_context: int
    decodes: int

    @classmethod
    def build(
        cls,
        query_start: Int32,
        context_len: Int32,
        block_table: Int32,
        *,
        block_size: int,
        device: torch.device | str = "cpu",
        world_size: int = 1,
    ) -> PagedBatch:
        """Check the lengths that the host knows, and copy everything to the device.

        Args:
            query_start, context_len, block_table: int32, with the attributes' shapes.
            block_size: tokens in a page.
            device: the cache's device.
            world_size: number of ranks that share each request's pages.

        Raises:
            KernelError: the shapes do not match, query_start does not ascend from 0, or a context
                is shorter than its queries or longer than its table. The error names the request.
        """
        check = functools.partial(require, "paged_attention")
        requests = len(context_len)
        check("context_len's length", requests, requests > 0, "be at least 1")
        starts, tables = len(query_start), block_table.shape
        check("query_start's length", starts, starts == requests + 1, f"be {requests + 1}")
        matches = block_table.ndim == 2 and len(block_table) == requests
        check("block_table's shape", list(tables), matches, f"be [{requests}, n]")
        check("query_start[0]", query_start[0], query_start[0] == 0, "be 0")
        queries = np.diff(query_start)
        most = tables[1] * block_size * world_size
        for request, (count, context) in enumerate(zip(queries, context_len, strict=True)):
            check(f"request {request}'s queries", count, count >= 0, "be at least 0")
            fits = count <= context <= most
            must = f"be at least its {count} queries and at most its table's {most} tokens"
            check(f"request {request}'s context_len", context, fits, must)

        def copied(array: Int32) -> Tensor:
            return torch.from_numpy(np.array(array, np.int32)).to(device)

        return cls(
            copied(query_start),
            copied(context_len),
            copied(block_table),
            torch.zeros(requests, dtype=torch.int32, device=device),
            max_queries=int(queries.max()),
            max_context=int(context_len.max()),
            decodes=int((queries == 1).sum()),
        )

    def errors(self) -> dict[int, KernelError]:
        """Return the errors flagged since status was zero, by request. Waits for the device."""
        return {
            request: KernelError(
                f"request {request}: {next(FLAGS[flag] for flag in FLAGS if word & flag)}"
            )
            for request, word in enumerate(self.status.tolist())
            if word
        }


@dataclass(frozen=True, slots=True)
class Options:
    """A layer's attention options, common to all attention ops: see `reference.paged_attention`.

    Attributes:
        scale: multiplies the scores.
        sliding_window: token i sees the tokens j with i - window < j <= i; None sees all.
        softcap: scores become softcap * tanh(score / softcap); None leaves them.
        sinks: [H], float32, float16 or bfloat16; one more score for each head, without a value.
        k_scale, v_scale: float32 [Hk], for a cache in float8_e4m3fn; they multiply its numbers.
        lse: float32 [T, H], written: the log of the sum of exp(score), including the sink's; +inf
            for a flagged request.
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    lse: Tensor | None = None


def check_queries(check: Require, q: Tensor, most: int = MAX_HEAD_DIM) -> None:
    """Refuse queries unless they are floats of 16 or 32 bits, [T, H, D] with D at most `most`."""
    check("q", f"a {type(q).__name__}", isinstance(q, Tensor), "be a tensor")
    check("q's shape", list(q.shape), q.dim() == 3, "be [T, H, D]")
    check("q's dtype", q.dtype, q.dtype in RESULTS, f"be one of {', '.join(map(str, RESULTS))}")
    dim = q.shape[2]
    check("D", dim, 0 < dim <= most, f"be from 1 to {most}")
    together = q.stride()[1:] == (dim, 1) or not q.numel()
    check("q's stride", q.stride(), together, "have a token's heads contiguous")


def check_heads(check: Require, name: str, q: Tensor, kv_heads: int) -> None:
    """Refuse KV heads unless they divide q's heads into groups that fit a tile."""
    heads = q.shape[1]
    divides = kv_heads > 0 and heads % kv_heads == 0 and heads > 0
    check(name, kv_heads, divides, f"divide q's {heads} heads")
    group = heads // kv_heads
    check("H / Hk", group, group <= MAX_GROUP, f"be at most {MAX_GROUP}")


def check_cache(check: Require, name: str, cache: Tensor, q: Tensor) -> None:
    """Refuse a cache with neither q's dtype nor e4m3, and e4m3 on GPUs without it."""
    require_tensor(check, name, cache, None, q.device, q.dtype, FP8)
    if cache.dtype == FP8:
        backend, capability = target()
        able = backend != "cuda" or capability >= 89
        check(f"{name}'s dtype", FP8, able, f"be {q.dtype}: sm_{capability} has no e4m3")


def check_batch(check: Require, q: Tensor, batch: PagedBatch) -> None:
    """Refuse mismatched batch tensors, and more queries than q has rows."""
    requests, width = len(batch.context_len), batch.block_table.shape[-1]
    for name, shape in (
        ("context_len", [requests]),
        ("query_start", [requests + 1]),
        ("status", [requests]),
        ("block_table", [requests, width]),
    ):
        require_tensor(check, name, getattr(batch, name), shape, q.device, torch.int32)
    queries = batch.max_queries
    check("max_queries", queries, queries <= len(q), f"be at most {len(q)}, the rows of q")


def check_scale(
    check: Require, name: str, scale: Tensor | None, shape: list[int], cache: Tensor
) -> None:
    """Refuse a scale without an fp8 cache, or with the wrong shape, dtype or device."""
    fits = scale is None or cache.dtype == FP8
    check(name, f"given with {cache.dtype}", fits, f"come with {FP8} only")
    if scale is not None:
        require_tensor(check, name, scale, shape, cache.device, torch.float32)


def check_attention(
    check: Require,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    options: Options,
    world_size: int = 1,
) -> None:
    """Refuse mismatched tensors and options. `check` raises the error."""
    check_queries(check, q)
    check_cache(check, "keys", keys, q)
    (tokens, heads, dim), shape, device = q.shape, list(keys.shape), q.device
    check(
        "keys's shape", shape, keys.dim() == 4 and shape[3] == dim, f"be [blocks, Hk, page, {dim}]"
    )
    check("keys's shape", shape, keys.numel() > 0, "have no axis of size 0")
    check_heads(check, "keys's heads", q, shape[1])
    require_tensor(check, "values", values, shape, device, keys.dtype)
    check_batch(check, q, batch)
    check_scale(check, "k_scale", options.k_scale, shape[1:2], keys)
    check_scale(check, "v_scale", options.v_scale, shape[1:2], keys)
    if options.sinks is not None:
        require_tensor(check, "sinks", options.sinks, [heads], device, *RESULTS)
    if options.lse is not None:
        require_tensor(check, "lse", options.lse, [tokens, heads], device, torch.float32)
    window, softcap = options.sliding_window, options.softcap
    check("sliding_window", window, window is None or window > 0, "be at least 1, or None")
    check("softcap", softcap, softcap is None or softcap > 0, "be above 0, or None")
