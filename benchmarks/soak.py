"""Mixed load on a real server for a long time: does it leak, does it get slower?

    python benchmarks/soak.py                          30 minutes, of the bundled model
    python benchmarks/soak.py --minutes 2 ./MODEL --tp 2

`weft serve` gets, all at once: clients that ask one answer after the other, streamed and whole,
some of which hang up in the middle; requests that must be refused; a burst every few seconds that
overfills the queue; and a probe, the same request again and again, whose time is compared. What
is measured of the server and its processes:

- resident memory (RSS): its slope, with a 95 % confidence interval;
- KV blocks and requests that are left when the load has ended;
- file descriptors that are open then, beside those before;
- p99 of the probe, of the second half beside the first.

The slope is the mean difference between windows that follow each other, with Student's t over
the differences: samples within a window are anything but independent, which a regression over all
of them would take for certainty. It leaks if the whole interval is above zero. Exits with 1 then,
and when anything is left.

Not handled: other processes on the machine, which make the probe slower (look at the drift twice).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import itertools
import json
import math
import random
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import aiohttp
import psutil

CLIENTS = 4
WARM_UP = 0.25  # of the time: caches fill, allocators take what they will keep
WINDOWS = 10
BURST_EVERY = 5.0  # seconds
BURST = 40  # requests
START = 300.0  # seconds for the model to be loaded
END = 60.0  # seconds for requests to end when the load has; those that do not are leaked
SERVER = ("--max-num-seqs=8", "--max-queue=16", "--port=0")

# Two-sided 95 % quantiles of Student's t, by degrees of freedom.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}

HOSTILE: list[dict[str, Any]] = [
    {"n": 10**9},
    {"logprobs": 10**6},
    {"stop": ["a"] * 100_000},
    {"max_tokens": -1},
    {"temperature": 1e308},
    {"prompt": [999_999_999]},
    {"prompt": "a" * 2_000_000},
    {"logit_bias": {"x": 1}},
    {"no_such_field": {"a": [1, 2, 3]}},
    {"model": "another"},
]


@dataclass
class Sample:
    """The server at one moment: seconds since the start, bytes of all its processes."""

    seconds: float
    rss: int


@dataclass
class Soak:
    """What has been seen.

    Attributes:
        samples: of memory.
        probes: (seconds since the start, seconds that it took).
        statuses: of all answers, by HTTP status; "gone" for those hung up on.
        unexpected: answers that should not have come, some of them.
    """

    samples: list[Sample] = field(default_factory=list)
    probes: list[tuple[float, float]] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)

    def count(self, status: int, *expected: int, text: str = "") -> None:
        """Count an answer, which may be one of some."""
        self.statuses[str(status)] += 1
        if status not in expected and len(self.unexpected) < 10:
            self.unexpected.append(f"{status} instead of {expected}: {text[:200]}")


@dataclass
class Report:
    """The figures.

    Attributes:
        minutes: of load.
        rss_mib: at the end.
        slope: of memory, MiB per hour, after the warm-up.
        interval: 95 % confidence interval of the slope.
        leaked_requests: that the server still has, of nobody.
        leaked_blocks: share of the KV cache that is held by nobody's request.
        leaked_files: descriptors that are open, beside those before the load.
        p99: seconds of the probe, in the first and the second half.
        probes: how often it was asked.
        statuses: of all answers.
        unexpected: answers that should not have come.
    """

    minutes: float
    rss_mib: float
    slope: float
    interval: tuple[float, float]
    leaked_requests: int
    leaked_blocks: float
    leaked_files: int
    p99: tuple[float, float]
    probes: int
    statuses: dict[str, int]
    unexpected: list[str]

    @property
    def passed(self) -> bool:
        """Whether nothing has leaked, and every answer was one that should come."""
        left = self.leaked_requests or self.leaked_blocks > 0 or self.leaked_files > 0
        return not (left or self.interval[0] > 0 or self.unexpected)

    def __str__(self) -> str:
        low, high = self.interval
        first, second = self.p99
        answers = ", ".join(
            f"{count} x {status}" for status, count in sorted(self.statuses.items())
        )
        lines = [
            f"load             {self.minutes:.1f} min: {answers}",
            f"memory           {self.rss_mib:.0f} MiB, slope {self.slope:+.2f} MiB/h "
            f"(95 % CI {low:+.2f} to {high:+.2f})",
            f"requests left    {self.leaked_requests}",
            f"KV cache left    {self.leaked_blocks:.2%}",
            f"files left open  {self.leaked_files}",
            f"p99 of the probe {first * 1e3:.0f} ms, then {second * 1e3:.0f} ms "
            f"({second / first - 1:+.0%}), of {self.probes}",
            *(f"unexpected       {each}" for each in self.unexpected),
            "passed" if self.passed else "FAILED",
        ]
        return "\n".join(lines)


def slope(samples: Sequence[Sample]) -> tuple[float, tuple[float, float]]:
    """Bytes per second, and its 95 % confidence interval; see the module's text."""
    begin, end = samples[0].seconds, samples[-1].seconds
    width = (end - begin) / WINDOWS
    windows: list[list[int]] = [[] for _ in range(WINDOWS)]
    for sample in samples:
        windows[min(WINDOWS - 1, int((sample.seconds - begin) / width))].append(sample.rss)
    means = [statistics.fmean(window) for window in windows if window]
    steps = [(b - a) / width for a, b in itertools.pairwise(means)]
    mean = statistics.fmean(steps)
    error = STUDENT[len(steps) - 1] * statistics.stdev(steps) / math.sqrt(len(steps))
    return mean, (mean - error, mean + error)


