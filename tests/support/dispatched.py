"""What the tests of expert parallelism's all-to-alls share: what ranks give, and what is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.kernels import reference
from weft.kernels.check.ops.rows import restored
from weft.kernels.gpu.experts.expert_tokens import Arrived
from weft.kernels.gpu.experts.placement import Placement
from weft.kernels.gpu.rowwise.activation import GROUP
from weft.kernels.gpu.runtime.launches import Action, decided


@dataclass
class Call:
    """What each rank gives in a call."""

    xs: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]

    def only(self, rank: int, token: int) -> Call:
        """Of one token of one rank."""
        kept = [slice(token, token + 1) if r == rank else slice(0) for r in range(len(self.xs))]
        parts = (self.xs, self.ids, self.weights)
        return Call(*([x[k] for x, k in zip(part, kept, strict=True)] for part in parts))


def draw_call(
    tokens: Sequence[int], width: int, top_k: int, experts: int, dtype: torch.dtype, routing: str
) -> Call:
    """New numbers, and a routing: any, all to one expert, or with ids that are no experts."""
    ids = [torch.randint(experts, (count, top_k), dtype=torch.int32) for count in tokens]
    if routing == "one":
        ids = [torch.full_like(each, experts - 1) for each in ids]
    elif routing == "none":
        strange = torch.tensor([-1, -1, experts, -2, 2**31 - 1, -(2**31)], dtype=torch.int32)
        for each in ids:
            lost = torch.rand(each.shape) < 0.5
            each[lost] = strange[torch.randint(len(strange), (int(lost.sum()),))]
    return Call(
        [torch.randn(count, width).to(dtype) for count in tokens],
        ids,
        [torch.randn(count, top_k) for count in tokens],
    )


def apply(rows: Tensor, offsets: Sequence[int], experts: Sequence[int]) -> Tensor:
    """Experts that multiply by their number and 1, exactly; what is beyond is garbage."""
    y = torch.full_like(rows, torch.nan)
    for slot, expert in enumerate(experts):
        y[offsets[slot] : offsets[slot + 1]] = rows[offsets[slot] : offsets[slot + 1]] * (
            expert + 1
        )
    return y


def outputs(sent: Arrived, experts: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same of what has come to a rank."""
    rows = sent.rows if sent.scales is None else restored((sent.rows, sent.scales)).to(dtype)
    return apply(rows, sent.offsets.tolist(), experts)


def differences(
    call: Call,
    got: Sequence[tuple[Arrived, Tensor]],
    placement: Placement,
    tolerance: float = 0.0,
) -> list[str]:
    """What is not the oracle's, bit by bit; but sums only so nearly, absolute and relative."""
    dtype, fp8 = call.xs[0].dtype, got[0][0].scales is not None
    routes = (call.ids, placement.slots)
    oracle = reference.moe_dispatch(call.xs, *routes)
    wire, scales = oracle, []
    if fp8:
        pairs = [reference.quantize(x, GROUP) for x in call.xs]
        wire = reference.moe_dispatch([q.view(torch.uint8) for q, _ in pairs], *routes)
        scales = reference.moe_dispatch([scale for _, scale in pairs], *routes)
        oracle = reference.moe_dispatch([restored(pair).to(dtype) for pair in pairs], *routes)
    ys = [apply(*oracle[rank], placement.experts(rank)) for rank in range(len(got))]
    sums = reference.moe_combine(ys, call.ids, call.weights, placement.slots)
    found = []
    for rank, (sent, out) in enumerate(got):
        rows, offsets = wire[rank]
        came = sent.rows[: len(rows)]
        ids = call.ids[rank]
        refused = ((ids < -1) | (ids >= placement.num_experts)).any(dim=1)
        expected = sums[rank].to(out.dtype)
        close = torch.isclose(out.float(), expected.float(), atol=tolerance, rtol=tolerance)
        same = {
            "offsets": sent.offsets.tolist() == offsets,
            "rows": torch.equal(came.view(torch.uint8) if fp8 else came, rows),
            "scales": sent.scales is None or torch.equal(sent.scales[: len(rows)], scales[rank][0]),
            "status": torch.equal(sent.status, refused.int()),
            "sums": out.shape == expected.shape
            and (bool(close.all()) if tolerance else torch.equal(out, expected)),
        }
        found += [f"{what} of rank {rank}" for what, right in same.items() if not right]
    return found


class Reads(TorchDispatchMode):
    """Notes operators with which the host would wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::_to_copy", "aten::equal"):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def left_out() -> Iterator[list[str]]:
    """Within, no kernel runs; the names of those that would."""
    launched: list[str] = []

    def decide(name: str) -> Action:
        launched.append(name)
        return "skip"

    with decided(decide):
        yield launched
