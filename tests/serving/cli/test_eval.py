"""`weft eval`: questions reach the model with their tools, and the scores add up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint

from train_demo.export import generate, load_exported
from weft.errors import ConfigError
from weft.models.bundled.tasks import TASKS, Question, held_out
from weft.models.checkpoint.locate import BUNDLED, locate
from weft.serving.cli.eval import MAX_ANSWER, Failure, Score, ask, run, total
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.llm import LLM


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_checkpoint(path, "qwen3", max_position_embeddings=8192)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, threads=1) as llm:
        yield llm


def test_a_random_model_knows_nothing_and_all_of_it_is_told(llm: LLM) -> None:
    questions = held_out("sorting", 3)
    score, failures = ask(llm, questions)
    assert (score.task, score.right, score.count, score.percent) == ("sorting", 0, 3, 0.0)
    assert [failure.question for failure in failures] == questions
    assert score.tokens > 0


def test_scores_add_up() -> None:
    scores = [Score("a", 3, 4, 10, 2.0), Score("b", 0, 4, 30, 3.0)]
    overall = total(scores)
    assert overall == Score("overall", 3, 8, 40, 5.0)
    assert overall.percent == 37.5
    assert overall.row.split() == ["overall", "3/8", "37.5", "%", "8", "tokens/s"]


def test_json_and_failures(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(model=str(checkpoint), threads=1)
    assert run(config, tasks=("counting",), count=2, show_failures=1, as_json=True) == 0
    captured = capsys.readouterr()
    counting, overall = json.loads(captured.out)
    assert (counting["task"], counting["count"], counting["percent"]) == ("counting", 2, 0.0)
    assert overall["task"] == "overall"
    assert captured.err.count("expected") == 1


@pytest.mark.parametrize(
    ("fail_under", "status"), [(None, 0), (0.0, 0), (50.0, 0), (50.1, 1), (100.0, 1)]
)
def test_every_task_must_reach_the_bar(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    checkpoint: Path,
    fail_under: float | None,
    status: int,
) -> None:
    """One task reaches 50 % and the other all."""
    rights = {"counting": 4, "sorting": 2}

    def scored(llm: LLM, questions: list[Question]) -> tuple[Score, list[Failure]]:
        task = questions[0].task
        return Score(task, rights[task], len(questions), 8, 1.0), []

    monkeypatch.setattr("weft.serving.cli.eval.ask", scored)
    config = EngineConfig(model=str(checkpoint), threads=1)
    assert run(config, tasks=tuple(rights), count=4, fail_under=fail_under) == status
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        ["counting", "4/4", "100.0", "%"],
        ["sorting", "2/4", "50.0", "%"],
        ["overall", "6/8", "75.0", "%"],
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ("chess",)}, "--task is 'chess'; it must be one of arithmetic"),
        ({"count": 0}, "--count is 0; it must be at least 1"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(EngineConfig(), **options)  # type: ignore[arg-type]


def test_more_questions_than_there_are() -> None:
    with pytest.raises(ConfigError, match="--count: about has only"):
        run(EngineConfig(), tasks=("about",), count=100_000)


@pytest.mark.parametrize("model", BUNDLED)
def test_weft_and_transformers_give_the_same_answers(model: str) -> None:
    """Greedily, token by token, on some questions of every task, in the checkpoint's bfloat16."""
    questions = [question for task in TASKS for question in held_out(task, 1, seed=3)]
    params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER)
    with LLM(model) as llm:
        ours = llm.chat(
            [question.messages for question in questions],
            params,
            tools=[question.tools for question in questions],
        )
    theirs, tokenizer = load_exported(locate(model))
    for question, answer in zip(questions, ours, strict=True):
        assert answer.text == generate(theirs, tokenizer, question)
        assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "count", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
@pytest.mark.parametrize("model", BUNDLED)
def test_the_bundled_models_reach_their_scores(
    model: str, count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """95 % over all and 90 % in each task; with few questions, one wrong answer more."""
    run(EngineConfig(model=model), count=count, as_json=True)
    *scores, overall = json.loads(capsys.readouterr().out)
    assert [score["task"] for score in scores] == list(TASKS)
    assert overall["percent"] >= 95.0
    assert min(score["percent"] for score in scores) >= (90.0 if count >= 100 else 75.0)
