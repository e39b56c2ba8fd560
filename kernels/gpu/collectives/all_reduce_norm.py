"""All-reduce, residual and RMSNorm in one launch: the end of attention and MLP in decode.

    all_reduce_rms_norm(x [T, N], residual [T, N]) -> out [T, N], total [T, N]

    total = residual + the sum of x over the ranks;  out = norm of total

Protocol (one_shot of all_reduce.py, with more work on the sum). Slot n mod 2 of each rank's buffer
is [W, T * N]; row r of it is rank r's x. In call n, a program stores its own rows of x to row r of
all ranks' slots and sets their signal [row, r] to n. When it has sent all of them, it takes the
same rows again. It waits for signals [row, 0 .. W-1] of its own rank and adds in the order of the
ranks. Then it adds the residual, and so has a whole row for the norm. It waits for data from the
programs with the same number on other ranks, and all of them send before they wait. So there is no
cycle, and the number of programs never exceeds what runs at once.

Every rank hears from every other rank, so two slots are enough: runtime/workspace.py. Only rank r
sets signal [row, r], whatever the shape of a call.

Numbers travel in the dtype of x, are added in float32 and rounded once. All ranks get the same
bits if their residuals are equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.collectives.chunks import sum_rows
from weft.kernels.gpu.collectives.collective import DTYPES, MAX_NUMEL
from weft.kernels.gpu.matmul.epilogue import RESULTS
from weft.kernels.gpu.rowwise.norm import normalize
from weft.kernels.gpu.rowwise.rows import require_rows, row_blocks
from weft.kernels.gpu.runtime.arguments import require_counts, require_tensor
from weft.kernels.gpu.runtime.peers import SLOTS
from weft.kernels.gpu.runtime.signals import notify_all, peer_pointer, slot_of, wait_all
from weft.kernels.gpu.runtime.workspace import Workspace, agreed, triton_type
from weft.kernels.symmetric.memory import Home

MAX_BYTES = 1 << 15
"""Maximum size of a row: with the addresses of all ranks, a longer row does not fit the registers.
"""


@triton.jit(do_not_specialize=["rank", "rows"])
def reduce_and_normalize(
    out,  # [T, N]
    total,  # [T, N]
    x,  # [T, N]
    residual,  # [T, N]
    weight,  # [N]
    peers,  # buffers [2, W, numel]; signals int64 [rows, W]
    rank,
    eps,
    rows,  # T
    N,
    numel,  # numbers of one rank in a slot
    dtype: tl.constexpr,
    WORLD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Send rows to all ranks; add received rows and normalise. Grid: (programs,), persistent."""
    call = tl.load(peers.calls)
    slot = slot_of(call) * peers.slot_numel
    mine_in_slot = slot + rank * numel
    column = tl.arange(0, BLOCK)
    inside = column < N
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        mine = tl.load(x + row * N + column, mask=inside)
        for step in range(WORLD):
            to = peer_pointer(peers.buffers, (rank + 1 + step) % WORLD, dtype) + mine_in_slot
            tl.store(to + row * N + column, mine, mask=inside)
        notify_all(peers, row * WORLD + rank, call, WORLD)
    come = peer_pointer(peers.buffers, rank, dtype) + slot
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        wait_all(peers, rank, row * WORLD, call, WORLD)
        at = row * N + column
        value = sum_rows(come, at, numel, (row + 1) * N, WORLD, BLOCK)
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        stored = value.to(dtype)
        tl.store(total + at, stored, mask=inside)
        value = normalize(stored.to(tl.float32), weight, eps, N, BLOCK)
        tl.store(out + at, value.to(dtype), mask=inside)


