"""`weft eval`: a model's score on held-out questions, in percent.

Questions and the check for answers come from models/bundled/tasks.py. The engine gets all questions
in a task at once, and answers greedily.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from weft.errors import ConfigError
from weft.models.bundled.tasks import TASKS, Question, check, held_out
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig
from weft.serving.config.sources import Settings

if TYPE_CHECKING:
    from weft.serving.llm import LLM

MAX_ANSWER = 256  # tokens; right answers are much shorter


@click.command("eval", cls=TopicCommand)
@click.option("--task", "tasks", multiple=True, metavar="NAME", help="only this task; repeatable")
@click.option("--count", default=100, metavar="N", help="questions per task  [default: 100]")
@click.option("--show-failures", default=0, metavar="N", help="show N wrong answers per task")
@click.option(
    "--fail-under", type=float, metavar="PERCENT", help="exit with 1 if a task scores less"
)
@click.option("--json", "as_json", is_flag=True, help="write the scores to stdout as JSON")
@takes(EngineConfig, model=True)
def evaluate(settings: Settings, **options: Any) -> int:
    """Score MODEL on questions with one right answer.

    The bundled models were trained on such questions, but not on these.

    \b
    weft eval
    weft eval weft-demo-moe --task sorting --count 20 --show-failures 3
    """
    return run(settings.build(EngineConfig), **options)


@dataclass(frozen=True, slots=True)
class Score:
    """A model's score in one task, or in all.

    Attributes:
        task: name of the task.
        right: number of right answers.
        count: number of questions.
        tokens: output tokens in all answers.
        seconds: time from the first question to the last answer.
    """

    task: str
    right: int
    count: int
    tokens: int
    seconds: float

    @property
    def percent(self) -> float:
        """Right answers in percent."""
        return 100.0 * self.right / self.count

    @property
    def row(self) -> str:
        """Line for the table."""
        return (
            f"{self.task:<12} {self.right:>6}/{self.count:<6} {self.percent:>6.1f} %"
            f" {self.tokens / self.seconds:>8.0f} tokens/s"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A question and the model's wrong answer."""

    question: Question
    reply: str


def run(
    config: EngineConfig,
    *,
    tasks: Sequence[str] = (),
    count: int = 100,
    show_failures: int = 0,
    fail_under: float | None = None,
    as_json: bool = False,
) -> int:
    """Score the tasks, all if none is named, and print the table.

    Returns:
        1 if a task scores less than `fail_under`, else 0.

    Raises:
        ConfigError: a task does not exist, or `count` is too small or too large.
    """
    from weft.serving.llm import LLM

    for task in tasks:
        if task not in TASKS:
            raise ConfigError(f"--task is {task!r}; it must be one of {', '.join(TASKS)}")
    if count < 1:
        raise ConfigError(f"--count is {count}; it must be at least 1")
    try:
        questions = [held_out(task, count) for task in tasks or TASKS]
    except ValueError as error:
        raise ConfigError(f"--count: {error}") from None
    scores = []
    with LLM.of(config) as llm:
        for of_task in questions:
            score, failures = ask(llm, of_task)
            scores.append(score)
            if not as_json:
                print(score.row, flush=True)
            for failure in failures[:show_failures]:
                print(_failure_text(failure), file=sys.stderr)
    overall = total(scores)
    if as_json:
        print(
            json.dumps(
                [asdict(score) | {"percent": score.percent} for score in [*scores, overall]],
                indent=2,
            )
        )
    else:
        print(overall.row)
    return int(fail_under is not None and any(score.percent < fail_under for score in scores))


def ask(llm: LLM, questions: Sequence[Question]) -> tuple[Score, list[Failure]]:
    """Ask all questions in one task at once."""
    from weft.serving.engine.sampling_params import SamplingParams

    started = time.monotonic()
    task = questions[0].task
    completions = llm.chat(
        [question.messages for question in questions],
        SamplingParams(temperature=0.0, repetition_penalty=1.0, max_tokens=MAX_ANSWER),
        tools=[question.tools for question in questions],
        progress=task,
    )
    failures = [
        Failure(question, completion.text)
        for question, completion in zip(questions, completions, strict=True)
        if not check(question, completion.text)
    ]
    tokens = sum(len(completion.token_ids) for completion in completions)
    seconds = time.monotonic() - started
    return Score(task, len(questions) - len(failures), len(questions), tokens, seconds), failures


def total(scores: Sequence[Score]) -> Score:
    """Add up the scores in all tasks."""
    return Score(
        "overall",
        sum(score.right for score in scores),
        sum(score.count for score in scores),
        sum(score.tokens for score in scores),
        sum(score.seconds for score in scores),
    )


def _failure_text(failure: Failure) -> str:
    asked = failure.question.messages[-1]["content"]
    asked = asked if len(asked) <= 400 else f"{asked[:150]} ... {asked[-250:]}"
    return f"  asked    {asked}\n  expected {failure.question.answer}\n  answered {failure.reply}\n"
