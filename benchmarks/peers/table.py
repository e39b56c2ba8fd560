"""The figures that are compared, the goals they are held to, and what came out.

A sample is one figure of one contestant in one round. A ratio is the median of
those within a round, where both were measured one after the other: what a
machine gives changes with the minutes.

Besides the contestants there are references that weft is compared with in the
same way: the memory limit, its own first answer, a bound in seconds or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Samples = Mapping[str, Mapping[str, Sequence[float]]]  # name -> figure -> one per round

MEMORY_LIMIT = "memory limit"
FIRST = "the first"
BFLOAT16 = "weft in bfloat16"
START_BOUND = "3 s"
RESIDENT_BOUND = "weights + cache + 600 MB"


@dataclass(frozen=True, slots=True)
class Goal:
    """weft's figure over that of `against` shall be at least, or at most, `ratio`."""

    against: str
    ratio: float
    is_least: bool = True


@dataclass(frozen=True, slots=True)
class Figure:
    """One row: `key` in the samples of a shape, and how it is shown."""

    shape: Literal["dense", "moe", "int4"]
    key: str
    title: str
    unit: Literal["tok/s", "req/s", "ms", "s", "MB"]
    goals: tuple[Goal, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a goal; `low` and `high` are the ratios of single rounds."""

    figure: Figure
    goal: Goal
    ratio: float
    low: float
    high: float

    @property
    def is_reached(self) -> bool:
        """Whether the ratio meets the goal."""
        if self.goal.is_least:
            return self.ratio >= self.goal.ratio
        return self.ratio <= self.goal.ratio


FIGURES = (
    Figure("dense", "decode_rate", "1 user, decode rate", "tok/s", (
        Goal("vLLM", 1.4), Goal("llama.cpp", 1.2), Goal("transformers", 2.5),
        Goal(MEMORY_LIMIT, 0.85))),
    Figure("dense", "batch_rate", "16 users, total rate", "tok/s", (
        Goal("vLLM", 1.3), Goal("llama.cpp", 2.0), Goal("transformers", 4.0))),
    Figure("dense", "batch_itl_p99", "16 users, ITL p99", "ms", (
        Goal("vLLM", 1.0, is_least=False),)),
    Figure("dense", "goodput", "64 users, outputs of 16 to 256 tokens, goodput", "req/s", (
        Goal("vLLM", 1.3),)),
    Figure("dense", "first_ttft", "1,500-token prompt, TTFT", "ms", (
        Goal("vLLM", 1.0, is_least=False),)),
    Figure("dense", "again_ttft", "same 1,400-token prefix again, TTFT", "ms", (
        Goal(FIRST, 0.1, is_least=False),)),
    Figure("dense", "ready", "start to ready", "s", (
        Goal(START_BOUND, 1.0, is_least=False), Goal("vLLM", 0.1, is_least=False))),
    Figure("dense", "resident", "resident memory after the loads", "MB", (
        Goal(RESIDENT_BOUND, 1.0, is_least=False),)),
    Figure("moe", "decode_rate", "MoE, 1 user, decode rate", "tok/s", (Goal("vLLM", 1.3),)),
    Figure("moe", "batch_rate", "MoE, 16 users, total rate", "tok/s", (Goal("vLLM", 1.3),)),
    Figure("int4", "decode_rate", "int4, 1 user, decode rate", "tok/s", (Goal("llama.cpp", 1.2),)),
    Figure("int4", "batch_rate", "int4, 16 users, total rate", "tok/s", (Goal("llama.cpp", 2.0),)),
    Figure("int4", "first_ttft", "int4, 1,500-token prompt, TTFT", "ms", (
        Goal(BFLOAT16, 1.0, is_least=False),)),
)  # fmt: skip


def verdicts(shapes: Mapping[str, Samples]) -> Iterator[Verdict]:
    """Every goal whose both sides were measured."""
    for figure in FIGURES:
        samples = shapes.get(figure.shape, {})
        ours = samples.get("weft", {}).get(figure.key, ())
        for goal in figure.goals:
            theirs = samples.get(goal.against, {}).get(figure.key, ())
            if ours and theirs:
                yield compare(figure, goal, ours, theirs)


def compare(figure: Figure, goal: Goal, ours: Sequence[float], theirs: Sequence[float]) -> Verdict:
    """The ratio of two lists of samples; a list of one stands for every round."""
    longest = max(len(ours), len(theirs))
    pairs = zip(_stretched(ours, longest), _stretched(theirs, longest), strict=False)
    ratios = [_ratio(a, b) for a, b in pairs]
    return Verdict(figure, goal, median(ratios), min(ratios), max(ratios))


def _stretched(samples: Sequence[float], count: int) -> Sequence[float]:
    return [samples[0]] * count if len(samples) == 1 else samples


def _ratio(ours: float, theirs: float) -> float:
    if theirs == 0:
        return math.nan if ours == 0 else math.inf
    return ours / theirs


def shown(value: float, unit: str) -> str:
    """A value in base units (s, bytes, per second) as its row shows it."""
    scaled = value * {"ms": 1e3, "MB": 1e-6}.get(unit, 1.0)
    return f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:.3g}"
