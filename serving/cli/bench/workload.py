"""The requests of a benchmark: conversations with random text, and the times when they start.

Lengths come from one of three distributions: see models/plan/lengths.py.

Prompts are random token ids from the tokenizer's vocabulary, if a tokenizer is given: exact
lengths, for the completions API. Else they are random words, about one token each. Every prompt is
new, so a prefix cache serves only shared prefixes and later turns.

In a closed loop, each of N users asks again after each answer; this shows the server's capacity. In
an open loop, conversations arrive as a Poisson process, even if the server cannot keep up; this
shows real users' latency, and the rate at which the queue starts to grow.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.models.checkpoint.gguf_header import is_gguf
from weft.models.checkpoint.locate import BUNDLED, locate
from weft.models.plan.lengths import Lengths

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
class Turn:
    """One request in a conversation.

    Attributes:
        prompt: the user's new message: token ids or text.
        output_tokens: requested length of the answer.
    """

    prompt: list[int] | str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """An endless stream of conversations; the same seed gives the same stream.

    Attributes:
        prompt: lengths of each turn's new text.
        output: lengths of the answers.
        turns: requests per conversation; each carries the whole history.
        shared_prefix: number of tokens that all conversations in a group start with.
        prefix_groups: number of groups.
        token_ids: ids for prompts; if empty, prompts are words.
        seed: seed for all random choices.
    """

    prompt: Lengths
    output: Lengths
    turns: int = 1
    shared_prefix: int = 0
    prefix_groups: int = 1
    token_ids: Sequence[int] = ()
    seed: int = 0

    def conversations(self, run: int = 0) -> Iterator[list[Turn]]:
        """Yield conversations without end; each run of a seed has different ones."""
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
        """Draw token ids, or indices into `WORDS`."""
        return rng.choices(self.token_ids or range(len(WORDS)), k=count)

    def _prompt(self, drawn: list[int]) -> list[int] | str:
        return drawn if self.token_ids else " ".join(WORDS[i] for i in drawn)


def plain_token_ids(tokenizer: str) -> list[int]:
    """Return the ids of a tokenizer's ordinary tokens, without special and added ones.

    Args:
        tokenizer: a tokenizer.json, a directory with one, or a bundled model's name.

    Raises:
        ConfigError: the file does not exist or cannot be read.
    """
    from tokenizers import Tokenizer

    path = locate(tokenizer) if tokenizer in BUNDLED else Path(tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer is {tokenizer}; there is no tokenizer.json")
    if is_gguf(file):
        raise ConfigError(
            f"--tokenizer is {tokenizer}; it must be a tokenizer.json or a directory with one, not "
            "a GGUF file"
        )
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
    """Hold `count` conversations with `users` concurrent users."""
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
    """Start `count` conversations at random times, on average `rate` per second."""
    rng = random.Random(seed)
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            conversation = next(conversations)
            due += rng.expovariate(rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(client.ask(conversation, due, record))
