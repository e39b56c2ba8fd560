"""The rows of a plan: what each layout's engines get of the load, and where a step's time goes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.choices import Choice, Limits, choices
from weft.models.plan.hardware import read_slice
from weft.models.plan.load import Load, Objective
from weft.models.plan.plan import Row, load_curve, plan, shares
from weft.models.spec.layout import Layout

LIMITS = Limits(
    max_model_len=2048,
    max_num_seqs=8,
    max_num_batched_tokens=2048,
    block_size=16,
    memory_fraction=0.8,
)


def chosen(model: str, place: str, layout: Layout) -> Choice:
    """The choice with a layout."""
    found = choices(read_spec(locate(model)), read_slice(place), LIMITS)
    return next(each for each in found if each.layout == layout)


def row(choice: Choice, load: str, limits: Limits = LIMITS) -> Row:
    choice = replace(choice, limits=limits)
    (found,) = plan([choice], Load.parse(load), Objective())
    return found


def test_users_of_several_engines_make_one_rate() -> None:
    one = row(chosen("weft-demo", "h100:1", Layout()), "in=100,out=20,users=6")
    two = row(chosen("weft-demo", "h100:2", Layout()), "in=100,out=20,users=12")
    assert two.rate == pytest.approx(2 * one.rate)
    assert 0 < one.rate < one.capacity
    odd = row(chosen("weft-demo", "h100:2", Layout()), "in=100,out=20,users=11")
    assert odd.rate == pytest.approx(11 / 6 * one.rate)


def test_the_rate_of_a_load_is_its_own() -> None:
    choice = chosen("weft-demo", "h100:2", Layout())
    assert row(choice, "in=100,out=20,rate=3").rate == pytest.approx(3)
    assert row(choice, "in=100,out=20,rate=999999").rate == 0


def test_each_attention_group_has_the_limits_of_a_scheduler() -> None:
    choice = chosen("weft-demo-moe", "h100:2", Layout(1, 2))
    load = "in=100,out=20,rate=999999"
    assert choice.layout.dp_size == 2
    assert row(choice, load).batch.decodes == 16
    double = replace(LIMITS, max_num_seqs=16, max_num_batched_tokens=4096)
    assert row(choice, load).capacity < row(choice, load, double).capacity


def test_the_host_works_once_for_all_stages() -> None:
    choice = chosen("weft-demo", "h100:2", Layout(pp=2))
    batch = Batch(8, 100.0)
    assert shares(choice, batch)["host"] == pytest.approx(
        choice.engine.host / choice.engine.seconds(batch)
    )


@pytest.mark.parametrize(
    ("place", "quantization", "advised"),
    [("cpu:1", "none", True), ("cpu-amx:1", "int8", False), ("h100:1", "none", False)],
)
def test_int8_is_advised_where_it_is_served_and_not_in_use(
    place: str, quantization: str, advised: bool
) -> None:
    found = choices(read_spec(locate("weft-demo")), read_slice(place), LIMITS)
    choice = next(each for each in found if each.quantization == quantization)
    for resource in ("memory", "arithmetic"):
        limited = replace(row(choice, "in=100,out=20,rate=1"), shares={resource: 1.0})
        assert ("--quantization int8 or int4" in limited.remedy) == advised


def test_rounded_weights_come_after_exact_ones_that_serve_the_load() -> None:
    found = choices(read_spec(locate("weft-demo")), read_slice("cpu:1"), LIMITS)
    load = Load.parse("in=1000,out=200,rate=1")
    rows = plan(found, load, Objective())
    assert [each.choice.quantization for each in rows] == ["none", "int8", "int4"]
    exact, _, int4 = (each.steady for each in rows)
    assert exact is not None
    assert int4 is not None
    between = Objective((("itl_p99", (exact.latency.itl_p99 + int4.latency.itl_p99) / 2),))
    assert plan(found, load, between)[0].choice.quantization != "none"


def test_a_load_curve_rises_to_the_capacity() -> None:
    choice = chosen("weft-demo", "h100:8", Layout(tp=2))
    curve = load_curve(choice, Load.parse("in=1000,out=200,users=5"))
    capacity = row(choice, "in=1000,out=200,rate=1").capacity
    assert [rate for rate, _ in curve] == sorted(rate for rate, _ in curve)
    assert 0.98 * capacity <= curve[-1][0] <= capacity
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        values = [getattr(latency, name) for _, latency in curve]
        assert values[-1] > values[0]
        assert all(b >= 0.99 * a for a, b in pairwise(values)), name
    rate, latency = curve[5]
    found = row(choice, f"in=1000,out=200,rate={rate}").steady
    assert found is not None
    assert found.latency == latency, "as the row's own"
