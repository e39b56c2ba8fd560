"""A benchmark: flags in; one run and one report per load; files out.

Each load (a number of users, or a rate) has its own run, with its own prompts. Several loads give
the curve of latency against rate.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop

from weft.errors import ConfigError, WeftError
from weft.models.plan.lengths import Lengths
from weft.serving.cli.bench.client import Client, Result
from weft.serving.cli.bench.report import (
    Report,
    Target,
    document,
    plot,
    positive,
    summarize,
    table,
)
from weft.serving.cli.bench.workload import (
    Workload,
    closed_loop,
    open_loop,
    plain_token_ids,
)
from weft.serving.cli.files import check_file, check_plot, write_whole
from weft.serving.config.progress import Progress

MIN_COUNT = 16  # least conversations per run, by default
PER_USER = 4  # default conversations per user
RATE_SECONDS = 60  # default duration at a rate
WARM_UP_RUN = -1  # a run number with prompts that no measured run has
LIST_TIMEOUT = aiohttp.ClientTimeout(total=30)  # for /models


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Parameters for a benchmark.

    Attributes:
        base_url: the server's URL, with /v1.
        workload: requests to make.
        users: closed-loop loads, one run each.
        rates: open-loop loads in conversations per second, one run each.
        count: conversations per run; 0 means four per user or 60 s at a rate, at least 16.
        model: the model's name on the server; None means the first in /v1/models.
        chat: use the chat API, which conversations with several turns need.
        extra: further fields for every request.
        target: limits for goodput.
        warm_up: conversations before the first run, not measured.
        timeout: maximum seconds per request; a longer one has failed.
        api_key: key to send as a bearer token.
        quiet: hide the progress.
    """

    base_url: str
    workload: Workload
    users: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    count: int = 0
    model: str | None = None
    chat: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    target: Target = field(default_factory=Target)
    warm_up: int = 1
    timeout: float = 600.0
    api_key: str | None = field(default=None, repr=False)
    quiet: bool = False

    def __post_init__(self) -> None:
        if not self.users and not self.rates:
            raise ConfigError("nothing to measure: give --users or --rate")
        if self.workload.turns > 1 and not self.chat:
            raise ConfigError("--turns needs --chat: only chat messages have roles")
        if self.chat and self.workload.token_ids:
            raise ConfigError("--tokenizer does not work with --chat: messages are text")


async def measure(
    benchmark: Benchmark, reported: Callable[[Report], None] | None = None
) -> list[Report]:
    """Run each load, and report it.

    After a cancellation, the finished requests of the current load are still reported.

    Args:
        benchmark: parameters.
        reported: called with each report at once.

    Raises:
        ConfigError: the server does not answer, or has no such model.
        WeftError: a warm-up request failed.
    """
    reports: list[Report] = []

    def report(new: Report) -> None:
        reports.append(new)
        if reported is not None:
            reported(new)

    model = benchmark.model or await find_model(benchmark)
    async with _session(benchmark) as session:
        client = Client(session, benchmark.base_url, model, benchmark.chat, benchmark.extra)
        await _warm_up(client, benchmark)
        for run, users in enumerate(benchmark.users):
            count = benchmark.count or max(MIN_COUNT, PER_USER * users)
            conversations = benchmark.workload.conversations(run)
            loop = partial(closed_loop, client, conversations, users=users, count=count)
            await _run(
                benchmark, f"{users} user" + "s" * (users > 1), count, loop, report, steady=True
            )
        for run, rate in enumerate(benchmark.rates, len(benchmark.users)):
            count = benchmark.count or max(MIN_COUNT, round(RATE_SECONDS * rate))
            conversations = benchmark.workload.conversations(run)
            seed = benchmark.workload.seed + run
            loop = partial(open_loop, client, conversations, rate=rate, count=count, seed=seed)
            await _run(benchmark, f"{rate:g}/s", count, loop, report, steady=False)
    return reports


async def _run(
    benchmark: Benchmark,
    load: str,
    count: int,
    loop: Callable[..., Coroutine[Any, Any, None]],
    report: Callable[[Report], None],
    *,
    steady: bool,
) -> None:
    """Run one load; `loop` gets a function that records results."""
    results: list[Result] = []
    with Progress(load, count * benchmark.workload.turns, quiet=benchmark.quiet) as progress:

        def record(result: Result) -> None:
            results.append(result)
            progress.advance(result.output_tokens)

        try:
            await loop(record=record)
        except asyncio.CancelledError:
            report(summarize(load, results, benchmark.target, steady=steady, interrupted=True))
            raise
    report(summarize(load, results, benchmark.target, steady=steady))


def _session(benchmark: Benchmark) -> aiohttp.ClientSession:
    headers = {"Authorization": f"Bearer {benchmark.api_key}"} if benchmark.api_key else {}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=benchmark.timeout),
        headers=headers,
    )


