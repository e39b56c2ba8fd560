"""A plan's load, and limits on its latency.

    in=1000,out=200,rate=8             8 requests per second, at random times
    in=500-1500,out=~200,rate=8,hit=0.3,groups=20
    in=1000,out=200,users=64           each user asks again at once after each answer
    log=requests.jsonl,hit=0.3         recorded requests

`hit` is the prefix cache's share of the prompt tokens. The prompts in a group have this share of
their tokens in common, at the beginning.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError
from weft.models.plan.arrivals import Arrival, read_log
from weft.models.plan.lengths import Lengths

MOST = 10**6  # requests per second, users or groups
EXAMPLE = "in=1000,out=200,rate=8"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests with random lengths; either `rate` or `users` is set.

    Attributes:
        prompt: lengths of the prompts.
        answer: lengths of the answers.
        rate: requests per second, as a Poisson process; None in a closed loop.
        users: number of users in a closed loop; None at a fixed rate.
        hit: the prefix cache's share of the prompt tokens, in [0, 1).
        groups: number of different beginnings.
        recorded: the requests of a log.
    """

    prompt: Lengths
    answer: Lengths
    rate: float | None = None
    users: int | None = None
    hit: float = 0.0
    groups: int = 1
    recorded: tuple[Arrival, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Load:
        """Parse a load in the module's notation.

        Raises:
            ConfigError: a key is unknown, missing or given twice, or a value is out of range.
        """
        values = _pairs(text, "--load", ("in", "out", "rate", "users", "hit", "groups", "log"))
        hit = _number(
            values.pop("hit", "0"), "hit of --load", "from 0 to below 1", lambda x: 0 <= x < 1
        )
        groups = _count(values.pop("groups", "1"), "groups of --load")
        if "log" in values:
            path = values.pop("log")
            if values:
                raise ConfigError(
                    f"--load has log and {next(iter(values))}; a log already has the lengths "
                    "and times of its requests"
                )
            return cls.of(read_log(Path(path).expanduser()), hit, groups)
        for name in ("in", "out"):
            if name not in values:
                raise ConfigError(f"--load is {text!r}; it has no {name} ({EXAMPLE})")
        if ("rate" in values) == ("users" in values):
            raise ConfigError(f"--load is {text!r}; it must have either rate or users ({EXAMPLE})")
        rate = users = None
        if "rate" in values:
            rate = _number(
                *(values["rate"], "rate of --load", f"above 0, at most {MOST}"),
                lambda x: 0 < x <= MOST,
            )
        else:
            users = _count(values["users"], "users of --load")
        prompt = Lengths.parse(values["in"], "in of --load")
        answer = Lengths.parse(values["out"], "out of --load")
        return cls(prompt, answer, rate, users, hit, groups)

    @classmethod
    def of(cls, recorded: list[Arrival], hit: float = 0.0, groups: int = 1) -> Load:
        """Return the load of recorded requests, at two times at least."""
        return cls(
            Lengths.of([arrival.prompt for arrival in recorded]),
            Lengths.of([arrival.answer for arrival in recorded]),
            rate=(len(recorded) - 1) / (recorded[-1].time - recorded[0].time),
            hit=hit,
            groups=groups,
            recorded=tuple(recorded),
        )

    def check_context(self, max_model_len: int) -> None:
        """Check that the model's context holds the requests; the mean ones, if exponential.

        Args:
            max_model_len: maximum number of tokens in a request.

        Raises:
            ConfigError: it does not.
        """
        longest = max(
            (each.prompt + each.answer for each in self.recorded),
            default=self.prompt.high + self.answer.high,
        )
        if longest > max_model_len:
            raise ConfigError(
                f"--load has requests with {longest} tokens (in {self.prompt}, out {self.answer}); "
                f"the model's context has {max_model_len}"
            )

    @property
    def decode_context(self) -> float:
        """Mean number of tokens that a decode attends to; long answers have more decodes."""
        return self.prompt.mean + self.answer.mean_square / self.answer.mean / 2

    def arrivals(self, max_model_len: int, seed: int = 0) -> Iterator[Arrival]:
        """Yield the requests by their time: recorded ones, or random ones without end.

        In a closed loop, all of them arrive at 0; the caller lets each wait for an answer.

        Args:
            max_model_len: maximum number of tokens in a request; longer ones are cut.
            seed: the same seed gives the same requests.
        """
        rng = random.Random(seed)
        for each in self.recorded or self._draw(rng):
            prompt = min(each.prompt, max_model_len - 1)
            answer = min(each.answer, max_model_len - prompt)
            yield Arrival(
                each.time, prompt, answer, round(self.hit * prompt), rng.randrange(self.groups)
            )

    def _draw(self, rng: random.Random) -> Iterator[Arrival]:
        time = 0.0
        while True:
            if self.rate is not None:
                time += rng.expovariate(self.rate)
            yield Arrival(time, self.prompt.draw(rng), self.answer.draw(rng))


@dataclass(frozen=True, slots=True)
class Latency:
    """Latencies in seconds.

    Attributes:
        ttft_p50, ttft_p99: time from a request's arrival to its first token, median and 99th
            percentile.
        itl_p50, itl_p99: times between tokens of an answer, over all answers.
    """

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float


@dataclass(frozen=True, slots=True)
class Objective:
    """Limits on latency.

    Attributes:
        limits: fields of `Latency` and their maximum in seconds; without any, all is well.
    """

    limits: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Objective:
        """Parse "ttft=1,itl=0.03": limits on 99th percentiles, or "ttft.p50=0.5": on medians.

        Raises:
            ConfigError: a name is unknown or given twice, or a limit is not above 0.
        """
        names = [f"{kind}{at}" for kind in ("ttft", "itl") for at in ("", ".p50", ".p99")]
        values = _pairs(text, "--slo", names)
        for kind in ("ttft", "itl"):
            if kind in values and f"{kind}.p99" in values:
                raise ConfigError(f"--slo has {kind} and {kind}.p99, which are the same; keep one")
        return cls(
            tuple(
                (
                    (name if "." in name else f"{name}.p99").replace(".", "_"),
                    _number(value, f"{name} of --slo", "above 0", lambda x: 0 < x < math.inf),
                )
                for name, value in values.items()
            )
        )

    def met(self, latency: Latency) -> bool:
        """Return whether no limit is exceeded."""
        return all(getattr(latency, name) <= seconds for name, seconds in self.limits)


def _pairs(text: str, flag: str, names: Sequence[str]) -> dict[str, str]:
    """Split "name=value,name=value"; ConfigError for unknown, repeated and bare names."""
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if name not in names:
            raise ConfigError(f"{flag} has {name!r}; it can have {', '.join(names)}")
        if not equals or not value:
            raise ConfigError(f"{flag} has {name} without a value; write {name}=VALUE")
        if name in values:
            raise ConfigError(f"{flag} has {name} twice")
        values[name] = value
    return values


def _number(text: str, name: str, wanted: str, valid: Callable[[float], bool]) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if valid(number):  # no comparison holds for NaN
        return number
    raise ConfigError(f"{name} is {text!r}; it must be a number {wanted}")


def _count(text: str, name: str) -> int:
    if re.fullmatch("[0-9]{1,7}", text) and 0 < int(text) <= MOST:
        return int(text)
    raise ConfigError(f"{name} is {text!r}; it must be a whole number from 1 to {MOST}")
