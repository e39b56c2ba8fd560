"""Hostile requests, and their effect on a server's other clients.

    python benchmarks/hostile.py                       bodies of 31 MiB
    python benchmarks/hostile.py --quick               bodies of 1 MiB, each kind once
    python benchmarks/hostile.py ./MODEL --tp 2        arguments of weft serve

The model is weft-demo with a context of 131,072 tokens, because a server's limits for bodies grow
with the context. It runs on one thread: if any process takes a core away, OpenMP's threads wait for
each other, and a step takes much longer.

The server gets several bodies for each kind, in sequence. Meanwhile a victim reads a
streamed answer, and a probe asks for /health. The table has, for each kind:

    body       size in MiB
    sent       number of bodies
    status     HTTP status
    answer     seconds until a body is answered: median, worst
    gap        longest pause in the victim's stream meanwhile, ms: median, worst
    /health    slowest answer from /health meanwhile, ms: median, worst
    MiB        growth in the API process's peak memory
    x body     the same, divided by the body's size

If a kind causes a pause, it does so each time: the median shows it. The row `undisturbed` has no
bodies: it shows the machine's own pauses. `all kinds at once` sends one body for each kind in the
same moment. `an easy schema behind hard ones` measures an easy schema while the server compiles
hard ones.

Not handled: the engine's memory, and other processes on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copytree
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import aiohttp
import psutil
from hostile_bodies import CONTEXT, TEXT, Body, bodies, easy_schema, hard_schema, small
from soak import serving

from weft.models.checkpoint.locate import locate

SETTLE = 0.5  # seconds between two bodies; a pause shows when it ends
PATIENCE = 300.0  # seconds for an answer
HARD = 10  # hard schemas at once
DEMO = "weft-demo"


@dataclass
class Figures:
    """One body's effect: the status (None without a body), seconds, bytes for body and memory."""

    status: int | None
    seconds: float
    gap: float
    health: float
    body: int = 0
    memory: int = 0


@dataclass
class Row:
    """A line in the table: all bodies of one kind."""

    kind: str
    figures: list[Figures]

    def cells(self) -> list[str]:
        """Return the table's columns."""
        all_of = self.figures
        counts = Counter(each.status for each in all_of)
        status = ", ".join(f"{n} x {s}" if n < len(all_of) else f"{s}" for s, n in counts.items())
        sent = None not in counts
        size = max(each.body for each in all_of)
        grown = max(each.memory for each in all_of)
        return [
            self.kind,
            f"{size / 2**20:.1f}" if size >= 2**16 else "",
            str(len(all_of)) if sent else "",
            status if sent else "",
            _median_and_worst([each.seconds for each in all_of], 1, ".2f") if sent else "",
            _median_and_worst([each.gap for each in all_of], 1e3, ".0f"),
            _median_and_worst([each.health for each in all_of], 1e3, ".0f"),
            f"{grown / 2**20:.0f}" if sent else "",
            f"{grown / size:.1f}" if size >= 2**20 else "",
        ]


def _median_and_worst(values: Sequence[float], unit: float, form: str) -> str:
    return f"{median(values) * unit:{form}}, {max(values) * unit:{form}}"


class Watch:
    """A victim and a probe.

    Args:
        session: its base is the server's address.
        model: the model's name in the API.
    """

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model
        self._gap = self._health = 0.0
        self._last_event = self._last_answer = time.monotonic()

    def clear(self) -> None:
        """Forget all observations."""
        self._gap = self._health = 0.0

    def seen(self) -> tuple[float, float]:
        """Return the longest pause and the slowest answer, in seconds; both may still go on."""
        now = time.monotonic()
        return max(self._gap, now - self._last_event), max(self._health, now - self._last_answer)

    async def read(self) -> None:
        """Read one streamed answer after the other. The time between two answers is no pause."""
        body = {"model": self._model, "prompt": "weft", "stream": True, "priority": -1}
        body |= {"max_tokens": 400, "ignore_eos": True}
        while True:
            async with self._session.post(TEXT, json=body) as response:
                response.raise_for_status()
                begun = False
                async for _ in response.content.iter_any():
                    now = time.monotonic()
                    if begun:
                        self._gap = max(self._gap, now - self._last_event)
                    self._last_event, begun = now, True
            self._last_event = time.monotonic()

    async def probe(self) -> None:
        """Ask for /health all the time."""
        while True:
            self._last_answer = begin = time.monotonic()
            async with self._session.get("/health") as response:
                await response.read()
            self._last_answer = time.monotonic()
            self._health = max(self._health, self._last_answer - begin)
            await asyncio.sleep(0.005)


