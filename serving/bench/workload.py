"""What a benchmark asks: conversations of random text with chosen lengths.

Lengths are drawn from a small language of distributions:

    128         always 128
    64-256      uniform
    ~200        exponential with mean 200, at least 1 (long-tailed, as chat traffic is)

Prompts are random token ids drawn from the tokenizer's vocabulary when one is
given (exact lengths, completions API), else random words (about one token
each). Every prompt is fresh, so nothing is served from a prefix cache unless
a shared prefix or a further turn of a conversation asks for it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.errors import ConfigError

WORDS = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member"
).split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens; see the module's text for how one is written."""

    low: int
    high: int
    exponential: bool = False

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read "128", "64-256" or "~200"; ConfigError names `flag` otherwise."""
        if match := re.fullmatch(r"(~?)(\d+)(?:-(\d+))?", text):
            tilde, low, high = match.groups()
            lengths = cls(int(low), int(high or low), bool(tilde))
            if lengths.low >= 1 and lengths.high >= lengths.low and not (tilde and high):
                return lengths
        raise ConfigError(
            f"{flag} is {text!r}; it must be a length (128), a range (64-256) "
            "or an exponential mean (~200)"
        )

    def draw(self, rng: random.Random) -> int:
        """One length."""
        if self.exponential:
            return max(1, round(rng.expovariate(1 / self.low)))
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    Attributes:
        prompt: what the user adds: token ids, or text.
        output_tokens: how many tokens the answer shall have.
    """

    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless conversations, the same for the same seed.

    Attributes:
        prompt: length of each turn's new text.
        output: length of each answer.
        turns: requests in one conversation; each carries the whole conversation so far.
        shared_prefix: tokens that the first turns of one group have in common.
        prefix_groups: how many different shared prefixes there are.
        token_ids: ids to draw prompts from; empty means prompts are words.
        seed: of everything random.
    """

    prompt: Lengths
    output: Lengths
    turns: int = 1
    shared_prefix: int = 0
    prefix_groups: int = 1
    token_ids: Sequence[int] = ()
    seed: int = 0

    def conversations(self) -> Iterator[list[Turn]]:
        """One conversation after the other, for ever."""
        rng = random.Random(self.seed)
        prefixes = [self._tokens(rng, self.shared_prefix) for _ in range(self.prefix_groups)]
        while True:
            prefix = rng.choice(prefixes)
            conversation = []
            for i in range(self.turns):
                tokens = self._tokens(rng, self.prompt.draw(rng))
                if i == 0:
                    tokens = prefix + tokens
                conversation.append(Turn(self._join(tokens), self.output.draw(rng)))
            yield conversation

    def _tokens(self, rng: random.Random, count: int) -> list[int] | list[str]:
        return rng.choices(self.token_ids or WORDS, k=count)  # type: ignore[arg-type]

    def _join(self, tokens: list[int] | list[str]) -> list[int] | str:
        return list(tokens) if self.token_ids else " ".join(map(str, tokens))  # type: ignore[arg-type]


def plain_token_ids(tokenizer_path: str) -> list[int]:
    """Ids of a tokenizer.json's ordinary tokens: no special ones, nothing added."""
    from pathlib import Path

    from tokenizers import Tokenizer

    file = Path(tokenizer_path)
    file = file / "tokenizer.json" if file.is_dir() else file
    if not file.is_file():
        raise ConfigError(f"--tokenizer is {tokenizer_path}; there is no tokenizer.json")
    tokenizer = Tokenizer.from_file(str(file))
    return sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()))