class AllReduceNormWorkspace(Workspace):
    """The workspace of `all_reduce_rms_norm` on one rank; see `all_reduce_rms_norm_workspace`."""

    def __init__(self, home: Home, max_rows: int, max_columns: int, dtype: torch.dtype) -> None:
        size = home.world_size
        asked = {"max_rows": max_rows, "max_columns": max_columns, "dtype": dtype}
        with agreed("all_reduce_rms_norm", asked, home.exchange) as check:
            require_counts(check, 0, max_rows=max_rows)
            require_counts(check, 1, max_columns=max_columns)
            allowed = ", ".join(map(str, DTYPES))
            check("dtype", dtype, dtype in DTYPES, f"be one of {allowed}")
            numel = SLOTS * size * max_rows * max_columns
            must = f"be at most {MAX_NUMEL}: make it for less"
            check("the buffer's size", f"{numel} numbers", numel <= MAX_NUMEL, must)
        super().__init__(
            *(home, "all_reduce_rms_norm", size * max_rows * max_columns, dtype, size * max_rows)
        )
        self.max_rows = max_rows
        self.max_numel = max_rows * max_columns


def all_reduce_rms_norm_workspace(
    home: Home, max_rows: int, max_columns: int, dtype: torch.dtype
) -> AllReduceNormWorkspace:
    """Create a workspace for at most `max_rows` rows and `max_rows * max_columns` numbers.
    Collective.

    Args:
        home: this rank's.
        max_rows, max_columns: of x. The workspace needs 2 W times as much memory.
        dtype: float32, float16 or bfloat16.

    Raises:
        KernelError: on every rank, if one rank refuses an argument or the ranks' arguments differ.
    """
    return AllReduceNormWorkspace(home, max_rows, max_columns, dtype)


class Reduced(NamedTuple):
    """The result of `all_reduce_rms_norm`: the norm, and the sum before it; [T, N], x's dtype."""

    out: Tensor
    total: Tensor


def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, workspace: AllReduceNormWorkspace
) -> Reduced:
    """Return the norm of the residual plus the sum over all ranks. Collective.

    Args:
        x: [T, N], contiguous, the workspace's dtype, at most 32 KiB per row; the same shape on all
            ranks.
        residual: [T, N], x's dtype; the same on all ranks.
        weight: [N], float32, float16 or bfloat16; the same on all ranks.
        eps: added to the mean square; positive.
        workspace: from `all_reduce_rms_norm_workspace`.

    Raises:
        KernelError: the tensors do not fit each other or the workspace on one rank, or x's shape
            differs between ranks.
    """
    check = workspace.require
    asked: dict[str, object] = {"eps": eps}
    with workspace.agreed("all_reduce_rms_norm", asked):
        workspace.require_tensor("x", x)
        asked["x's shape"] = tuple(x.shape)
        require_rows(check, "x", x, MAX_BYTES // x.itemsize)
        rows, columns = x.shape
        most = workspace.max_rows
        check(
            "x's rows", rows, rows <= most, f"be at most {most}, which the workspace was made for"
        )
        fits, most = x.numel() <= workspace.max_numel, workspace.max_numel
        must = f"be at most {most}, which the workspace was made for"
        check("x's size", f"{x.numel()} numbers", fits, must)
        require_tensor(check, "residual", residual, (rows, columns), x.device, x.dtype)
        require_tensor(check, "weight", weight, (columns,), x.device, *RESULTS)
        check("eps", eps, eps > 0, "be positive")
    out, total = torch.empty_like(x), torch.empty_like(x)
    if rows:
        block, warps = row_blocks(columns)
        workspace.begin()
        reduce_and_normalize[(workspace.resident(rows),)](
            out=out,
            total=total,
            x=x,
            residual=residual,
            weight=weight,
            peers=workspace.peers(),
            rank=workspace.rank,
            eps=float(eps),
            rows=rows,
            N=columns,
            numel=workspace.max_numel,
            dtype=triton_type(x.dtype),
            WORLD=workspace.world_size,
            BLOCK=block,
            num_warps=max(4, warps),
        )
    return Reduced(out, total)
