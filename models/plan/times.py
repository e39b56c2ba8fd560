"""Seconds for a step on a slice, and what they are spent on.

    operators (step.py) + slice (hardware.py) ──► seconds

An operator takes the longer of its arithmetic and its memory traffic (a roofline; Williams et al.
2009), and time to launch its kernels. On a CPU with matrix units, both add up. An exchange comes
after that, or beside it: an overlapped one adds only what the product does not hide, and the
latency of its first hop. Peaks of data sheets are never reached, so `Device.reached`
(kernels/devices.py) says which share of each is.

With pipeline stages, the requests form as many parts as there are stages, and each stage computes
one part: a token takes the slowest stage's time, once for each stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.models.plan import collectives
from weft.models.plan.batch import Batch
from weft.models.plan.hardware import Axis, Slice
from weft.models.plan.step import (
    Backend,
    Collective,
    Exchange,
    Operator,
    Precision,
    RankModel,
    Ranks,
    stages,
)
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

COLLECTIVES: dict[Collective, Callable[[float, Sequence[Axis]], float]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "all_to_all": collectives.all_to_all,
    "send": collectives.send,
}


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of operator in a step, over all its layers.

    Attributes:
        what: the operator's name.
        flops: operations.
        read: bytes from and to the device's memory.
        sent: bytes to other ranks.
        arithmetic, memory: seconds if only this counted.
        roof: seconds for both: the longer one, or their sum if they do not overlap.
        exchange: seconds between ranks that nothing hides.
        hidden: seconds between ranks beside the product.
        launch: seconds to launch kernels.
    """

    what: str
    flops: float
    read: float
    sent: float
    arithmetic: float
    memory: float
    roof: float
    exchange: float
    hidden: float
    launch: float

    @property
    def seconds(self) -> float:
        """All seconds that pass."""
        return self.roof + self.exchange + self.launch

    def __add__(self, other: Part) -> Part:
        """Return both together."""
        return Part(
            self.what,
            self.flops + other.flops,
            self.read + other.read,
            self.sent + other.sent,
            self.arithmetic + other.arithmetic,
            self.memory + other.memory,
            self.roof + other.roof,
            self.exchange + other.exchange,
            self.hidden + other.hidden,
            self.launch + other.launch,
        )


