"""Switches between two ways to run a step: the chosen one is never the dearer one."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.devices import DEVICES, Link, Reached
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan import collectives
from weft.models.plan.hardware import Slice, read_slice
from weft.models.plan.switches import FEWEST, Torus, limits, sizes
from weft.models.spec.layout import Layout
from weft.models.spec.spec import MlpSpec

DEMO = read_spec(locate("weft-demo"))
EXPERTS = read_spec(locate("weft-demo-moe"))
PEAK = Reached(1.0, 1.0, 1.0)
PLACES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "v4:2x2x1")
AT_ONCE = Link(1e21, 0.0, "torus")


def torus(place: str = "v5e:2x2", **options: object) -> Torus:
    slice_ = read_slice(place)
    local = Layout(slice_.devices).local(DEMO)
    return Torus(slice_, local, slice_.devices, "bfloat16", **options)  # type: ignore[arg-type]


def seconds_in(reason: str) -> list[float]:
    """The seconds in a reason."""
    units = {"ms": 1e-3, "us": 1e-6}
    found = re.findall(r"([0-9.e+-]+) (ms|us)\b", reason)
    return [float(number) * units[unit] for number, unit in found]


@given(st.sampled_from(PLACES), st.integers(1, 4096), st.booleans())
def test_tokens_are_sharded_where_that_is_cheaper(place: str, parts: int, in_kernels: bool) -> None:
    decided = torus(place, in_kernels=in_kernels).shards_tokens(8 * parts)
    many, few = seconds_in(decided.reason)
    assert decided.value == (many < few) or many == few  # a reason has three digits
    assert f"all {8 * parts} on each" in decided.reason


@pytest.mark.parametrize("place", PLACES)
def test_a_step_of_few_tokens_has_all_on_each_device(place: str) -> None:
    of = torus(place)
    assert not of.shards_tokens(8).value
    assert of.shards_tokens(1 << 20).value


@given(st.sampled_from(PLACES), st.integers(1, 1 << 17))
def test_weights_travel_where_that_is_cheaper(place: str, parts: int) -> None:
    decided = torus(place).gathers_weights(8 * parts)
    weights, tokens = seconds_in(decided.reason)
    assert decided.value == (weights < tokens) or weights == tokens


def test_weights_travel_with_more_tokens_only() -> None:
    of = torus()
    values = [of.gathers_weights(8 << power).value for power in range(18)]
    assert values == sorted(values)
    assert {True, False} == set(values)


def test_with_instant_links_and_launches_the_ways_take_equally_long() -> None:
    """Both then multiply and read the same, so tokens stay on each device."""
    device = replace(DEVICES["v5e"], link=AT_ONCE, launch=0.0, reached=PEAK)
    place = Slice(device, (2, 2))
    of = Torus(place, Layout(4).local(DEMO), 4, "bfloat16")
    many, few = seconds_in(of.shards_tokens(512).reason)
    assert many == few
    assert many == pytest.approx(_products(512, 4), rel=1e-2)


def _products(tokens: int, devices: int) -> float:
    """The seconds of the demo's products on one of several v5e, from the data sheet's figures."""
    hidden, total = DEMO.hidden_size, 0.0
    for layer in Layout(devices).local(DEMO).layers:
        block, attention = layer.feed_forward, layer.attention
        assert isinstance(block, MlpSpec)
        qkv = sum(each.weight.shape[0] for each in (attention.q, attention.k, attention.v))
        heads, width = attention.q.weight.shape[0], block.gate.weight.shape[0]
        for columns, rows in ((qkv, hidden), (hidden, heads), (2 * width, hidden), (hidden, width)):
            moved = 2 * (columns * rows + tokens * (columns + rows))
            total += max(2 * tokens * columns * rows / 197e12, moved / 0.819e12)
    return total


def test_a_ring_is_the_longer_of_products_and_hops() -> None:
    """With a slow link: N - 1 hops of latency and V / (2 N W), and a part of the product."""
    link = Link(1e9, 1e-3, "torus")
    device = replace(DEVICES["v5e"], link=link, launch=0.0, reached=PEAK)
    of = Torus(Slice(device, (2, 2)), Layout(4).local(DEMO), 4, "bfloat16")
    many, few = seconds_in(of.shards_tokens(64).reason)
    payload = 64 * DEMO.hidden_size * 2
    rings, blocks = 4 * len(DEMO.layers), 2 * len(DEMO.layers)
    assert many == pytest.approx(rings * 3 * (1e-3 + payload / (2 * 4 * 1e9)), rel=0.01)
    axes = Slice(device, (2, 2)).axes
    assert few == pytest.approx(blocks * collectives.all_reduce(payload, axes), rel=0.01)


def test_kernels_read_weights_again_for_each_part() -> None:
    """So their rings pay off with more tokens than XLA's."""

    device = replace(DEVICES["v5e"], launch=0.0)
    local = Layout(4).local(DEMO)

    def fewest(in_kernels: bool) -> int:
        of = Torus(Slice(device, (2, 2)), local, 4, "bfloat16", in_kernels=in_kernels)
        return next(tokens for tokens in range(8, 1 << 20, 8) if of.shards_tokens(tokens).value)

    assert fewest(True) > fewest(False)


