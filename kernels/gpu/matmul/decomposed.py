"""The same products in parts, a baseline for the overlapped kernels.

Here, too, communication and computation overlap, but as whole launches. The vendor's matrix product
(torch.matmul) for one part runs on the caller's stream. At the same time the next part travels on
the workspace's own stream. There are two methods:

`chunks`. Each shard is a chunk. In the all-gather, the shard from the rank at distance d travels
while the shard from the rank at distance d - 1 is multiplied. In the reduce-scatter, the partial
result for the rank at distance d travels while the next one is computed. The own part comes last,
and then all parts are added.

`ring`. Ranks exchange data only with their neighbours, in both directions at once. The upper half
of each shard travels in one direction, the lower half in the other. Each direction of a link thus
carries half the traffic. In the all-gather, a rank forwards the part that it received while it
multiplies it. In the reduce-scatter, it adds its own partial result to the incoming sum, and
forwards the new sum. This is XLA's bidirectional collective matmul (Wang et al. 2023). "How to
Scale Your Model" (section 3) and the design text for JAX's shard_map describe it.

Protocol. The host must know the addresses of the operands for torch.matmul, so each buffer has only
one slot. Therefore each call begins with a barrier on the device. After the barrier no rank still
reads data from the previous call, so the parts can be overwritten. One rank writes each part of the
buffer once per call, and then sets the part's signal to the number of the call. A reader waits for
this signal in a separate launch, `wait_for`. Signals 0 .. W - 1 belong to the barrier; signal
W + p belongs to part p.

torch computes the epilogue, in the dtype that the overlapped op stores. fp8 is not measured,
because torch.matmul does not take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.matmul.epilogue import FP8, NOTHING, Epilogue
from weft.kernels.gpu.matmul.matmul_reduce_scatter import result_shape
from weft.kernels.gpu.matmul.operands import Weights
from weft.kernels.gpu.runtime.arguments import require_counts
from weft.kernels.gpu.runtime.signals import meet, peer_pointer, tell, wait
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, require_dtype, triton_type
from weft.kernels.symmetric.memory import Home

Method = Literal["chunks", "ring"]

PIECE = 1 << 14
"""Number of elements that a program of `put` copies."""

BLOCK = 4096
"""Number of elements that it copies at a time."""

COLUMN_CHUNKS = 4
"""Number of column chunks in an all-reduce."""


@triton.jit(do_not_specialize=["peer"])
def put(
    x,  # [numel]
    buffers,  # int64 [W]; the buffer's address on each rank
    peer,
    place,  # index of the first element in the buffer
    numel,
    dtype: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy x to a rank's buffer. Grid: (pieces,)."""
    begin = tl.program_id(0) * PIECE
    to = peer_pointer(buffers, peer, dtype) + place
    for start in range(begin, tl.minimum(begin + PIECE, numel), BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit(do_not_specialize=["rank", "index"])
def wait_for(
    peers,  # signals int64 [W + parts]
    rank,
    index,
):
    """Wait for one of this rank's signals. Grid: (1,)."""
    wait(peers, rank, index, tl.load(peers.calls))


class _Parts:
    """The buffer in one call: parts with equal size, each written once and then signalled."""

    def __init__(self, workspace: Workspace, part_numel: int) -> None:
        self.workspace = workspace
        self._numel = part_numel
        workspace.begin()
        meet[(1,)](
            peers=workspace.peers(), rank=workspace.rank, first=0, WORLD=workspace.world_size
        )

    def send(self, data: Tensor, peer: int, part: int) -> None:
        """Write to a part of a rank's buffer, and set its signal."""
        workspace, numel = self.workspace, data.numel()
        peer %= workspace.world_size
        if numel:
            put[(-(-numel // PIECE),)](
                x=data,
                buffers=workspace.buffer.addresses,
                peer=peer,
                place=part * self._numel,
                numel=numel,
                dtype=triton_type(workspace.dtype),
                PIECE=PIECE,
                BLOCK=BLOCK,
            )
        if data.is_cuda:  # keep its memory until this stream has finished the copy
            data.record_stream(torch.cuda.current_stream(data.device))
        index = workspace.world_size + part
        tell[(1,)](peers=workspace.peers(), peer=peer, index=index)

    def receive(self, part: int, rows: int, columns: int) -> Tensor:
        """Wait for a part of this rank's buffer, and return it: [rows, columns]."""
        workspace = self.workspace
        wait_for[(1,)](
            peers=workspace.peers(), rank=workspace.rank, index=workspace.world_size + part
        )
        begin = part * self._numel
        return workspace.buffer.local[0][begin : begin + rows * columns].view(rows, columns)


def all_gather_matmul_workspace(home: Home, max_rows: int, k: int, dtype: torch.dtype) -> Workspace:
    """Create a workspace for shards with at most `max_rows` rows and `k` columns. Collective."""
    return _workspace(home, "all_gather_matmul", 2 * home.world_size, (max_rows, 2), (k, 1), dtype)


def matmul_reduce_scatter_workspace(
    home: Home, max_rows: int, n: int, dtype: torch.dtype
) -> Workspace:
    """Create a workspace for results with at most `max_rows` (M / W) rows. Collective."""
    parts = 2 * home.world_size
    return _workspace(home, "matmul_reduce_scatter", parts, (max_rows, 2), (n, 1), dtype)


def matmul_all_reduce_workspace(home: Home, max_rows: int, n: int, dtype: torch.dtype) -> Workspace:
    """Create a workspace for results with at most `max_rows` (M) rows. Collective."""
    parts = COLUMN_CHUNKS * home.world_size
    return _workspace(home, "matmul_all_reduce", parts, (max_rows, 1), (n, COLUMN_CHUNKS), dtype)


def _workspace(
    home: Home,
    op: str,
    parts: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    dtype: torch.dtype,
) -> Workspace:
    """Create a workspace with `parts` parts.

    Args:
        home: this rank's home.
        op: name of the op.
        parts: number of parts in the buffer.
        rows, columns: (size, number of pieces that it is divided into).
        dtype: dtype of the buffer.
    """
    name = f"decomposed {op}"
    asked = {"max_rows": rows[0], "columns": columns[0], "dtype": dtype}
    with agreed(name, asked, home.exchange) as check:
        require_dtype(check, dtype)
        require_counts(check, 0, max_rows=rows[0], columns=columns[0])
    part_numel = -(-rows[0] // rows[1]) * -(-columns[0] // columns[1])
    return Workspace(home, name, parts * part_numel, dtype, home.world_size + parts)


def all_gather_matmul(
    x_shard: Tensor,
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    *,
    epilogue: Epilogue = NOTHING,
    gathered: Tensor | None = None,
    method: Method = "chunks",
) -> Tensor:
    """Multiply the gathered rows by this rank's columns of one or several weights. Collective.

    Args:
        x_shard: [M / W, K], contiguous, the workspace's dtype; the same shape on all ranks.
        w: [K, N / W], or up to three weights with K rows; the same as in the overlapped op.
        workspace: from this file's `all_gather_matmul_workspace`.
        epilogue: work after the product.
        gathered: [M, K], contiguous, x_shard's dtype; receives the rows from all ranks, if not
            None.
        method: see the top of the file.

    Returns:
        [M, N / W], or [M, N / (2 W)] after silu_multiply; see Epilogue.dtype.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the operands' shapes or the method.
    """
    size, rank, require = workspace.world_size, workspace.rank, workspace.require
    asked: dict[str, object] = {"method": repr(method)}
    with workspace.agreed("decomposed all_gather_matmul", asked):
        workspace.require_tensor("x_shard", x_shard)
        asked["x_shard's shape"] = tuple(x_shard.shape)
        weights = _check(x_shard, w, workspace, method)
        m, k = x_shard.shape
        epilogue.check(require, x_shard, weights.widths, size * m)
        if gathered is not None:
            workspace.require_tensor("gathered", gathered)
            shape = list(gathered.shape)
            require("gathered's shape", shape, shape == [size * m, k], f"be {[size * m, k]}")
        rows = m if method == "chunks" else m - m // 2  # in a part
        parts = size if method == "chunks" else 2 * size
        workspace.require_room("x_shard", parts * rows * k)
    call = _Parts(workspace, rows * k)
    halves = (slice(0, m),) if method == "chunks" else (slice(0, rows), slice(rows, m))
    with workspace.beside():
        if method == "chunks":
            for step in range(1, size):
                call.send(x_shard, rank - step, rank)
        else:
            for step in range(size - 1):
                for half, way in enumerate((1, -1)):
                    source = (rank - way * step) % size
                    part, here = 2 * source + half, halves[half]
                    count = here.stop - here.start
                    data = call.receive(part, count, k) if step else x_shard[here]
                    call.send(data, rank + way, part)
    product = x_shard.new_empty(size * m, sum(weights.widths))
    _multiply(x_shard, weights, product[rank * m :][:m])
    if gathered is not None:
        gathered[rank * m :][:m] = x_shard
    for step in range(1, size):
        for half, here in enumerate(halves):
            way = 1 if method == "ring" and half == 0 else -1
            source = (rank - way * step) % size
            part = source if method == "chunks" else 2 * source + half
            data = call.receive(part, here.stop - here.start, k)
            place = slice(source * m + here.start, source * m + here.stop)
            _multiply(data, weights, product[place])
            if gathered is not None:
                gathered[place] = data
    workspace.rejoin()
    return epilogue.apply(product, x_shard.dtype, side_by_side=len(weights.tensors) == 2)


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    workspace: Workspace,
    *,
    epilogue: Epilogue = NOTHING,
    method: Method = "chunks",
) -> Tensor:
    """Compute this rank's rows in the sum over all ranks' products. Collective.

    Args:
        x: [M, K / W], contiguous, the workspace's dtype; the same shape on all ranks; M is a
            multiple of W.
        w: [K / W, N], the same as in the overlapped op.
        workspace: from this file's `matmul_reduce_scatter_workspace`.
        epilogue: work after the sum.
        method: see the top of the file.

    Returns:
        [M / W, N], or [M / W, N / 2] after silu_multiply.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the operands' shapes or the method.
    """
    size, rank, require = workspace.world_size, workspace.rank, workspace.require
    asked: dict[str, object] = {"method": repr(method)}
    with workspace.agreed("decomposed matmul_reduce_scatter", asked):
        workspace.require_tensor("x", x)
        weights = _check(x, w, workspace, method, limit=1)
        asked |= result_shape(x, weights)
        require("x's rows", len(x), len(x) % size == 0, f"be a multiple of {size} ranks")
        m, n = len(x) // size, weights.widths[0]
        epilogue.check(require, x, weights.widths, m)
        rows = m if method == "chunks" else m - m // 2  # in a part
        parts = size if method == "chunks" else 2 * size
        workspace.require_room("the result", parts * rows * n)
    call = _Parts(workspace, rows * n)
    if method == "chunks":
        for step in reversed(range(size)):
            owner = (rank + step) % size
            part = x[owner * m :][:m] @ weights.tensors[0]
            if step:
                with workspace.beside():
                    call.send(part, owner, rank)
        total = _add(call, part, (m, n))
    else:
        total = torch.empty(m, n, dtype=x.dtype, device=x.device)
        halves = (slice(0, rows), slice(rows, m))
        for step in range(size):
            for half, way in enumerate((1, -1)):
                here, owner = halves[half], (rank - way * (1 + step)) % size
                part = x[owner * m :][here] @ weights.tensors[0]
                if step:
                    part += call.receive(half * size + step, len(part), n)
                if step == size - 1:
                    total[here] = part
                    continue
                with workspace.beside():
                    call.send(part, rank + way, half * size + step + 1)
    if size > 1:  # else nothing was sent; a graph capture cannot join a stream that it did not fork
        workspace.rejoin()
    return epilogue.apply(total, x.dtype, side_by_side=False)


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    workspace: Workspace,
    *,
    epilogue: Epilogue = NOTHING,
) -> Tensor:
    """Compute the sum over all ranks' products, on all ranks: for few rows. Collective.

    The op is cut into chunks of columns; it has no ring method.

    Args:
        x: [M, K / W], contiguous, the workspace's dtype; the same shape on all ranks.
        w: [K / W, N], the same as in the overlapped op.
        workspace: from this file's `matmul_all_reduce_workspace`.
        epilogue: work after the sum.

    Returns:
        [M, N], or [M, N / 2] after silu_multiply; the same bits on all ranks.

    Raises:
        KernelError: on one rank the operands do not match each other or the workspace, or the
            ranks differ in the operands' shapes.
    """
    size, rank, require = workspace.world_size, workspace.rank, workspace.require
    asked: dict[str, object] = {}
    with workspace.agreed("decomposed matmul_all_reduce", asked):
        workspace.require_tensor("x", x)
        weights = _check(x, w, workspace, "chunks", limit=1)
        asked |= result_shape(x, weights)
        m, n = len(x), weights.widths[0]
        epilogue.check(require, x, weights.widths, m)
        columns = -(-n // COLUMN_CHUNKS)
        workspace.require_room("the result", COLUMN_CHUNKS * size * m * columns)
    call = _Parts(workspace, m * columns)
    chunks = weights.tensors[0].split(columns, dim=1) if n else ()
    for number, chunk in enumerate(chunks):
        part = x @ chunk
        with workspace.beside():
            for step in range(size):
                call.send(part, rank + step, number * size + rank)
    sums = [
        _add(call, None, (m, chunk.shape[1]), number * size) for number, chunk in enumerate(chunks)
    ]
    if sums:
        workspace.rejoin()
    total = torch.cat(sums, dim=1) if sums else x.new_empty(m, n)
    return epilogue.apply(total, x.dtype, side_by_side=False)


def _check(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    workspace: Workspace,
    method: str,
    limit: int = 3,
) -> Weights:
    require = workspace.require
    require("x's dtype", x.dtype, x.dtype != FP8, "have 16 or 32 bits")
    require("method", repr(method), method in get_args(Method), "be chunks or ring")
    return Weights.of(w, x, require, limit)


def _multiply(rows: Tensor, weights: Weights, out: Tensor) -> None:
    for w, columns in zip(weights.tensors, out.split(weights.widths, dim=1), strict=True):
        torch.mm(rows, w, out=columns)


def _add(call: _Parts, own: Tensor | None, shape: tuple[int, int], first: int = 0) -> Tensor:
    """Add the parts from all ranks, float32, in rank order."""
    rank, size = call.workspace.rank, call.workspace.world_size
    total = torch.zeros(shape, device=call.workspace.device)
    for source in range(size):
        here = own if own is not None and source == rank else call.receive(first + source, *shape)
        total += here
    return total
