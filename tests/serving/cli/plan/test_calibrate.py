"""`weft plan --calibrate`: constants from a log, and logs that cannot be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from weft.errors import ConfigError
from weft.kernels.devices import Reached
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.calibration import Constants
from weft.models.plan.hardware import Slice, read_devices, read_slice
from weft.models.plan.step import Precision
from weft.models.plan.step_log import LoggedModel, LoggedStep
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout
from weft.serving.cli.main import weft

MODEL = LoggedModel(model="weft-demo", dtype="auto", quantization="none", tp=1, ep=1, cp=1, pp=1)
TRUE = Constants(Reached(flops=0.5, bandwidth=1.5), launch=20e-6, host=1e-3)


def engine_on(place: Slice) -> Engine:
    spec = read_spec(locate("weft-demo"))
    return Engine(spec, Layout(), place, Precision(spec.compute_dtype("auto")))


def write(path: Path, model: LoggedModel = MODEL, steps: int = 60) -> Path:
    """A log of steps with the seconds that the true constants predict."""
    engine = engine_on(TRUE.on(read_slice("cpu:1")))
    lines: list[LoggedModel | LoggedStep] = [model]
    for i in range(steps):
        batch = Batch(1 + 3 * i, 100.0) if i % 4 else Batch(0, 0.0, 1, 20 * i + 2, 50.0)
        lines.append(LoggedStep(batch, engine.seconds(batch), 0.0))
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return path


def calibrate(*arguments: str | Path) -> str:
    given = ["plan", "weft-demo", "--for", "cpu:1", *map(str, arguments)]
    result = CliRunner().invoke(weft, given, catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_constants_can_be_given_to_a_plan(tmp_path: Path) -> None:
    text = calibrate("--calibrate", write(tmp_path / "log"))
    assert text.startswith("# weft-demo on cpu:1: median ")
    assert "on 30 held-out steps\n" in text
    devices = tmp_path / "mine.toml"
    devices.write_text(text)
    found = engine_on(read_slice("cpu:1", read_devices(devices)))
    true = engine_on(TRUE.on(read_slice("cpu:1")))
    for batch in (Batch(1, 100.0), Batch(100, 100.0), Batch(0, 0.0, 1, 1000, 50.0)):
        assert found.seconds(batch) == pytest.approx(true.seconds(batch), rel=0.1)
    load = ("--load", "in=10,out=5,rate=0.1", "--devices", str(devices))
    assert "cpu:1" in calibrate(*load)


@pytest.mark.parametrize(
    ("changed", "steps", "message"),
    [
        ({"model": "other"}, 60, "log is a log of the model other, not of weft-demo"),
        ({"tp": 2}, 60, "log is a log of 2 ranks, but cpu:1 has 1"),
        ({"pp": 2}, 60, "log is a log of --pp 2; --calibrate needs --pp 1"),
        ({}, 19, "log: 19 steps; --calibrate needs 20 or more"),
    ],
)
def test_a_log_that_does_not_fit_is_refused(
    tmp_path: Path, changed: dict[str, object], steps: int, message: str
) -> None:
    log = write(tmp_path / "log", replace(MODEL, **changed), steps)
    with pytest.raises(ConfigError, match=message):
        calibrate("--calibrate", log)


def test_flags_that_contradict_are_refused(tmp_path: Path) -> None:
    log = write(tmp_path / "log")
    with pytest.raises(ConfigError, match="--explain, --why and --calibrate"):
        calibrate("--calibrate", log, "--why")
    with pytest.raises(ConfigError, match="--load is missing"):
        calibrate()
    with pytest.raises(ConfigError, match="--for has 2 slices"):
        calibrate("--for", "cpu:1,cpu:2", "--calibrate", log)