def p99(seconds: Sequence[float]) -> float:
    """The 99th percentile."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


class Load:
    """All clients of one server.

    Args:
        session: whose base is the server's address.
        model: its name in the API.
        end: time.monotonic() at which they stop.
        soak: where they write what they see.
        seed: of what they ask.
    """

    def __init__(
        self, session: aiohttp.ClientSession, model: str, end: float, soak: Soak, seed: int
    ) -> None:
        self._session = session
        self._model = model
        self._begin, self._end = time.monotonic(), end
        self._soak = soak
        self._rng = random.Random(seed)

    async def run(self) -> None:
        """All of them, to the end."""
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._ask())
            for work in (self._attack, self._burst, self._probe):
                group.create_task(work())

    @property
    def _on(self) -> bool:
        return time.monotonic() < self._end

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = " ".join(self._rng.choices(["a", "weft", "of", "many", "threads"], k=30))
        return {"model": self._model, "prompt": prompt, "max_tokens": 16} | more

    async def _post(self, body: dict[str, Any], *expected: int) -> None:
        data = io.BytesIO(json.dumps(body).encode())  # some are large
        headers = {"content-type": "application/json"}
        async with self._session.post("/v1/completions", data=data, headers=headers) as response:
            self._soak.count(response.status, *expected, text=await response.text())

    async def _ask(self) -> None:
        """One answer after the other; of each five, one is hung up on."""
        while self._on:
            tokens = self._rng.randint(1, 48)
            if self._rng.random() < 0.5:
                await self._post(self._body(max_tokens=tokens, n=self._rng.randint(1, 2)), 200, 429)
                continue
            body = self._body(max_tokens=tokens, stream=True)
            async with self._session.post("/v1/completions", json=body) as response:
                if self._rng.random() < 0.4:
                    await response.content.readany()
                    response.close()
                    self._soak.statuses["gone"] += 1
                else:
                    self._soak.count(response.status, 200, 429, text=await response.text())

    async def _attack(self) -> None:
        while self._on:
            body = self._body(**self._rng.choice(HOSTILE))
            await self._post(body, 400, 404, 413)
            await asyncio.sleep(0.1)

    async def _burst(self) -> None:
        while self._on:
            await asyncio.gather(*(self._post(self._body(), 200, 429) for _ in range(BURST)))
            await asyncio.sleep(min(BURST_EVERY, max(0.0, self._end - time.monotonic())))

    async def _probe(self) -> None:
        """The same request, ahead of all others, so that it is not the queue that is measured."""
        body = {"model": self._model, "prompt": "weft", "max_tokens": 8, "priority": -1}
        while self._on:
            begin = time.monotonic()
            async with self._session.post("/v1/completions", json=body) as response:
                await response.read()
                if response.status == 200:
                    took = time.monotonic() - begin
                    self._soak.probes.append((begin - self._begin, took))
            await asyncio.sleep(0.05)


def processes(server: psutil.Process) -> list[psutil.Process]:
    """It, and those that it has started."""
    return [server, *server.children(recursive=True)]


async def measure(server: psutil.Process, end: float, soak: Soak) -> None:
    """Sample memory until the end."""
    begin = time.monotonic()
    every = min(1.0, (end - begin) / (20 * WINDOWS))
    while (now := time.monotonic()) < end:
        rss = sum(process.memory_info().rss for process in processes(server))
        soak.samples.append(Sample(now - begin, rss))
        await asyncio.sleep(every)


@contextlib.asynccontextmanager
async def serving(arguments: Sequence[str]) -> AsyncIterator[tuple[psutil.Process, str]]:
    """A server, and its address; it is ended by SIGTERM, and must then exit with 0."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "weft", "serve", *SERVER, *arguments),
        stderr=subprocess.PIPE,
    )
    assert process.stderr is not None
    try:
        url = None
        async with asyncio.timeout(START):
            while url is None:
                line = (await process.stderr.readline()).decode()
                if not line:
                    raise SystemExit("weft serve has ended; run it by itself to see why")
                if (found := re.search(r" at (https?://\S+)", line)) is not None:
                    url = found[1]
        draining = asyncio.create_task(_drain(process.stderr))
        yield psutil.Process(process.pid), url
        process.terminate()
        if await process.wait():
            raise SystemExit(f"weft serve exited with {process.returncode}")
        await draining
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _drain(stream: asyncio.StreamReader) -> None:
    while line := await stream.readline():
        sys.stderr.buffer.write(line)


