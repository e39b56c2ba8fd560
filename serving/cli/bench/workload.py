"""What a benchmark asks: conversations of random text with chosen lengths.

Lengths are drawn from a small language of distributions:

    128         always 128
    64-256      uniform
    ~200        exponential with mean 200, at least 1 (long-tailed, as chat traffic is)

Prompts are random token ids drawn from the tokenizer's vocabulary when one is
given (exact lengths, completions API), else random words (about one token
each). Every prompt is fresh, so nothing is served from a prefix cache unless
a shared prefix or a further turn of a conversation asks for it.

When a benchmark asks: a fixed number of users, or arrivals at a rate.

Closed loop: each of N users asks again as soon as it has its answer; shows
what a server can do. Open loop: conversations arrive as a Poisson process,
whether or not the server keeps up; shows what users at large would feel, and
where the queue begins to grow.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.models.checkpoint.locate import BUNDLED, locate

if TYPE_CHECKING:
    from weft.serving.cli.bench.client import Client, Record

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens; see the module's text for how one is written."""

    low: int
    high: int
    exponential: bool = False

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read "128", "64-256" or "~200"; ConfigError names `flag` otherwise."""
        if match := re.fullmatch(r"(~?)([0-9]{1,9})(?:-([0-9]{1,9}))?", text):
            tilde, low, high = match.groups()
            lengths = cls(int(low), int(high or low), bool(tilde))
            if lengths.low >= 1 and lengths.high >= lengths.low and not (tilde and high):
                return lengths
        raise ConfigError(
            f"{flag} is {text!r}; it must be a length (128), a range (64-256) "
            "or an exponential mean (~200)"
        )

    def __str__(self) -> str:
        if self.exponential:
            return f"~{self.low}"
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"

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

    def conversations(self, run: int = 0) -> Iterator[list[Turn]]:
        """One conversation after the other, for ever; each run of a seed has others."""
        rng = random.Random(f"{self.seed}/{run}")
        prefixes = [self._draw(rng, self.shared_prefix) for _ in range(self.prefix_groups)]
        while True:
            head = rng.choice(prefixes)
            conversation = []
            for _ in range(self.turns):
                new = self._draw(rng, self.prompt.draw(rng))
                conversation.append(Turn(self._prompt(head + new), self.output.draw(rng)))
                head = []
            yield conversation

    def _draw(self, rng: random.Random, count: int) -> list[int]:
        """Token ids, or indices of words."""
        return rng.choices(self.token_ids or range(len(WORDS)), k=count)

    def _prompt(self, drawn: list[int]) -> list[int] | str:
        return drawn if self.token_ids else " ".join(WORDS[i] for i in drawn)


def plain_token_ids(tokenizer: str) -> list[int]:
    """Ids of a tokenizer's ordinary tokens: no special ones, nothing added.

    Args:
        tokenizer: a tokenizer.json, a directory that has one, or a bundled model's name.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = locate(tokenizer) if tokenizer in BUNDLED else Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer is {tokenizer}; there is no tokenizer.json")
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001  the library raises nothing narrower
        raise ConfigError(f"--tokenizer is {tokenizer}; {file} cannot be read: {error}") from None
    plain = set(backend.get_vocab(with_added_tokens=False).values())
    return sorted(plain - backend.get_added_tokens_decoder().keys())


async def closed_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    users: int,
    count: int,
    record: Record,
) -> None:
    """`users` at once hold `count` conversations in all."""
    left = iter(range(count))

    async def user() -> None:
        for _ in left:
            await client.ask(next(conversations), time.perf_counter(), record)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, count)):
            group.create_task(user())


async def open_loop(
    client: Client,
    conversations: Iterator[list[Turn]],
    *,
    rate: float,
    count: int,
    seed: int,
    record: Record,
) -> None:
    """`count` conversations that arrive independently, `rate` a second on average."""
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            conversation = next(conversations)
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(client.ask(conversation, due, record))
