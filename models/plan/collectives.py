"""Seconds for exchanges between devices.

V is the number of bytes in the whole array: gathered, or before the scatter, or in all devices'
parts together. N is the number of devices, W a link's bandwidth in one direction.

Torus axes together are one level, and each axis of a switch is another. The levels overlap, so the
slowest decides. Small arrays take at least the hops' latency. The bytes that a rank sends do not
depend on the links: see `Exchange.sent` in step.py.

| on one level | seconds | source |
| --- | --- | --- |
| all-gather, rings | V / (2 W axes) | the book, part 3 |
| all-gather, some lines | V (N - 1) / (N W links); a ring has 2 links, a line 1 | part 3, quiz 2 |
| all-gather, switch | V (N - 1) / (N W) | part 12 |
| all-to-all, rings | V max(A, B, ...) / (8 N W) | part 3 |
| all-to-all, lines | V max(A, B, ...) / (4 N W) | its middle link, as in part 3 |
| all-to-all, switch | V (N - 1) / (N N W) | part 12 |
| hops | sum of A / 2 (rings), A - 1 (lines), 1 (switch) | part 3 |

A reduce-scatter costs as much as an all-gather, and an all-reduce as much as both. Switches that
add (SHARP, multimem) are not modelled.

The book is "How to Scale Your Model" (Austin et al. 2025). Its W is both directions of a ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.models.plan.hardware import Axis


def all_gather(size: float, axes: Sequence[Axis]) -> float:
    """Every device gets all devices' parts: max(hops, V / bandwidth); book, parts 3 and 12.

    Over nodes, a device gathers a part from its peers in other nodes, then all parts in its node:
    V max over levels of (D - 1) / (D S W), for D members with S devices each (part 12).

    Args:
        size: bytes of the gathered array (V).
        axes: the axes that the devices span, from the fastest level to the slowest.
    """
    seconds, inner = 0.0, 1
    for level in _levels(axes):
        members = _count(level)
        rate = sum(_links(axis) * axis.link.bandwidth for axis in level)
        rings = all(axis.wraps and axis.both_ways for axis in level)
        share = 1.0 if rings else (members - 1) / members
        seconds = max(seconds, size * share / (inner * rate))
        inner *= members
    return max(seconds, latency(axes))


def reduce_scatter(size: float, axes: Sequence[Axis]) -> float:
    """Every device gets the sum of all devices' arrays, in parts. It costs as an all-gather.

    Args:
        size: bytes of the array on each device (V).
        axes: as in `all_gather`.
    """
    return all_gather(size, axes)


def all_reduce(size: float, axes: Sequence[Axis]) -> float:
    """Every device gets the sum of all devices' arrays: a reduce-scatter, then an all-gather.

    Args:
        size: bytes of the array on each device (V).
        axes: as in `all_gather`.
    """
    return reduce_scatter(size, axes) + all_gather(size, axes)


def all_to_all(size: float, axes: Sequence[Axis]) -> float:
    """Every device sends a different part of its data to every device.

    The busiest link decides: it crosses the middle of the longest axis (book, part 3). A level with
    D members of S devices each exchanges V (D S / N)^2 bytes; the rest stays within or goes further
    (part 12).

    Args:
        size: bytes of all devices' data together (V).
        axes: as in `all_gather`.
    """
    total, inner, seconds = _count(axes), 1, 0.0
    for level in _levels(axes):
        outer = inner * _count(level)
        data = size * (outer / total) ** 2
        for axis in level:
            busiest = data / outer * _crossings(axis)
            seconds = max(seconds, busiest / axis.link.bandwidth)
        inner = outer
    return max(seconds, latency(axes))


def send(size: float, axes: Sequence[Axis]) -> float:
    """One device sends to another, at the far end of each axis: hops + V / (W axes).

    On a torus each axis has a link that helps (book, part 2, question 5). Between nodes the network
    alone decides.

    Args:
        size: bytes of the message (V).
        axes: the axes along which the two devices differ; none if they are one device.
    """
    seconds = 0.0
    for level in _levels(axes):
        seconds = max(seconds, size / sum(axis.link.bandwidth for axis in level))
    return seconds + latency(axes)


def latency(axes: Sequence[Axis]) -> float:
    """Return the seconds of the longest way between two devices, without data."""
    return sum(_hops(axis) * axis.link.hop for axis in axes if axis.size > 1)


def _levels(axes: Sequence[Axis]) -> list[list[Axis]]:
    """Group the axes: each switch alone, and the torus axes together in the first's place."""
    levels: list[list[Axis]] = []
    torus: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if axis.link.reach != "torus":
            levels.append([axis])
            continue
        if not torus:
            levels.append(torus)
        torus.append(axis)
    return levels


def _count(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def _hops(axis: Axis) -> int:
    if axis.link.reach != "torus":
        return 1
    return axis.size // 2 if axis.wraps and axis.both_ways else axis.size - 1


def _links(axis: Axis) -> int:
    """Return the number of links over which the device with the fewest receives."""
    if axis.link.reach == "pairs":
        return axis.size - 1
    return 2 if axis.link.reach == "torus" and axis.wraps and axis.both_ways else 1


def _crossings(axis: Axis) -> float:
    """Return the data on an axis's busiest link in an all-to-all, over the data of a device.

    A ring of A devices: A / 8, if A is even. One way: (A - 1) / 2. A line: A / 4, if A is even.
    """
    size = axis.size
    if axis.link.reach != "torus":
        return (size - 1) / size / _links(axis)
    if not axis.wraps:
        return (size * size // 4) / size
    return (size * size // 4) / size / 2 if axis.both_ways else (size - 1) / 2