def post(url: str, body: Body) -> tuple[int, float]:
    """Send a body; returns the status, 0 for a cut connection, and the seconds it took."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE)
    begin = time.monotonic()
    status = 0
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        # A server may answer and hang up before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", body.path, body.data, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        status = answer.status
    return status, time.monotonic() - begin


def peak_memory(process: psutil.Process, *, reset: bool = False) -> int:
    """Return a process's maximum resident memory since the last reset, in bytes."""
    if reset:
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
    status = Path(f"/proc/{process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Attack:
    """Sends bodies to a server, and observes the other clients.

    Args:
        url: the server's address.
        server: its API process.
        watch: the victim and the probe.
        count: number of bodies for each kind.
    """

    def __init__(self, url: str, server: psutil.Process, watch: Watch, count: int) -> None:
        self._url = url
        self._server = server
        self._watch = watch
        self._count = count

    async def undisturbed(self) -> Row:
        """Send nothing, for about as long as with bodies."""
        found = []
        for _ in range(self._count):
            self._watch.clear()
            await asyncio.sleep(2 * SETTLE)
            found.append(Figures(None, 0.0, *self._watch.seen()))
        return Row("undisturbed", found)

    async def one_by_one(self, body: Body) -> Row:
        """Send a body several times."""
        return Row(body.kind, [await self.send(body) for _ in range(self._count)])

    async def send(self, body: Body) -> Figures:
        """Send a body once."""
        ((status, seconds),), gap, health, grown = await self._send([body])
        return Figures(status, seconds, gap, health, len(body.data), grown)

    async def at_once(self, kind: str, several: Sequence[Body]) -> Row:
        """Send all bodies in the same moment, and compare the memory with their sum."""
        answers, gap, health, grown = await self._send(several)
        total = sum(len(body.data) for body in several)
        return Row(kind, [Figures(*answer, gap, health, total, grown) for answer in answers])

    async def _send(
        self, several: Sequence[Body]
    ) -> tuple[list[tuple[int, float]], float, float, int]:
        await asyncio.sleep(SETTLE)
        before = peak_memory(self._server, reset=True)
        self._watch.clear()
        sending = (asyncio.to_thread(post, self._url, body) for body in several)
        answers = await asyncio.gather(*sending)
        await asyncio.sleep(SETTLE)
        grown = max(0, peak_memory(self._server) - before)
        return list(answers), *self._watch.seen(), grown

    async def schemas(self, model: str, hard: int) -> AsyncIterator[Row]:
        """Measure an easy schema alone, and then behind hard ones."""
        await self.send(easy_schema(model, "", "first"))  # starts the compiler
        alone = easy_schema(model, "an easy schema", "alone")
        yield Row(alone.kind, [await self.send(alone)])
        bodies = [hard_schema(model, i) for i in range(hard)]
        sending = asyncio.gather(*(asyncio.to_thread(post, self._url, each) for each in bodies))
        behind = easy_schema(model, f"an easy schema behind {hard} hard ones", "behind")
        yield Row(behind.kind, [await self.send(behind)])
        await sending


async def measure(
    arguments: Sequence[str],
    chosen: Callable[[str], bool],
    *,
    mib: float,
    count: int,
    hard: int = HARD,
) -> AsyncIterator[Row]:
    """Start a server and measure all chosen kinds.

    Args:
        arguments: for `weft serve`.
        chosen: whether a kind is measured, by its name; "schemas" are easy and hard ones.
        mib: size of large bodies, in MiB.
        count: number of bodies for each kind.
        hard: number of hard schemas at once.
    """
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        serving([*arguments, "--no-log-stats"]) as (server, url),
        aiohttp.ClientSession(url, timeout=timeout) as session,
    ):
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        watch = Watch(session, model)
        watching = [asyncio.create_task(each()) for each in (watch.read, watch.probe)]
        attack = Attack(url, server, watch, count)
        yield await attack.undisturbed()
        all_bodies = await asyncio.to_thread(bodies, model, int(mib * 2**20))
        picked = [body for body in all_bodies if chosen(body.kind)]
        for body in [small(model), *picked]:
            yield await attack.one_by_one(body)
            for task in watching:
                if task.done():
                    task.result()
        if len(picked) > 1:
            yield await attack.at_once("all kinds at once", picked)
        if chosen("schemas"):
            async for row in attack.schemas(model, hard):
                yield row
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


HEADER = "| kind | body, MiB | sent | status | answer, s | gap, ms | /health, ms | MiB | x body |"
COLUMNS = "| --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: |"


async def report(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure, and print the table or JSON."""
    mib, count, hard = (1.0, 1, 2) if options.quick else (options.mib, options.count, HARD)
    with TemporaryDirectory() as folder:
        if not arguments:
            arguments = [str(with_context(Path(folder) / DEMO, CONTEXT)), "--threads=1"]
        rows = measure(
            arguments, lambda kind: options.only in kind, mib=mib, count=count, hard=hard
        )
        if options.json:
            print(json.dumps([asdict(row) async for row in rows], indent=1))
            return
        print(HEADER, COLUMNS, sep="\n", flush=True)
        async for row in rows:
            print(f"| {' | '.join(row.cells())} |", flush=True)


def with_context(folder: Path, context: int) -> Path:
    """Make a copy of the bundled model with another context, in tokens; returns its folder."""
    copytree(locate(DEMO), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=31.0, help="size of large bodies")
    parser.add_argument("--count", type=int, default=3, help="bodies of each kind")
    parser.add_argument("--only", default="", help="only kinds with this text in their name")
    parser.add_argument("--quick", action="store_true", help="one body of each kind, of 1 MiB")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    asyncio.run(report(*parser.parse_known_args()))


if __name__ == "__main__":
    main()
