"""Fits the constants that no data sheet has to measured steps, and tells how far predictions are.

    steps of servers ──► fit ──► Constants ──► errors on other steps

Constants are the shares of the peaks that serving reaches, and the seconds to launch an operator
and of the host's work for a step. The fit makes the logarithms of predicted over measured seconds
small: so a short step counts as much as a long one. It uses the Huber loss (Huber 1964), so that a
few steps with a disturbance count little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.kernels.devices import Device, Reached
from weft.models.plan.batch import Batch
from weft.models.plan.hardware import MIN_SHARE, Slice
from weft.models.plan.step import Precision, anonymous
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

USUAL = 0.1
"""Relative errors above this count in proportion, those below by their square."""
DRIFT = 1e-4
"""Weight of a constant's squared logarithm over its start, in the mean loss of a step. It matters
only for constants that the steps do not determine.
"""
WIDEST, NARROWEST = 0.7, 0.01
"""First and last change of a constant's logarithm in the search."""
LEAST = {"launch": 1e-8, "host": 1e-7}
"""Seconds below which a constant does not matter."""

Logarithms = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a device that a fit finds.

    Attributes:
        reached: shares of a device's peaks.
        launch: seconds to launch an operator.
        host: seconds on the host for a step.
    """

    reached: Reached
    launch: float
    host: float

    @classmethod
    def of(cls, device: Device) -> Constants:
        """Return a device's constants."""
        return cls(device.reached, device.launch, device.host)

    def on(self, place: Slice) -> Slice:
        """Return a slice with these constants."""
        device = replace(place.device, reached=self.reached, launch=self.launch, host=self.host)
        return replace(place, device=device)


@dataclass(frozen=True, slots=True)
class Server:
    """One engine whose steps were measured.

    Attributes:
        spec: the model.
        layout: any rank's.
        place: one device for each rank.
        precision: number formats.
        steps: pairs of a step's work and its seconds.
    """

    spec: ModelSpec
    layout: Layout
    place: Slice
    precision: Precision
    steps: Sequence[tuple[Batch, float]]

    def ratios(self, constants: Constants) -> list[float]:
        """Return predicted over measured seconds, for each step."""
        engine = Engine(self.spec, self.layout, constants.on(self.place), self.precision)
        return [engine.seconds(batch) / seconds for batch, seconds in self.steps]


def fit(servers: Sequence[Server], start: Constants) -> Constants:
    """Return the constants that predict the servers' steps best.

    A pattern search (Hooke and Jeeves 1961): change each constant in turn, keep what helps, go on
    in the direction that helped, and halve the changes once nothing does.

    Args:
        servers: with one step or more in all.
        start: the first guess. A constant without influence stays as it is.
    """
    servers = [replace(server, spec=anonymous(server.spec)) for server in servers]
    count, begin = sum(len(server.steps) for server in servers), _logarithms(start)

    def loss(point: Logarithms) -> float:
        constants = _constants(point)
        drift = sum((new - old) ** 2 for new, old in zip(point, begin, strict=True))
        ratios = (ratio for server in servers for ratio in server.ratios(constants))
        return sum(_huber(math.log(ratio)) for ratio in ratios) + DRIFT * count * drift

    point = begin
    least, change = loss(point), WIDEST
    while change > NARROWEST:
        found, better = _explore(loss, point, least, change)
        while better < least:
            ahead = tuple(2 * new - old for new, old in zip(found, point, strict=True))
            point, least = found, better
            found, better = _explore(loss, ahead, loss(ahead), change)
        change /= 2
    return _constants(point)


def _explore(
    loss: Callable[[Logarithms], float], point: Logarithms, least: float, change: float
) -> tuple[Logarithms, float]:
    """Change each number in turn; return the best point and its loss."""
    for i in range(len(point)):
        for step in (change, -change):
            tried = (*point[:i], point[i] + step, *point[i + 1 :])
            if (tried_loss := loss(tried)) < least:
                point, least = tried, tried_loss
                break
    return point, least


def _huber(error: float) -> float:
    size = abs(error)
    return size * size / 2 if size <= USUAL else USUAL * (size - USUAL / 2)


def _logarithms(constants: Constants) -> Logarithms:
    reached = constants.reached
    shares = (reached.flops, reached.bandwidth, reached.links)
    seconds = (
        max(constants.launch, LEAST["launch"]),
        max(constants.host, LEAST["host"]),
    )
    return tuple(map(math.log, (*shares, *seconds)))


def _constants(point: Logarithms) -> Constants:
    flops, bandwidth, links, launch, host = map(math.exp, point)
    shares = (max(MIN_SHARE, share) for share in (flops, bandwidth, links))
    return Constants(Reached(*shares), launch, host)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted seconds.

    Attributes:
        count: number of steps.
        median, p90: quantiles of |predicted / measured - 1|.
    """

    count: int
    median: float
    p90: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Errors:
        """Summarise two or more ratios of predicted to measured seconds."""
        sizes = [abs(ratio - 1) for ratio in ratios]
        p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
        return cls(len(sizes), statistics.median(sizes), p90)

    def __str__(self) -> str:
        return f"median {self.median:.1%}, p90 {self.p90:.1%} on {self.count} held-out steps"
