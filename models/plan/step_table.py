"""Seconds for an engine's steps under a load, by decodes and prompt tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from weft.errors import ConfigError
from weft.models.plan.batch import Batch
from weft.models.plan.load import Load

StepSeconds = Callable[[Batch], float]


class StepTable:
    """Seconds for steps, from about 300 questions to a cost model.

    Between the points, seconds are linear in the number of prompt tokens. Contexts
    are means over tokens; a decode's has the prompt and the answer so far.

    Args:
        load: lengths and prefix hits; its rate does not count.
        step_seconds: predicted seconds for a step, above 0.
        max_num_seqs: maximum number of running requests.
        max_num_batched_tokens: maximum number of tokens in a step.
        kv_tokens: the KV cache's size in tokens.

    Attributes:
        prompt: mean number of prompt tokens to compute in a request.
        follow: mean number of tokens in an answer after the first one.
        decodes: numbers of decodes in ascending order, from 0 to the most that run at once.
        budget: maximum number of tokens in a step.

    Raises:
        ConfigError: the KV cache does not hold a single request.
    """

    def __init__(
        self,
        load: Load,
        step_seconds: StepSeconds,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        kv_tokens: int,
    ) -> None:
        self.prompt = load.prompt.mean * (1 - load.hit)
        self.follow = load.answer.mean - 1
        self.budget = max_num_batched_tokens
        self._context = load.decode_context
        shared = load.prompt.mean * load.hit * load.groups
        held = self._context - load.prompt.mean * load.hit
        running = int((kv_tokens - shared) / held)
        if running < 1:
            raise ConfigError(
                f"the KV cache has {kv_tokens} tokens; --load needs {shared + held:.0f} for shared "
                "prefixes and one request"
            )
        # One token in a step is left for prompts. Otherwise they would wait for ever.
        most = min(max_num_seqs, running, max(1, max_num_batched_tokens - 1))
        self.decodes = [*_steps_of_half(most), most] if self.follow else [0]
        self._tokens = [*_steps_of_half(max_num_batched_tokens, 16), max_num_batched_tokens]
        # Half of the prompt, and all that the cache serves; long prompts have more of the tokens.
        prompt_context = load.prompt.mean_square / load.prompt.mean * (1 + load.hit) / 2
        self._seconds = [
            [
                step_seconds(self._batch(decodes, tokens, prompt_context))
                if decodes or tokens
                else 0.0
                for tokens in self._tokens
            ]
            for decodes in self.decodes
        ]

    def _batch(self, decodes: int, tokens: int, prompt_context: float) -> Batch:
        if not tokens:
            return Batch(decodes, self._context)
        prompts = max(1, round(tokens / self.prompt))
        return Batch(decodes, self._context if decodes else 0.0, prompts, tokens, prompt_context)

    def seconds(self, index: int, tokens: float) -> float:
        """Return the seconds of a step with `decodes[index]` decodes and some prompt tokens."""
        points, row = self._tokens, self._seconds[index]
        above = bisect_left(points, tokens)
        if tokens == points[above]:
            return row[above]
        low, high = points[above - 1], points[above]
        share = (tokens - low) / (high - low)
        return row[above - 1] + share * (row[above] - row[above - 1])

    def chunks(self, index: int, tokens: float) -> float:
        """Return the seconds to compute prompt tokens in as many steps as they need."""
        room = self.room(index)
        full = int(tokens / room)
        rest = tokens - full * room
        return full * self.seconds(index, room) + (self.seconds(index, rest) if rest >= 1 else 0.0)

    def room(self, index: int) -> int:
        """Return the maximum number of prompt tokens beside the decodes."""
        return max(1, self.budget - self.decodes[index])


def _steps_of_half(most: int, first: int = 1) -> list[int]:
    """Return 0, 1 and then numbers below `most` that grow by up to a half: 2, 3, 4, 6, 8, 12."""
    numbers = [0, 1] if most > 1 else [0]
    number = max(2, first)
    while number < most:
        numbers += [each for each in (number, number * 3 // 2) if each < most]
        number *= 2
    return numbers
