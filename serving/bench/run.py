"""One benchmark from options to report: `weft bench`.

Each load (a number of users, or a rate) is one run with prompts of its own;
a sweep over several loads gives the curve of latency against rate.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp

from weft.errors import ConfigError
from weft.serving.bench.client import Client, Result
from weft.serving.bench.load import closed_loop, open_loop
from weft.serving.bench.report import Report, Target, plot, render, summarize
from weft.serving.bench.workload import Workload
from weft.serving.progress import Progress


@dataclass(frozen=True, slots=True)
class Benchmark:
    """What to measure.

    Attributes:
        base_url: of the server, with its /v1.
        workload: what is asked.
        users: closed-loop loads, one run each.
        rates: open-loop loads in conversations per second, one run each.
        count: conversations in each run; 0 means four per user (at least 16), or 60 s of a rate.
        model: its name on the server; the first of /v1/models if None.
        chat: use the chat API; needed for conversations of several turns.
        extra: fields of every request besides.
        target: what goodput counts.
        warm_up: conversations before the first run, not counted.
    """

    base_url: str
    workload: Workload
    users: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    count: int = 0
    model: str | None = None
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    target: Target = Target()
    warm_up: int = 1
    api_key: str | None = None
    quiet: bool = False

    def __post_init__(self) -> None:
        if not self.users and not self.rates:
            raise ConfigError("nothing to measure: give --users or --rate")
        if self.workload.turns > 1 and not self.chat:
            raise ConfigError("--turns needs --chat: a conversation has roles")
        if self.chat and self.workload.token_ids:
            raise ConfigError("--tokenizer does not go with --chat: messages are text")


async def measure(benchmark: Benchmark) -> list[Report]:
    """Run every load in turn, and report each.

    Raises:
        ConfigError: the server does not answer, or has no model.
    """
    headers = {"Authorization": f"Bearer {benchmark.api_key}"} if benchmark.api_key else {}
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    ) as session:
        model = benchmark.model or await _first_model(session, benchmark.base_url)
        client = Client(session, benchmark.base_url, model, benchmark.chat, benchmark.extra)
        warm = replace(benchmark.workload, seed=benchmark.workload.seed - 1).conversations()
        await closed_loop(client, warm, users=1, count=benchmark.warm_up, progress=_ignore)
        loads: list[float] = [*benchmark.users, *benchmark.rates]
        reports = []
        for i, load in enumerate(loads):
            is_rate = i >= len(benchmark.users)
            reports.append(await _one(client, benchmark, load, is_rate=is_rate, run=i))
        return reports


async def _one(
    client: Client, benchmark: Benchmark, load: float, *, is_rate: bool, run: int
) -> Report:
    workload = replace(benchmark.workload, seed=benchmark.workload.seed + run)
    label = f"{load:g}/s" if is_rate else f"{load:g} users"
    count = benchmark.count or (round(60 * load) if is_rate else max(16, 4 * int(load)))
    with Progress(label, count * workload.turns, quiet=benchmark.quiet) as bar:
        progress: Callable[[Result], None] = lambda result: bar.advance(result.output_tokens)  # noqa: E731
        if is_rate:
            results = await open_loop(
                client, workload.conversations(), rate=load, count=count,
                seed=workload.seed, progress=progress,
            )  # fmt: skip
        else:
            results = await closed_loop(
                client, workload.conversations(), users=int(load), count=count, progress=progress
            )
    return summarize(label, results, benchmark.target)


def _ignore(result: Result) -> None:
    if result.error:
        raise ConfigError(f"the warm-up request failed: {result.error}")


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    url = base_url + "/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"no model at {url} ({error}); is the server up? --url names it") from None


def run(
    benchmark: Benchmark, *, as_json: bool, output: Path | None, picture: Path | None
) -> int:
    """Measure, then write the table (or JSON) to stdout, and the files that were asked for."""
    reports = asyncio.run(measure(benchmark))
    document = json.dumps([asdict(report) for report in reports], indent=2)
    print(document if as_json else render(reports))
    if output is not None:
        output.write_text(document + "\n")
    if picture is not None:
        plot(reports, picture, f"{benchmark.base_url}, prompt {benchmark.workload.prompt}")
    failed = sum(report.failed for report in reports)
    if failed:
        print(f"{failed} requests failed", file=sys.stderr)
    return 1 if failed else 0