async def _warm_up(client: Client, benchmark: Benchmark) -> None:
    results: list[Result] = []
    conversations = benchmark.workload.conversations(WARM_UP_RUN)
    await closed_loop(
        client, conversations, users=1, count=benchmark.warm_up, record=results.append
    )
    for result in results:
        if result.error is not None:
            advice = ""
            if result.error.startswith(("HTTP 400", "HTTP 422")) and benchmark.extra:
                advice = (
                    f" (besides OpenAI's fields the request had {', '.join(benchmark.extra)}; "
                    "--no-ignore-eos leaves out ignore_eos)"
                )
            raise WeftError(f"the warm-up request failed: {result.error}{advice}")


async def find_model(benchmark: Benchmark) -> str:
    """Return the model's name: the requested one if the server has it, else the first.

    Raises:
        ConfigError: the server does not answer, has no models, or not the requested one.
    """
    url = benchmark.base_url + "/models"
    try:
        async with (
            _session(benchmark) as session,
            session.get(url, timeout=LIST_TIMEOUT) as response,
        ):
            status, body = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = str(error) or f"no answer within {LIST_TIMEOUT.total:g} s"
        raise ConfigError(
            f"no server at {benchmark.base_url} ({reason}); is it running? --url names another"
        ) from None
    if status in (401, 403):
        raise ConfigError(f"{url} answers {status}: it needs an API key; set --api-key")
    try:
        names = [model.id for model in _models.decode(body).data]
    except msgspec.MsgspecError:
        names = []
    if benchmark.model is None and not names:
        raise ConfigError(
            f"{url} lists no model (HTTP {status}); --url must end in /v1, or set --model"
        )
    if benchmark.model is not None and names and benchmark.model not in names:
        raise ConfigError(
            f"--model is {benchmark.model!r}; the server at {benchmark.base_url} has "
            + ", ".join(names)
        )
    return benchmark.model or names[0]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)

DEFAULT_USERS = (1, 4, 16)
INTERRUPTED = 130  # exit status


def main(*, as_json: bool, output: Path | None, plot: Path | None, **flags: Any) -> int:
    """Measure, write the table or JSON to stdout, and write the requested files.

    After an interrupt, finished requests are still reported.

    Returns:
        Exit status: 1 if a request failed.

    Raises:
        ConfigError: a flag is invalid; nothing was measured.
        WeftError: a warm-up request failed, or a file cannot be written.
    """
    if output is not None:
        check_file(output, "--output")
    if plot is not None:
        check_plot(plot)
    benchmark = benchmark_of(**flags)
    reports: list[Report] = []
    status = 0
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        benchmark = replace(benchmark, model=runner.run(find_model(benchmark)))
        try:
            runner.run(measure(benchmark, reports.append))
        except KeyboardInterrupt:
            status = INTERRUPTED
    if reports:
        _write(benchmark, reports, as_json, output, plot)
    return status or int(any(report.failed for report in reports))


def _write(
    benchmark: Benchmark,
    reports: list[Report],
    as_json: bool,
    output: Path | None,
    picture: Path | None,
) -> None:
    text = document(benchmark, reports)
    print(text if as_json else table(reports), flush=True)
    if output is not None:
        write_whole(output, lambda file: file.write_text(text + "\n", encoding="utf-8"))
    if picture is not None:
        workload = benchmark.workload
        title = f"{benchmark.model}: prompts {workload.prompt}, answers {workload.output} tokens"
        write_whole(picture, lambda file: plot(reports, file, title))


def benchmark_of(
    *,
    url: str,
    model: str | None,
    users: str | None,
    rate: str | None,
    count: int | None,
    prompt: str,
    output_tokens: str,
    shared_prefix: int,
    prefix_groups: int,
    turns: int,
    chat: bool,
    tokenizer: str | None,
    temperature: float,
    ignore_eos: bool,
    target: str | None,
    warm_up: int,
    timeout: str,
    seed: int | None,
    quiet: bool,
    api_key: str | None,
) -> Benchmark:
    """Make a benchmark from flags; ConfigError names an invalid one."""
    if not math.isfinite(temperature):
        raise ConfigError(f"--temperature is {temperature}; it must be in [0, 2]")
    rates = tuple(positive(part.strip(), "--rate") for part in rate.split(",")) if rate else ()
    return Benchmark(
        base_url=_base_url(url),
        workload=Workload(
            prompt=Lengths.parse(prompt, "--prompt"),
            output=Lengths.parse(output_tokens, "--output-tokens"),
            turns=turns,
            shared_prefix=shared_prefix,
            prefix_groups=prefix_groups,
            token_ids=() if tokenizer is None else plain_token_ids(tokenizer),
            seed=secrets.randbelow(2**31) if seed is None else seed,
        ),
        users=_users(users) if users else () if rates else DEFAULT_USERS,
        rates=rates,
        count=count or 0,
        model=model,
        chat=chat,
        extra={"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {}),
        target=Target.parse(target) if target else Target(),
        warm_up=warm_up,
        timeout=positive(timeout, "--timeout"),
        api_key=api_key,
        quiet=quiet,
    )


def _users(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"--users is {text!r}; it must be numbers above 0, such as 1,16,64")
    return tuple(map(int, parts))


def _base_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000/v1")
    return url.rstrip("/")
