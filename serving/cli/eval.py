"""`weft eval`: how many held-out questions a model answers rightly.

The questions and the judge of a reply are those of models/bundled/tasks.py. A
task's questions are all asked at once and greedily, so the engine is full while
they last; the score is the share of right answers in percent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weft.errors import ConfigError
from weft.models.bundled.tasks import TASKS, Question, check, held_out
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.llm import LLM

MAX_ANSWER = 256  # tokens; right answers are much shorter


@dataclass(frozen=True, slots=True)
class Score:
    """What a model reached in one task, or over all.

    Attributes:
        tokens: of all answers.
        seconds: from the first question to the last answer.
    """

    task: str
    right: int
    count: int
    tokens: int
    seconds: float

    @property
    def percent(self) -> float:
        """Share of right answers."""
        return 100.0 * self.right / self.count

    @property
    def row(self) -> str:
        """A line of the table."""
        return (
            f"{self.task:<12} {self.right:>6}/{self.count:<6} {self.percent:>6.1f} %"
            f" {self.tokens / self.seconds:>8.0f} tokens/s"
        )


@dataclass(frozen=True, slots=True)
class Failure:
    """A question and the wrong reply to it."""

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
    """Score the tasks (all, if none is named) and print the table; 1 if one is below the bar.

    Raises:
        ConfigError: there is no such task, or `count` is not positive.
    """
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
                print(_told(failure), file=sys.stderr)
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
    """Ask one task's questions."""
    started = time.monotonic()
    task = questions[0].task
    completions = llm.chat(
        [question.messages for question in questions],
        SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER),
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
    """All tasks together."""
    return Score(
        "overall",
        sum(score.right for score in scores),
        sum(score.count for score in scores),
        sum(score.tokens for score in scores),
        sum(score.seconds for score in scores),
    )


def _told(failure: Failure) -> str:
    asked = failure.question.messages[-1]["content"]
    asked = asked if len(asked) <= 400 else f"{asked[:150]} ... {asked[-250:]}"
    return f"  asked    {asked}\n  expected {failure.question.answer}\n  answered {failure.reply}\n"
