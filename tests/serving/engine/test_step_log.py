"""The log of steps: what an engine writes is what its scheduler chose."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError
from weft.models.plan.batch import Batch
from weft.models.plan.step_log import read_step_log
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.step_log import StepLog
from weft.serving.llm import LLM


def test_each_step_has_a_line(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", "llama")
    file = tmp_path / "steps.jsonl"
    with LLM(path, step_log=str(file), max_num_batched_tokens=16, prefix_caching=False) as llm:
        llm.generate([list(range(20))], SamplingParams(max_tokens=4, ignore_eos=True))
    model, steps = read_step_log(file)
    assert model.model == str(path)
    assert (model.dtype, model.quantization, model.tp) == ("auto", "none", 1)
    assert [step.batch for step in steps] == [
        Batch(0, 0.0, 1, 16, 8.5),
        Batch(0, 0.0, 1, 4, 18.5),
        *(Batch(1, context) for context in (21.0, 22.0, 23.0)),
    ]
    assert all(step.on_device > 0 and step.seconds > 0 for step in steps)


def test_each_engine_has_its_file(tmp_path: Path) -> None:
    config = EngineConfig(dp=2, replica=Replica(number=1))
    with StepLog(str(tmp_path / "steps"), config):
        pass
    model, steps = read_step_log(tmp_path / "steps.1")
    assert (model.model, steps) == ("weft-demo", [])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_ends_the_log_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with StepLog("/dev/full", EngineConfig()) as log:
        log.flush()
        log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "--step-log /dev/full ends here: No space left on device"
    ]


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-log is .*none/steps: No such file"):
        LLM("weft-demo", step_log=str(tmp_path / "none/steps"))
