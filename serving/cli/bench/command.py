"""`weft bench`: from flags to a benchmark, and from its reports to what was asked for."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from weft.errors import ConfigError
from weft.serving.cli.bench.output import check_file, check_plot, document, plot, table, write_whole
from weft.serving.cli.bench.report import Report, Target, positive
from weft.serving.cli.bench.run import Benchmark, find_model, measure
from weft.serving.cli.bench.workload import Lengths, Workload, plain_token_ids

DEFAULT_USERS = (1, 4, 16)
INTERRUPTED = 130  # exit status


def main(*, as_json: bool, output: Path | None, plot: Path | None, **flags: Any) -> int:
    """Measure; then write the table (or JSON) to stdout, and the files that were asked for.

    An interrupt ends the measuring, and what has finished is still written.

    Returns:
        the exit status: 1 when a request failed.

    Raises:
        ConfigError: a flag cannot work; nothing was measured.
        WeftError: the requests that warm up failed, or a file cannot be written.
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
    """The benchmark that flags ask for; ConfigError names the one that cannot work."""
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