async def requests_left(session: aiohttp.ClientSession) -> int:
    """How many requests there still are, when all have had `END` seconds to end."""
    deadline = time.monotonic() + END
    while True:
        names = ("requests_running", "requests_waiting")
        left = sum([await _metric(session, name) for name in names])
        if left == 0 or time.monotonic() > deadline:
            return int(left)
        await asyncio.sleep(0.1)


async def _open_files(server: psutil.Process) -> int:
    """Once the clients' connections are closed."""
    await asyncio.sleep(1.0)  # for the server to see that they are
    return sum(process.num_fds() for process in processes(server))


async def _metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as response:
        text = await response.text()
    found = re.search(rf"^weft_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
    assert found is not None, text
    return float(found[1])


async def soak(minutes: float, arguments: Sequence[str], *, seed: int = 0) -> Report:
    """Load a server, and report.

    Args:
        minutes: of load.
        arguments: of `weft serve`.
        seed: of what clients ask.
    """
    seen = Soak()
    async with (
        serving(arguments) as (server, url),
        aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(force_close=True)) as quiet,
    ):
        async with quiet.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        await Load(quiet, model, time.monotonic() + 0.1, Soak(), seed).run()
        await requests_left(quiet)
        files = await _open_files(server)
        end = time.monotonic() + 60 * minutes
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as session:
            await asyncio.gather(
                Load(session, model, end, seen, seed).run(), measure(server, end, seen)
            )
        requests = await requests_left(quiet)
        files = await _open_files(server) - files
        blocks = await _metric(quiet, "kv_cache_usage_ratio")
    return _report(minutes, seen, requests, blocks, files)


def _report(minutes: float, seen: Soak, requests: int, blocks: float, files: int) -> Report:
    warm = [s for s in seen.samples if s.seconds >= WARM_UP * 60 * minutes]
    mean, (low, high) = slope(warm)
    per_hour = 3600 / 2**20
    half = 30 * minutes
    halves = [
        [took for at, took in seen.probes if (at >= half) == second] for second in (False, True)
    ]
    return Report(
        minutes=minutes,
        rss_mib=seen.samples[-1].rss / 2**20,
        slope=mean * per_hour,
        interval=(low * per_hour, high * per_hour),
        leaked_requests=requests,
        leaked_blocks=blocks,
        leaked_files=max(0, files),
        p99=(p99(halves[0]), p99(halves[1])),
        probes=len(seen.probes),
        statuses=dict(seen.statuses),
        unexpected=seen.unexpected,
    )


def main() -> int:
    """Soak a server, and print the report; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of load  [default: 30]")
    parser.add_argument("--seed", type=int, default=0, help="of what clients ask  [default: 0]")
    parser.add_argument("--json", action="store_true", help="write JSON")
    options, arguments = parser.parse_known_args()
    report = asyncio.run(soak(options.minutes, arguments or ["weft-demo"], seed=options.seed))
    print(json.dumps(asdict(report), indent=2) if options.json else report)
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
