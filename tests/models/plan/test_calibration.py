"""Fits find the constants with which seconds were made, also among disturbed steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.kernels.devices import Reached
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.calibration import Constants, Errors, Server, fit
from weft.models.plan.hardware import read_slice
from weft.models.plan.step import Precision
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout

SPEC = read_spec(locate("weft-demo"))
TRUE = Constants(Reached(flops=0.4, bandwidth=0.6, links=0.3), launch=30e-6, host=2e-3)
BATCHES = [
    *(Batch(decodes, context) for decodes in (1, 8, 64, 256) for context in (50.0, 900.0)),
    *(Batch(0, 0.0, 1, tokens, tokens / 2) for tokens in (64, 512, 4096, 16384)),
]


def server(tp: int) -> Server:
    """A server whose steps take the seconds that the true constants predict."""
    place, layout = read_slice(f"cpu:{tp}"), Layout(tp=tp)
    engine = Engine(SPEC, layout, TRUE.on(place), Precision("float32"))
    steps = [(batch, engine.seconds(batch)) for batch in BATCHES]
    return Server(SPEC, layout, place, Precision("float32"), steps)


def test_a_fit_finds_the_constants() -> None:
    servers = [server(1), server(2)]
    start = Constants.of(servers[0].place.device)
    found = fit(servers, start)
    before, after = (
        Errors.of([ratio for each in servers for ratio in each.ratios(constants)])
        for constants in (start, found)
    )
    assert before.median > 0.3
    assert after.p90 < 0.03
    assert found.reached.flops == pytest.approx(TRUE.reached.flops, rel=0.1)


def test_a_few_disturbed_steps_count_little() -> None:
    calm = server(1)
    steps = [
        (batch, seconds * (20 if i % 5 == 2 else 1))
        for i, (batch, seconds) in enumerate([*calm.steps, *calm.steps])
    ]
    found = fit([replace(calm, steps=steps)], Constants.of(calm.place.device))
    assert Errors.of(calm.ratios(found)).median < 0.05


def test_a_constant_without_influence_stays() -> None:
    alone = server(1)
    start = Constants.of(alone.place.device)
    assert fit([alone], start).reached.links == pytest.approx(start.reached.links)


def test_errors_are_quantiles_of_relative_ones() -> None:
    errors = Errors.of([1.1, 0.8, 1.0, 1.3, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert (errors.count, errors.median) == (11, 0)
    assert errors.p90 == pytest.approx(0.2)
