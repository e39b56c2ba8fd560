"""The costs of exchanges: the scaling book's worked problems, and what holds for all of them.

The book is "How to Scale Your Model" (Austin et al. 2025). It also has measured values, which the
formulas miss: `MEASURED` has both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.devices import DEVICES, Link
from weft.models.plan.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    latency,
    reduce_scatter,
    send,
)
from weft.models.plan.hardware import Axis, read_slice
from weft.models.plan.step import Exchange

PAGE = Path(__file__).parents[3] / "docs/plan.md"
V4, V5E, V5P, H100 = (DEVICES[name] for name in ("v4", "v5e", "v5p", "H100"))
RING_4 = Axis(4, V4.link, wraps=True)
BF16 = 2
US = 1e-6


def gathered(size: float, devices: int) -> Exchange:
    return Exchange("all_gather", "tensor", devices, size)


def test_part_3_shards() -> None:
    """A device sends all but its own part, so the rest is the size of a shard."""
    size = 4 * 1024 * 4096
    assert size - gathered(size, 16).sent == 4 * 64 * 4096
    load = (size - gathered(size, 16).sent) / H100.bandwidth
    assert load == pytest.approx(294e-9, rel=0.07)  # the book: 1e6 bytes at 3.4e12 bytes/s
    size = 128 * 2048
    assert size - gathered(size, 16).sent == 16_384
    # Problem 1: an array on 64 devices that is split over 4 has 16 copies.
    assert 64 * (size - gathered(size, 4).sent) == 16 * size


def test_part_3_problem_2_on_a_torus() -> None:
    size = BF16 * 1024 * 4096
    x, y, z = read_slice("v4:4x4x4").axes
    assert all(axis.wraps for axis in (x, y, z))
    assert all_gather(size / 4, [x]) == pytest.approx(23 * US, rel=0.02)
    assert all_gather(size, [x, y]) == pytest.approx(46 * US, rel=0.02)
    assert all_reduce(size / 16, [z]) == pytest.approx(11.6 * US, rel=0.01)
    assert latency([x, y]) == pytest.approx(4 * US)


def test_part_3_problem_3_is_bound_by_latency() -> None:
    assert all_gather(BF16 * 128, [RING_4]) == pytest.approx(2 * US)


def test_part_3_quiz_2_on_a_line_and_a_ring() -> None:
    line = read_slice("v5e:4x8").axes[0]
    assert (line.size, line.wraps) == (4, False)
    size = BF16 * 2048 * 8192
    assert all_gather(size, [line]) == pytest.approx(560 * US, rel=0.01)
    ring = Axis(4, V5E.link, wraps=True)
    assert all_gather(size, [ring]) == pytest.approx(377 * US, rel=0.02)
    assert all_gather(BF16 * 256 * 256, [line]) == pytest.approx(3 * US)


def test_part_3_shards_below_45_kb_are_bound_by_latency() -> None:
    ring = read_slice("v5e:8x16").axes[1]
    assert (ring.size, ring.wraps) == (16, True)
    assert all_gather(16 * 44e3, [ring]) == latency([ring])
    assert all_gather(16 * 46e3, [ring]) > latency([ring])


def test_part_3_problem_4_gather_or_reduce() -> None:
    """Which of two ways to multiply X[B, D] by Y[D, F], split along D, is faster."""
    ring = Axis(8, V5P.link, wraps=True)
    depth, width, flops = 8192, 32768, V5P.flops["bfloat16"]

    def times(batch: float) -> tuple[float, float, float]:
        product = 2 * batch * depth * width / flops
        gather = all_gather(BF16 * depth * width, [ring])
        return product, gather, all_reduce(BF16 * batch * width, [ring])

    product, gather, _ = times(2540)
    assert product < gather
    product, gather, reduce = times(2560)
    assert product > gather
    assert reduce < product  # D > 5100
    _, gather, reduce = times(depth / 2)
    assert reduce == pytest.approx(gather)
    assert times(depth / 2 - 1)[2] < gather


def test_part_3_problem_9_gathers_the_input_or_scatters_the_output() -> None:
    rows, inner, columns = 4096, 16384, 2048
    gather = all_gather(BF16 * rows * inner, [RING_4])
    scatter = reduce_scatter(BF16 * rows * columns, [RING_4])
    assert gather / scatter == pytest.approx(inner / columns)


def test_part_3_problem_10_gather_against_all_to_all() -> None:
    """On a ring of D devices; the factors are those of large D."""
    size = 1e12
    for devices in (64, 256):
        one_way = Axis(devices, V4.link, wraps=True, both_ways=False)
        both_ways = Axis(devices, V4.link, wraps=True)
        gather = all_gather(size, [one_way])
        assert gather == pytest.approx(size * (1 - 1 / devices) / V4.link.bandwidth)
        assert all_to_all(size, [one_way]) == pytest.approx(gather / 2)
        both = all_gather(size, [both_ways])
        assert gather / both == pytest.approx(2, rel=0.02)
        exchange = all_to_all(size, [both_ways])
        assert all_to_all(size, [one_way]) / exchange == pytest.approx(4, rel=0.02)
        assert both / exchange == pytest.approx(4)


def test_part_3_all_to_all_on_a_torus() -> None:
    """V max(A, B, C) / (4 N W), with W for both directions."""
    axes = [Axis(side, V5P.link, wraps=True) for side in (4, 8, 16)]
    expected = 1e12 * 16 / (4 * 512 * 2 * V5P.link.bandwidth)
    assert all_to_all(1e12, axes) == pytest.approx(expected)


def test_part_2_question_5_sends_over_both_axes() -> None:
    """The book writes 1.7e10 bytes and 170 ms, but bfloat16[8, 128, 8192] is 1.7e7 bytes."""
    corner = send(BF16 * 8 * 128 * 8192, read_slice("v5e:4x4").axes)
    assert corner == pytest.approx(1.68e7 / 9e10 + 6 * US, rel=0.01)


def test_part_12_within_a_node() -> None:
    node = read_slice("h100:8").axes
    assert all_gather(BF16 * 1024 * 16384, node) == pytest.approx(65 * US, rel=0.01)
    size = 1e9
    assert all_to_all(size, node) == pytest.approx(size * 7 / (64 * 450e9))


def test_part_12_between_nodes() -> None:
    size = 1e10
    unit = read_slice("h100:32x8").axes
    assert size / all_gather(size, unit) == pytest.approx(413e9, rel=0.01)
    assert all_reduce(size, unit) == pytest.approx(2 * all_gather(size, unit))
    pair = read_slice("h100:2x8").axes
    assert size / all_gather(size, pair) == pytest.approx(514e9, rel=0.01)
    across = all_to_all(size, pair)
    assert across == pytest.approx(size / (4 * 400e9))
    assert across > 2 * all_to_all(size, read_slice("h100:8").axes)
    # Within its node, a device sends a block of V / (16 x 16) bytes to each of 7 others.
    slow = [Axis(8, Link(1e9, 0)), Axis(2, Link(1e12, 0))]
    assert all_to_all(size, slow) == pytest.approx(size / 256 * 7 / 1e9)
    # A group with one device in each node: each device uses its own port.
    assert all_gather(size, [Axis(2, H100.network)]) == pytest.approx(size / 2 / 50e9)


def test_pope_et_al_2022_weight_stationary_layouts() -> None:
    """Bytes over a ring's bandwidth per MLP: 2BLE with 1-D weights, 8BLE / sqrt(n) with 2-D.

    "Efficiently Scaling Transformer Inference", section 3.2, with F = 4E. The time on a ring has no
    factor (K - 1) / K, which the paper also drops.
    """
    tokens, width = 1 << 16, 16384
    bandwidth = 2 * V4.link.bandwidth

    def ring(devices: int) -> list[Axis]:
        return [Axis(devices, V4.link, wraps=True)]

    for devices in (64, 256):
        whole = tokens * width
        once = all_gather(whole, ring(devices)), reduce_scatter(whole, ring(devices))
        assert sum(once) * bandwidth == pytest.approx(2 * whole)
        x, yz = math.isqrt(devices) // 2, 2 * math.isqrt(devices)
        inputs, hidden = whole / x, 4 * whole / yz
        four = [
            *(all_gather(inputs, ring(yz)), reduce_scatter(inputs, ring(yz))),
            *(reduce_scatter(hidden, ring(x)), all_gather(hidden, ring(x))),
        ]
        total = sum(four) * bandwidth
        assert total == pytest.approx(8 * whole / math.sqrt(devices))


LINE_4, RING_16 = read_slice("v5e:4x8").axes[0], read_slice("v5e:8x16").axes[1]
NODE = read_slice("h100:8").axes
MEASURED = [
    ("all-gather, 34 MB, 4 v5e in a line", all_gather(2**25, [LINE_4]), 680e-6, 1.22),
    ("all-gather, 131 kB, 4 v5e in a line", all_gather(2**17, [LINE_4]), 8e-6, 2.67),
    ("all-gather, 10 MB, a ring of 16 v5e", all_gather(1e7, [RING_16]), 1e7 / 9e10 / 0.95, 1.05),
    ("all-gather, 537 MB, 8 H100", all_gather(2**29, NODE), 1.5e-3, 1.44),
    ("all-reduce, 10 GB, 8 H100", all_reduce(1e10, NODE), 1.75e10 / 370e9, 1.22),
    ("all-reduce, 59 MB, 8 H100", all_reduce(2**16 * 896, NODE), 2**16 * 1568 / 150e9, 3.0),
]
"""The book's measured seconds (parts 3 and 12), and how much longer they are than the formula's."""


@pytest.mark.parametrize(("what", "cost", "measured", "ratio"), MEASURED)
def test_the_books_measured_values(what: str, cost: float, measured: float, ratio: float) -> None:
    assert measured / cost == pytest.approx(ratio, rel=0.01), what
    row = f"| {what} | {cost / US:,.0f} | {measured / US:,.0f} | {ratio:.2f} |"
    assert row in PAGE.read_text(), f"docs/plan.md must have {row}"


TORUS = st.builds(
    Axis, st.integers(1, 16), st.just(V5E.link), wraps=st.booleans(), both_ways=st.just(True)
)
SWITCHED = st.builds(Axis, st.integers(1, 16), st.sampled_from([H100.link, H100.network]))
PAIRS = st.builds(Axis, st.integers(1, 8), st.just(DEVICES["MI300X"].link))
AXES = st.lists(TORUS, min_size=1, max_size=3) | st.lists(SWITCHED | PAIRS, min_size=1, max_size=2)
BYTES = st.floats(0, 1e12)
KINDS = st.sampled_from([all_gather, reduce_scatter, all_reduce, all_to_all, send])
Kind = Callable[[float, list[Axis]], float]


@given(kind=KINDS, axes=AXES, few=BYTES, more=BYTES)
def test_more_bytes_never_take_less_time(
    kind: Kind, axes: list[Axis], few: float, more: float
) -> None:
    few, more = sorted((few, more))
    assert kind(few, axes) <= kind(more, axes)


@given(kind=KINDS, axes=AXES, size=BYTES)
def test_latency_is_the_least(kind: Kind, axes: list[Axis], size: float) -> None:
    assert kind(size, axes) >= latency(axes)


@given(kind=KINDS, size=BYTES, link=st.sampled_from([V5E.link, H100.link]))
def test_a_device_alone_sends_nothing(kind: Kind, size: float, link: Link) -> None:
    assert kind(size, []) == 0
    assert kind(size, [Axis(1, link), Axis(1, link)]) == 0


@given(axes=AXES, size=BYTES)
def test_an_all_reduce_is_a_scatter_and_a_gather(axes: list[Axis], size: float) -> None:
    assert all_reduce(size, axes) == reduce_scatter(size, axes) + all_gather(size, axes)


@given(
    kind=st.sampled_from([all_gather, all_reduce, all_to_all]),
    sides=st.lists(st.tuples(st.integers(2, 8), st.booleans()), min_size=2, max_size=3),
    wraps=st.booleans(),
    size=BYTES,
)
def test_more_axes_are_never_slower(
    kind: Kind, sides: list[tuple[int, bool]], wraps: bool, size: float
) -> None:
    axes = [Axis(side, V5E.link, wraps=ring) for side, ring in sides]
    one = [Axis(math.prod(side for side, _ in sides), V5E.link, wraps=wraps)]
    assert kind(size, axes) <= kind(size, one) * (1 + 1e-9)


def test_pairs_of_gpus_have_links_of_their_own() -> None:
    """Four MI300X use three of their seven links; a switch would give them all bandwidth."""
    link = DEVICES["MI300X"].link
    for devices in (2, 4, 8):
        seconds = all_gather(1e9, [Axis(devices, link)])
        assert seconds == pytest.approx(1e9 / devices / 64e9)


def test_halves_of_a_chip_share_its_links() -> None:
    """Two devices on each of 64 chips: as fast as 64 chips with the whole links."""
    halves = read_slice("tpu7x:4x4x4").axes
    chips = read_slice("v5p:4x4x4").axes
    assert [axis.size for axis in halves] == [2, 4, 4, 4]
    size = 1e11
    assert all_gather(size, halves) == pytest.approx(all_gather(size, chips))
    assert all_to_all(size, halves) == pytest.approx(all_to_all(size, chips))
