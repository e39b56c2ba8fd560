"""Reading a log of steps: lines that are cut or wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft.models.plan.batch import Batch
from weft.models.plan.step_log import LoggedStep, read_step_log

HEAD = (
    b'{"model": "m", "dtype": "auto", "quantization": "none", "tp": 1, "ep": 1, "cp": 1, "pp": 1}\n'
)
STEP = b'{"batch": {"decodes": 2, "decode_context": 7.5}, "seconds": 0.25, "on_device": 0.125}\n'


def test_a_line_without_an_end_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(HEAD + STEP + STEP[:40])
    model, steps = read_step_log(path)
    assert model.model == "m"
    assert steps == [LoggedStep(Batch(2, 7.5), 0.25, 0.125)]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "log is empty; weft serve --step-log"),
        (HEAD[:10], "log is empty"),
        (STEP, "log, line 1: Object missing required field `model`"),
        (HEAD + b"[]\n", "log, line 2: Expected `object`, got `array`"),
        (HEAD + STEP + b"\xff\n", "log, line 3: .*must be a line of weft serve --step-log"),
    ],
)
def test_a_wrong_line_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_step_log(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: No such file"):
        read_step_log(tmp_path / "none")
