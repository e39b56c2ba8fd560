"""A step's seconds: the resource that limits it, and what exchanges add."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.devices import Reached
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.hardware import Axis, Slice, read_slice
from weft.models.plan.step import Precision, RankModel
from weft.models.plan.times import Engine, Part, span
from weft.models.spec.layout import Layout

SPEC = read_spec(locate("weft-demo"))
EXPERTS = read_spec(locate("weft-demo-moe"))


def at_peak(text: str) -> Slice:
    """A slice whose devices reach their peaks, and launch nothing."""
    place = read_slice(text)
    return replace(
        place, device=replace(place.device, reached=Reached(1.0, 1.0, 1.0), launch=0.0, host=0.0)
    )


def test_one_token_takes_the_time_to_read_the_weights() -> None:
    engine = Engine(SPEC, Layout(), at_peak("H100:1"), Precision())
    operators = RankModel(SPEC, Layout()).operators(Batch(1, 1.0))
    read = sum(operator.read * operator.times for operator in operators)
    assert engine.seconds(Batch(1, 1.0)) == pytest.approx(read / 3.35e12)


def test_many_tokens_take_the_time_to_multiply() -> None:
    engine = Engine(SPEC, Layout(), at_peak("v5e:1x1"), Precision())
    (parts,) = engine.parts(Batch(0, 0.0, 1, 2048, 1024.0))
    (product,) = (part for part in parts if part.what == "gate + up")
    tokens, inner = 2048, SPEC.layers[0].feed_forward.gate.weight.shape[0]  # type: ignore[union-attr]
    flops = 2 * tokens * SPEC.hidden_size * 2 * inner * len(SPEC.layers)
    assert product.arithmetic == pytest.approx(flops / 197e12, rel=0.01)
    assert product.seconds >= product.arithmetic


@given(st.integers(0, 300), st.floats(1, 2000), st.integers(0, 2048))
def test_overlapped_exchanges_never_take_longer(decodes: int, context: float, prompt: int) -> None:
    batch = Batch(decodes, context, min(prompt, 1), prompt, prompt / 2)
    place, layout = read_slice("h100:4"), Layout(tp=4)
    plain = Engine(SPEC, layout, place, Precision())
    overlapped = Engine(SPEC, layout, place, Precision(), overlapped=True)
    assert overlapped.seconds(batch) <= plain.seconds(batch)


def test_a_prompt_hides_its_exchanges() -> None:
    batch = Batch(0, 0.0, 1, 2048, 1024.0)
    engine = Engine(SPEC, Layout(tp=2), read_slice("v5e:2x2"), Precision())
    hiding = Engine(SPEC, Layout(tp=2), read_slice("v5e:2x2"), Precision(), overlapped=True)
    (plain,), (overlapped,) = engine.parts(batch), hiding.parts(batch)
    assert sum(part.hidden for part in plain) == 0 < sum(part.hidden for part in overlapped)


def test_a_token_goes_through_all_stages() -> None:
    batch = Batch(8, 100.0)
    whole = Engine(SPEC, Layout(), at_peak("h100:2"), Precision())
    halves = Engine(SPEC, Layout(pp=2), at_peak("h100:2"), Precision())
    stages = [sum(part.seconds for part in parts) for parts in halves.parts(batch)]
    assert halves.seconds(batch) == pytest.approx(2 * max(stages))
    # Each stage has half of the layers for half of the requests: the same weights are read twice.
    assert whole.seconds(batch) < halves.seconds(batch) < 2 * whole.seconds(batch)


def test_one_prompt_is_no_faster_over_stages() -> None:
    prompt = Batch(0, 0.0, 1, 1000, 500.0)
    whole = Engine(SPEC, Layout(), at_peak("h100:2"), Precision())
    halves = Engine(SPEC, Layout(pp=2), at_peak("h100:2"), Precision())
    assert halves.seconds(prompt) >= whole.seconds(prompt)


def test_attention_groups_share_the_requests() -> None:
    batch = Batch(64, 100.0)
    engine = Engine(EXPERTS, Layout(ep=4), at_peak("h100:4"), Precision())
    (parts,) = engine.parts(batch)
    (same,) = Engine(EXPERTS, Layout(), at_peak("h100:1"), Precision()).parts(Batch(16, 100.0))
    of = {part.what: part for part in parts}
    assert of["attention"].memory == next(p.memory for p in same if p.what == "attention")
    assert of["experts"].exchange > 0


@pytest.mark.parametrize(
    ("place", "size", "stride", "sizes"),
    [
        ("h100:8", 8, 1, [8]),
        ("h100:8", 4, 1, [4]),
        ("h100:8", 2, 4, [2]),
        ("h100:2x8", 16, 1, [8, 2]),
        ("h100:2x8", 2, 8, [2]),
        ("v5e:2x4", 8, 1, [2, 4]),
        ("v5e:2x4", 4, 1, [2, 2]),
        ("v5e:2x4", 2, 4, [2]),
        ("h100:8", 1, 1, []),
    ],
)
def test_a_group_spans_the_nearest_devices(
    place: str, size: int, stride: int, sizes: list[int]
) -> None:
    assert [axis.size for axis in span(read_slice(place).axes, size, stride)] == sizes


def test_a_part_of_a_ring_is_a_line() -> None:
    (row, _) = axes = read_slice("v5e:16x16").axes
    assert row.wraps
    assert span(axes, 16) == [row]
    assert span(axes, 8) == [Axis(8, row.link, wraps=False)]


def test_parts_add_up() -> None:
    one = Part("a", 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 0.5, 0.0, 0.1)
    other = Part("a", 2.0, 2.0, 2.0, 4.0, 3.0, 4.0, 0.0, 0.2, 0.1)
    both = one + other
    assert both.seconds == pytest.approx(one.seconds + other.seconds)
    assert both.hidden == 0.2
    assert (both.flops, both.read, both.sent) == (3.0, 3.0, 3.0)


def test_a_layout_must_fit_on_the_slice() -> None:
    with pytest.raises(ValueError, match="4 ranks do not fit on H100:2"):
        Engine(SPEC, Layout(tp=4), read_slice("h100:2"), Precision())


def test_shares_that_are_not_reached_take_longer() -> None:
    """Half of a peak takes twice the time of what it limits."""
    peak = at_peak("h100:2")
    batch = Batch(0, 0.0, 1, 1 << 20, 1024.0)
    (parts,) = Engine(SPEC, Layout(tp=2), peak, Precision()).parts(batch)
    half = replace(peak, device=replace(peak.device, reached=Reached(0.5, 0.5, 0.5)))
    (slower,) = Engine(SPEC, Layout(tp=2), half, Precision()).parts(batch)
    for part, other in zip(parts, slower, strict=True):
        assert other.arithmetic == pytest.approx(2 * part.arithmetic)
        assert other.memory == pytest.approx(2 * part.memory)
        if part.what == "down":  # the last layer's is so small that its latency counts
            assert other.exchange == pytest.approx(2 * part.exchange, rel=0.01)


def test_a_cpu_with_matrix_units_reads_and_multiplies_in_turn() -> None:
    batch = Batch(16, 500.0)
    (parts,) = Engine(SPEC, Layout(), at_peak("cpu-amx:1"), Precision()).parts(batch)
    for part in parts:
        assert part.seconds == pytest.approx(part.arithmetic + part.memory)
    for place in ("cpu:1", "h100:1"):
        (parts,) = Engine(SPEC, Layout(), at_peak(place), Precision()).parts(batch)
        for part in parts:
            assert part.roof == max(part.arithmetic, part.memory)


def test_vector_units_of_a_cpu_are_slower() -> None:
    """Attention, a tied LM head, and rounded weights do not use matrix units."""
    place = at_peak("cpu-amx:1")
    fast, slow = place.device.flops["bfloat16"], place.device.flops["float32"]

    def rates(quantization: str) -> dict[str, float]:
        engine = Engine(SPEC, Layout(), place, Precision("bfloat16", quantization))
        (parts,) = engine.parts(Batch(16, 500.0))
        return {part.what: part.flops / part.arithmetic for part in parts if part.flops}

    assert SPEC.lm_head is None
    assert rates("none") == pytest.approx(
        {"qkv": fast, "attention": slow, "o": fast, "gate + up": fast, "down": fast}
        | {"lm head": slow}
    )
    for rounded in ("int8", "int4"):
        assert list(rates(rounded).values()) == pytest.approx([slow] * 6)