class Engine:
    """One replica of a model on a part of a slice.

    Args:
        spec: the whole model.
        layout: the replica's layout; any rank.
        place: the slice.
        precision: number formats.
        overlapped: exchanges are hidden behind products, if a step has enough tokens.

    Attributes:
        layout, place: as given.
        flops, bandwidth: reached operations per second, and bytes per second from memory.
        launch: seconds to launch a kernel.
        host: seconds on the host for a step.

    Raises:
        ValueError: the layout has more ranks than the slice has devices.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        place: Slice,
        precision: Precision,
        *,
        overlapped: bool = False,
    ) -> None:
        if layout.world_size > place.devices:
            raise ValueError(f"{layout.world_size} ranks do not fit on {place}")
        self.layout, self.place = layout, place
        device = place.device
        self._links = device.reached.links
        # Rounded weights are widened: all take the time of int8.
        by_format = precision.dtype if precision.quantization == "none" else "int8"
        self.flops = device.flops[by_format] * device.reached.flops
        self._vector = device.flops[device.vector or by_format] * device.reached.flops
        self.bandwidth = device.bandwidth * device.reached.bandwidth
        self._overlaps = device.overlaps
        self.launch = device.launch
        self.host = device.host
        backend: Backend = "jax" if device.shapes else "torch"
        self._stages = stages(spec, layout, precision, backend=backend)
        self._overlapped = (
            stages(spec, layout, precision, overlapped=True, backend=backend) if overlapped else []
        )
        self._axes = {
            "tensor": span(place.axes, layout.dense_size),
            "context": span(place.axes, layout.cp),
            "data": span(place.axes, layout.dp_size, layout.dense_size),
            "stage": span(place.axes, layout.pp, layout.stage_size),
        }

    def seconds(self, batch: Batch) -> float:
        """Return the seconds between two tokens of each request in a batch.

        Args:
            batch: all requests of the replica.
        """
        share = _share(batch, self.layout.dp_size * self.layout.pp)
        plain = [self._seconds(model, share) for model in self._stages]
        if not self._overlapped:
            return max(plain) * self.layout.pp + self.host
        overlapped = [self._seconds(model, share) for model in self._overlapped]
        return max(map(min, plain, overlapped)) * self.layout.pp + self.host

    def parts(self, batch: Batch) -> list[list[Part]]:
        """Return what each stage's first rank spends its time on, for its share of the batch.

        With overlapped kernels, the faster method counts: a small step is not worth sharding.
        """
        share = _share(batch, self.layout.dp_size * self.layout.pp)
        found = []
        for i, model in enumerate(self._stages):
            parts = self._parts(model, share)
            if self._overlapped:
                others = self._parts(self._overlapped[i], share)
                parts = min(parts, others, key=lambda each: sum(part.seconds for part in each))
            found.append(parts)
        return found

    def _parts(self, model: RankModel, batch: Batch) -> list[Part]:
        found: dict[str, Part] = {}
        for operator in model.operators(batch):
            part = self._part(operator)
            found[part.what] = found[part.what] + part if part.what in found else part
        return list(found.values())

    def _seconds(self, model: RankModel, batch: Batch) -> float:
        """Return the sum of the parts' seconds."""
        total = 0.0
        for operator in model.operators(batch):
            _, _, roof, exchange, hidden, launch = self._once(operator)
            total += (roof + exchange - hidden + launch) * operator.times
        return total

    def _part(self, operator: Operator) -> Part:
        times = operator.times
        totals = (operator.flops * times, operator.read * times, operator.sent * times)
        once = (each * times for each in self._once(operator))
        arithmetic, memory, roof, exchange, hidden, launch = once
        alone = (arithmetic, memory, roof)
        return Part(operator.what, *totals, *alone, exchange - hidden, hidden, launch)

    def _once(self, operator: Operator) -> tuple[float, ...]:
        """Return an operator's seconds for one run.

        Returns:
            arithmetic, memory and both, all exchanges, their hidden part, and launches.
        """
        arithmetic = operator.flops / (self._vector if operator.vector else self.flops)
        memory = operator.read / self.bandwidth
        roof = max(arithmetic, memory) if self._overlaps else arithmetic + memory
        exchange = hidden = 0.0
        if operator.exchanges:
            exchange = sum(map(self._exchange, operator.exchanges))
        if operator.overlapped and exchange:
            first = sum(self._latency(each.ranks) for each in operator.exchanges)
            hidden = min(roof, max(0.0, exchange - first))
        launch = self.launch * operator.kernels if operator.read else 0.0
        return arithmetic, memory, roof, exchange, hidden, launch

    def _exchange(self, exchange: Exchange) -> float:
        collective = COLLECTIVES[exchange.kind]
        return collective(exchange.payload / self._links, self._axes[exchange.ranks])

    def _latency(self, ranks: Ranks) -> float:
        return collectives.latency(self._axes[ranks])


def span(axes: Sequence[Axis], size: int, stride: int = 1) -> list[Axis]:
    """Return the axes that a group of ranks spans; neighbouring ranks are on the first axes.

    Args:
        axes: the slice's axes.
        size: ranks in the group.
        stride: distance between its ranks.
    """
    found = []
    for axis in axes:
        inner = min(stride, axis.size)
        stride = -(-stride // axis.size)
        taken = min(size, axis.size // inner)
        size = -(-size // max(1, taken))
        if taken > 1:
            found.append(replace(axis, size=taken, wraps=axis.wraps and taken == axis.size))
    return found


def _share(batch: Batch, parts: int) -> Batch:
    """Return the largest part of a batch over equal parts; a prompt stays whole."""
    if parts == 1:
        return batch
    prefills = -(-batch.prefills // parts)
    return replace(
        batch,
        decodes=-(-batch.decodes // parts),
        prefills=prefills,
        prefill_tokens=-(-batch.prefill_tokens * prefills // max(1, batch.prefills)),
    )
