"""The loads that contestants are put under, and the figures that come out.

A server is asked over streamed HTTP by weft's load generator, which runs on
the same cores. Prompts are random token ids, fresh for every seed and equal
for all contestants; greedy, and exactly as long as asked for.

    one      1 user                      decode_rate
    many     16 users                    batch_rate, batch_itl_p99
    crowd    64 users, mixed outputs     goodput
    prompt   a long prompt, then another with the same beginning
                                         first_ttft, again_ttft

Rates in tokens (goodput: requests) per second, times in seconds.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import aiohttp
import numpy as np

from peers.contestants import MODEL
from peers.process import Contender, PeerError
from weft.models.plan.lengths import Lengths
from weft.serving.cli.bench.client import Client
from weft.serving.cli.bench.report import Report, Target
from weft.serving.cli.bench.run import Benchmark, measure
from weft.serving.cli.bench.workload import Turn, Workload

Figures = dict[str, float]
_ASKED = {"ignore_eos": True, "temperature": 0.0}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the loads are; lengths in tokens, the rest counts of requests or users."""

    prompt: int = 128
    output: int = 128
    one: int = 1
    users: int = 16
    many: int = 32
    crowd_users: int = 64
    crowd: int = 96
    crowd_output: tuple[int, int] = (16, 256)
    prefix: int = 1400
    tail: int = 100

    def quick(self) -> Sizes:
        """Fewer requests; figures say less."""
        return replace(self, many=16, crowd=64)


class Driver(Protocol):
    """Puts a contestant under a load."""

    def run(self, load: str, seed: int) -> Figures:
        """The figures of a load."""
        ...


@dataclass(frozen=True, slots=True)
class HttpDriver:
    """Of an OpenAI-compatible server.

    Attributes:
        base_url: with its /v1.
        token_ids: to make prompts of.
        target: what goodput counts.
    """

    base_url: str
    token_ids: Sequence[int]
    target: Target
    sizes: Sizes

    def run(self, load: str, seed: int) -> Figures:
        """See Driver; raises PeerError when a request fails."""
        s = self.sizes
        fixed = Lengths(s.output, s.output)
        if load == "prompt":
            return asyncio.run(self._prompt(seed))
        if load == "one":
            report = self._measure(1, s.one, fixed, seed)
            return {"decode_rate": 1 / _known(report.tpot["p50"])}
        if load == "many":
            report = self._measure(s.users, s.many, fixed, seed)
            return {"batch_rate": report.total_rate, "batch_itl_p99": _known(report.itl["p99"])}
        report = self._measure(s.crowd_users, s.crowd, Lengths(*s.crowd_output), seed)
        return {"goodput": report.goodput}

    def _measure(self, users: int, count: int, output: Lengths, seed: int) -> Report:
        workload = Workload(
            prompt=Lengths(self.sizes.prompt, self.sizes.prompt),
            output=output,
            token_ids=self.token_ids,
            seed=seed,
        )
        benchmark = Benchmark(
            base_url=self.base_url, workload=workload, users=(users,), count=count, model=MODEL,
            extra=_ASKED, target=self.target, warm_up=0, quiet=True,
        )  # fmt: skip
        (report,) = asyncio.run(measure(benchmark))
        if report.failed:
            raise PeerError(f"{report.failed} of {report.requests} failed: {report.first_error}")
        if report.short:
            raise PeerError(f"{report.short} answers ended early: it does not know ignore_eos")
        return report

    async def _prompt(self, seed: int) -> Figures:
        # A connection each: llama.cpp drops one that a streamed answer has used.
        connector = aiohttp.TCPConnector(force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            client = Client(session, self.base_url, MODEL, False, _ASKED)
            times = []
            for prompt in _with_prefix(self.token_ids, self.sizes, seed):
                (result,) = await client.ask([Turn(prompt, 2)], due=0.0)
                if result.error:
                    raise PeerError(f"a prompt of {len(prompt)} tokens failed: {result.error}")
                times.append(result.arrivals[0] - result.start)
        return {"first_ttft": times[0], "again_ttft": times[1]}


@dataclass(frozen=True, slots=True)
class PipeDriver:
    """Of generate.py: static batches, so one batch of users stands for all of them."""

    contender: Contender
    token_ids: Sequence[int]
    sizes: Sizes

    def wait_ready(self) -> None:
        """Wait for the model to be loaded."""
        self._reply()

    def run(self, load: str, seed: int) -> Figures:
        """See Driver; there is no crowd, and no prefix is ever kept."""
        s = self.sizes
        if load == "one":
            steps = self._generate(_prompts(self.token_ids, 1, s.prompt, seed), s.output)
            return {"decode_rate": (len(steps) - 1) / (steps[-1] - steps[0])}
        if load == "many":
            steps = self._generate(_prompts(self.token_ids, s.users, s.prompt, seed), s.output)
            return {
                "batch_rate": s.users * len(steps) / steps[-1],
                "batch_itl_p99": float(np.percentile(np.diff(steps), 99)),
            }
        first, _ = _with_prefix(self.token_ids, s, seed)
        return {"first_ttft": self._generate([first], 1)[0]}

    def _generate(self, prompts: list[list[int]], output_tokens: int) -> list[float]:
        job = {"prompts": prompts, "output_tokens": output_tokens}
        pipe = self.contender.process.stdin
        assert pipe is not None
        pipe.write(json.dumps(job).encode() + b"\n")
        pipe.flush()
        steps: list[float] = self._reply()["steps"]
        return steps

    def _reply(self) -> dict[str, Any]:
        pipe = self.contender.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise self.contender.fail("ended")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _known(time: float | None) -> float:
    """A percentile of answers that have more than one token."""
    assert time is not None
    return time


def _prompts(token_ids: Sequence[int], count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(token_ids, k=length) for _ in range(count)]


def _with_prefix(token_ids: Sequence[int], sizes: Sizes, seed: int) -> tuple[list[int], list[int]]:
    """Two prompts that share their first `prefix` tokens and differ in their `tail`."""
    rng = random.Random(seed)
    prefix = rng.choices(token_ids, k=sizes.prefix)
    first, second = (prefix + rng.choices(token_ids, k=sizes.tail) for _ in range(2))
    return first, second
