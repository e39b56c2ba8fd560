"""An engine's steps under a load, for each number of decodes at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from weft.models.plan.step_table import StepTable

ROUNDS = 20  # of the fixed point; each halves its error at least, unless prompts take all time


@dataclass(frozen=True, slots=True)
class Flow:
    """Steps while a certain number of requests decode; rates are per second.

    Attributes:
        index: index of the number of decodes in the table.
        decodes: their number.
        tokens: prompt tokens in a step with any.
        mixed: steps with prompt tokens.
        share: their share of the time, at most 1.
        steps: all steps.
        entering: computed prompts; below the rate if there is no more room.
        ends: ends of requests.
        together: mean number of arrivals during a step; not per second.
    """

    index: int
    decodes: int
    tokens: float
    mixed: float
    share: float
    steps: float
    entering: float
    ends: float
    together: float

    @classmethod
    def of(cls, table: StepTable, index: int, rate: float) -> Flow:
        """Return the steps with `table.decodes[index]` decodes, at a rate of requests per second.

        Prompts that arrive during a step share a step, as far as the token budget allows. Their
        number is Poisson distributed. So a step without any is a step of decodes alone, and the
        others have together / (1 - exp(-together)) prompts in the mean.
        """
        decodes, room, prompt = table.decodes[index], table.room(index), table.prompt
        alone = table.seconds(index, 0)
        chunk = prompt / math.ceil(prompt / room)
        tokens = chunk
        for _ in range(ROUNDS):
            seconds = table.seconds(index, tokens)
            share = min(1.0, rate * prompt / tokens * seconds)  # 1 if full, without rounding
            mixed = share / seconds
            steps = mixed + ((1 - share) / alone if decodes else 0.0)
            together = rate * (1 / steps if decodes else seconds)
            tokens = min(room, max(chunk, prompt * together / -math.expm1(-together)))
        return cls(
            index,
            decodes,
            tokens,
            mixed,
            share,
            steps,
            entering=min(rate, mixed * tokens / prompt),
            ends=decodes * steps / table.follow if table.follow else math.inf,
            together=together,
        )


def distribution(flows: Sequence[Flow]) -> tuple[list[float], float]:
    """Return how likely each number of decodes is.

    Args:
        flows: for all numbers of decodes in the table.

    Returns:
        The probability for each flow, and the probability that all places are taken. The latter is
        not in the list. Numbers between two flows count for both, by their distance.
    """
    logs = [0.0]
    parts = [(0, 1.0)]  # for each number of decodes: the entry below, and its part
    for index, (low, high) in enumerate(pairwise(flows)):
        width = high.decodes - low.decodes
        for more in range(1, width + 1):
            before, here = (more - 1) / width, more / width
            entering = low.entering + before * (high.entering - low.entering)
            ends = low.ends + here * (high.ends - low.ends)
            logs.append(logs[-1] + math.log(entering / ends))
            parts.append((index, 1 - here))
    top = max(logs)
    chances = [math.exp(log - top) for log in logs]
    last = flows[-1]
    if last.entering < last.ends < math.inf:  # with w requests waiting: (entering / ends)^w
        chances[-1] /= 1 - last.entering / last.ends
    total = math.fsum(chances)
    taken = chances.pop() / total if len(flows) > 1 else 0.0
    weights = [0.0] * len(flows)
    for chance, (index, part) in zip(chances, parts, strict=False):
        weights[index] += chance * part / total
        if part < 1:
            weights[index + 1] += chance * (1 - part) / total
    return weights, taken