def test_a_ring_has_the_whole_link_of_chips_with_two_devices() -> None:
    """Half as fast a link on chips with two devices costs a ring the same."""
    link = Link(1e9, 0.0, "torus")
    chip = replace(DEVICES["tpu7x"], link=link, launch=0.0, reached=PEAK)
    whole = replace(chip, link=Link(2e9, 0.0, "torus"), inside=None)

    def ring(place: Slice) -> float:
        of = Torus(place, Layout(4).local(DEMO), 4, "bfloat16")
        return seconds_in(of.shards_tokens(512).reason)[0]

    assert ring(Slice(chip, (1, 1, 2))) == ring(Slice(whole, (1, 1, 4)))


def test_a_ring_within_a_chip_does_not_leave_it() -> None:
    chip = replace(DEVICES["tpu7x"], link=Link(1.0, 1.0, "torus"))
    of = Torus(Slice(chip, (1, 1, 1)), Layout(2).local(DEMO), 2, "bfloat16")
    assert seconds_in(of.shards_tokens(512).reason)[0] < 1e-3


@pytest.mark.parametrize(
    ("devices", "tokens", "says"),
    [(1, 512, "there is one device"), (4, 12, "12 tokens do not divide into two parts")],
)
def test_where_there_is_no_choice(devices: int, tokens: int, says: str) -> None:
    place = read_slice("v5e:2x2")
    decided = Torus(place, Layout(devices).local(DEMO), devices, "bfloat16").shards_tokens(tokens)
    assert not decided.value
    assert says in decided.reason


def test_experts_weights_stay() -> None:
    of = Torus(read_slice("v5e:2x2"), Layout(4, 4).local(EXPERTS), 4, "bfloat16")
    assert of.gathers_weights(1 << 20).value is False
    assert of.gathers_weights(1 << 20).reason == "there is no dense MLP"


@given(st.integers(1, 100_000), st.floats(0, 1e-4), st.floats(1e-9, 1e-6))
def test_few_tokens_end_where_the_costs_cross(most: int, ahead: float, slope: float) -> None:
    """With straight lines, which cross once."""

    costs = {tokens: (2 * slope * tokens, ahead + slope * tokens) for tokens in sizes(most)}
    (limit,) = limits(costs, most).value
    assert limit == 1 or limit == most or limit in costs
    for size, (few, many) in costs.items():
        if size <= limit:
            assert few <= many
        elif limit < most:
            assert few >= many


SECONDS = st.floats(1e-6, 1e-3)
SIZES = (16, 32, 64, 128)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=4, max_size=4))
def test_no_other_limits_take_less(costs: list[tuple[float, float, float]]) -> None:
    table = dict(zip(SIZES, costs, strict=True))

    def total(first: int, second: int) -> float:
        return sum(each[(size > first) + (size > second)] for size, each in table.items())

    decided = limits(table, 128)
    first, second = decided.value
    assert first <= second
    others = [(one, two) for one in (1, *SIZES) for two in (1, *SIZES) if one <= two]
    assert total(first, second) == pytest.approx(min(total(*other) for other in others))
    told = [min(128, max(FEWEST, 2 * limit)) for limit in dict.fromkeys(decided.value)]
    shown = [seconds for size in dict.fromkeys(told) for seconds in table[size]]
    assert seconds_in(decided.reason) == pytest.approx(shown, rel=0.01)


@pytest.mark.parametrize(("begin", "limit"), [(16, 1), (64, 32)])
def test_limits_below_the_smallest_number_of_tokens(begin: int, limit: int) -> None:
    assert limits({begin: (2.0, 1.0)}, 1 << 16).value == [limit]
