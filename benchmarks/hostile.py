"""Requests that could stop a server: what do other clients notice?

    python benchmarks/hostile.py                          the bundled model
    python benchmarks/hostile.py --out after.json         also keep the figures
    python benchmarks/hostile.py --before before.json     compare with kept figures
    python benchmarks/hostile.py --mib 4 ./MODEL --tp 2   smaller bodies, another server

Each case sends one body, or several at once, to `weft serve`. Meanwhile a victim reads streamed
answers, and a probe asks for /health. The table has, for each case:

    status, seconds   the answer to the body, and the time until it came
    gap               the longest pause between two events of the victim's stream
    /health           the slowest answer
    memory            growth of the API process's peak, in MiB and as a multiple of the body

A case is repeated. A pause that it causes comes each time, and one of the machine does not: the
smallest `gap`, `/health` and `seconds` of all rounds count, and the largest memory.

The case `nothing` shows what the machine itself contributes. `an easy schema behind ten hard ones`
is about grammars: its seconds are those of the easy schema.

Not handled: the engine's memory, and other processes on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import psutil
from soak import serving

SETTLE = 1.0  # seconds between two cases
PATIENCE = 300.0  # seconds for an answer
HARD = 10  # hard schemas at once

CHAT, TEXT, RESPONSES, MESSAGES, DETOKENIZE, TOKENIZE = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/detokenize",
    "/tokenize",
)


@dataclass(frozen=True)
class Case:
    """One hostile request.

    Attributes:
        path: the route.
        head, element, tail: JSON; the body is the head, many elements with commas, and the tail.
        most: maximum number of elements.
    """

    path: str
    head: str
    element: str
    tail: str
    most: int = 1 << 40

    def body(self, size: int) -> bytes:
        """Return the body, of about this many bytes."""
        room = size - len(self.head) - len(self.tail)
        each = self.element.encode()
        count = max(1, min(self.most, room // (len(each) + 1)))
        return self.head.encode() + b",".join([each] * count) + self.tail.encode()


MESSAGE = '{"role":"user","content":"hi"}'
CASES = {
    "wrong elements: stop": Case(TEXT, '{"model":"M","prompt":"a","stop":[', "1", "]}"),
    "wrong elements: messages": Case(CHAT, '{"model":"M","messages":[', "0", "]}"),
    "wrong elements: tools": Case(CHAT, '{"model":"M","messages":[],"tools":[', "1", "]}"),
    "wrong elements: tokens": Case(DETOKENIZE, '{"tokens":[', '""', "]}"),
    "unknown fields": Case(TEXT, '{"model":"M","prompt":"a",', '"KEY":1', "}"),
    "valid messages": Case(CHAT, '{"model":"M","messages":[', MESSAGE, "]}"),
    "valid messages, few": Case(CHAT, '{"model":"M","messages":[', MESSAGE, "]}", most=30_000),
    "valid items": Case(RESPONSES, '{"model":"M","input":[', MESSAGE, "]}"),
    "valid items, few": Case(RESPONSES, '{"model":"M","input":[', MESSAGE, "]}", most=30_000),
    "valid Anthropic messages, few": Case(
        MESSAGES, '{"model":"M","max_tokens":9,"messages":[', MESSAGE, "]}", most=30_000
    ),
    "valid tools": Case(
        CHAT,
        '{"model":"M","messages":[' + MESSAGE + '],"tools":[',
        '{"type":"function","function":{"name":"f"}}',
        "]}",
    ),
    "token ids": Case(TEXT, '{"model":"M","prompt":[', "12345", "]}"),
    "token ids, two million": Case(TEXT, '{"model":"M","prompt":[', "12345", "]}", most=2_000_000),
    "wide: empty lists": Case(CHAT, '{"model":"M","messages":[', "[]", "]}"),
    "deep": Case(CHAT, '{"model":"M","messages":[', "[" * 199 + "]" * 199, "]}"),
    "one long text": Case(TEXT, '{"model":"M","prompt":"', "a bcd" * 1000, '"}'),
    "one long message": Case(
        CHAT, '{"model":"M","messages":[{"role":"user","content":"', "a bcd" * 1000, '"}]}'
    ),
    "one long text of escapes": Case(TEXT, '{"model":"M","prompt":"', "\\n" * 1000, '"}'),
    "one long text to count": Case(TOKENIZE, '{"model":"M","prompt":"', "a bcd" * 1000, '"}'),
}


@dataclass
class Figures:
    """The figures of one case: the status, seconds, bytes of the body and of memory."""

    case: str
    status: int
    seconds: float
    gap: float
    health: float
    body: int = 0
    memory: int = 0


class Watch:
    """A victim and a probe.

    Args:
        session: its base is the server's address.
        model: the model's name in the API.

    Attributes:
        gap: longest pause between two events, in seconds, since the last `clear`.
        health: slowest answer of /health, in seconds.
    """

    def __init__(self, session: aiohttp.ClientSession, model: str) -> None:
        self._session = session
        self._model = model
        self.clear()

    def clear(self) -> None:
        """Forget what has been seen."""
        self.gap = self.health = 0.0

    async def read(self) -> None:
        """Read one streamed answer after the other."""
        body = {"model": self._model, "prompt": "weft", "stream": True, "priority": -1}
        body |= {"max_tokens": 400, "ignore_eos": True}
        while True:
            async with self._session.post(TEXT, json=body) as response:
                response.raise_for_status()
                last = None
                async for _ in response.content.iter_any():
                    now = time.monotonic()
                    if last is not None:
                        self.gap = max(self.gap, now - last)
                    last = now

    async def probe(self) -> None:
        """Ask for /health all the time."""
        while True:
            begin = time.monotonic()
            async with self._session.get("/health") as response:
                await response.read()
            self.health = max(self.health, time.monotonic() - begin)
            await asyncio.sleep(0.005)


def post(url: str, path: str, body: bytes) -> tuple[int, float]:
    """Send a body; returns the status, 0 for a cut connection, and the seconds it took."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=PATIENCE)
    begin = time.monotonic()
    status = 0
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        # A server may answer and hang up before it has read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, body, {"content-type": "application/json"})
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


async def attack(
    name: str, body: tuple[str, bytes], url: str, server: psutil.Process, watch: Watch, rounds: int
) -> Figures:
    """Send a body some times, and report its answer and what others noticed."""
    each = [await attack_once(name, body, url, server, watch) for _ in range(rounds)]
    return Figures(
        name,
        each[-1].status,
        min(figures.seconds for figures in each),
        min(figures.gap for figures in each),
        min(figures.health for figures in each),
        len(body[1]),
        max(figures.memory for figures in each),
    )


async def attack_once(
    name: str, body: tuple[str, bytes], url: str, server: psutil.Process, watch: Watch
) -> Figures:
    """Send a body, and report its answer and what others noticed."""
    await asyncio.sleep(SETTLE)
    before = peak_memory(server, reset=True)
    watch.clear()
    status, seconds = await asyncio.to_thread(post, url, *body)
    await asyncio.sleep(SETTLE)  # a pause shows when it ends
    grown = max(0, peak_memory(server) - before)
    return Figures(name, status, seconds, watch.gap, watch.health, len(body[1]), grown)


def hard_schema(i: int) -> dict[str, Any]:
    """Return a schema that takes seconds to compile; each number gives another one."""
    return {"type": "string", "pattern": f"[a-z]{{1,{9000 + i}}}x"}


def schema_body(model: str, schema: dict[str, Any]) -> tuple[str, bytes]:
    """Return a request that is constrained by a schema."""
    body = {"model": model, "prompt": "a", "max_tokens": 4, "guided_json": schema}
    return TEXT, json.dumps(body).encode()


async def grammars(url: str, model: str, server: psutil.Process, watch: Watch) -> list[Figures]:
    """Measure an easy schema alone, and then behind hard ones."""
    easy = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await asyncio.to_thread(post, url, *schema_body(model, easy))  # starts the compiler
    other = {"type": "object", "properties": {"b": {"type": "integer"}}}
    alone = await attack_once("an easy schema", schema_body(model, other), url, server, watch)
    hard = [schema_body(model, hard_schema(i)) for i in range(HARD)]
    sending = asyncio.gather(*(asyncio.to_thread(post, url, *each) for each in hard))
    another = {"type": "object", "properties": {"c": {"type": "integer"}}}
    name = "an easy schema behind ten hard ones"
    behind = await attack_once(name, schema_body(model, another), url, server, watch)
    await sending
    return [alone, behind]


def in_size(case: Case, model: str, size: int) -> tuple[str, bytes]:
    """Return a case's route and body, with the model's name and different keys."""
    body = case.body(size).replace(b'"M"', json.dumps(model).encode())
    if b'"KEY"' in body:
        parts = body.split(b'"KEY"')
        keys = (b'"k%d"' % i for i in range(len(parts)))
        body = b"".join(part for pair in zip(parts, keys, strict=True) for part in pair)
        body = body[: body.rindex(b"}") + 1]
    return case.path, body


async def measure(
    arguments: Sequence[str],
    chosen: Callable[[str], bool],
    say: Callable[[str], None],
    *,
    mib: float,
    rounds: int,
) -> list[Figures]:
    """Start a server and measure all chosen cases.

    Args:
        arguments: of `weft serve`.
        chosen: whether a case is measured, by its name.
        say: called with a line for each result.
        mib: size of large bodies, in MiB.
        rounds: number of times that each case is measured.
    """
    found: list[Figures] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        serving(arguments) as (server, url),
        aiohttp.ClientSession(url, timeout=timeout) as session,
    ):
        async with session.get("/v1/models") as response:
            model = (await response.json())["data"][0]["id"]
        watch = Watch(session, model)
        watching = [asyncio.create_task(each()) for each in (watch.read, watch.probe)]
        nothing = TEXT, json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
        found.append(await attack("nothing", nothing, url, server, watch, rounds))
        say(row(found[-1]))
        for name, case in CASES.items():
            if not chosen(name):
                continue
            sent = await asyncio.to_thread(in_size, case, model, int(mib * 2**20))
            found.append(await attack(name, sent, url, server, watch, rounds))
            say(row(found[-1]))
            if (failed := [task for task in watching if task.done()]) != []:
                failed[0].result()
        if chosen("schema"):
            for figures in await grammars(url, model, server, watch):
                found.append(figures)
                say(row(figures))
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return found


HEADER = "| case | body, MiB | status | s | gap, ms | /health, ms | memory, MiB | x body |"
COLUMNS = "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"


def row(figures: Figures) -> str:
    """Return a line of the table."""
    return f"| {' | '.join(cells(figures))} |"


def cells(figures: Figures) -> list[str]:
    """Return a case's cells in the table."""
    mib, grown = figures.body / 2**20, figures.memory / 2**20
    times = f"{grown / mib:.1f}" if mib >= 1 else ""
    return [
        figures.case,
        f"{mib:.1f}",
        str(figures.status),
        f"{figures.seconds:.2f}",
        f"{figures.gap * 1e3:.0f}",
        f"{figures.health * 1e3:.0f}",
        f"{grown:.0f}",
        times,
    ]


def beside(before: Sequence[Figures], after: Sequence[Figures]) -> str:
    """Return a table with two values in each cell: before, after."""
    old = {figures.case: figures for figures in before}
    lines = [HEADER, COLUMNS]
    for new in after:
        if (was := old.get(new.case)) is None:
            lines.append(row(new))
            continue
        pairs = zip(cells(was), cells(new), strict=True)
        joined = [b if a == b else f"{a}, **{b}**" for a, b in pairs]
        lines.append(f"| {' | '.join(joined)} |")
    return "\n".join(lines)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=float, default=31.0, help="size of large bodies")
    parser.add_argument("--rounds", type=int, default=3, help="times that a case is measured")
    parser.add_argument("--only", default="", help="only cases with this text in their name")
    parser.add_argument("--out", type=Path, help="file for the figures, as JSON")
    parser.add_argument("--before", type=Path, help="file of an earlier run, for one table of both")
    options, arguments = parser.parse_known_args()
    print(HEADER, COLUMNS, sep="\n", flush=True)
    found = asyncio.run(
        measure(
            arguments or ["weft-demo"],
            lambda name: options.only in name,
            lambda line: print(line, flush=True),
            mib=options.mib,
            rounds=options.rounds,
        )
    )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(each) for each in found], indent=1))
    if options.before is not None:
        before = [Figures(**each) for each in json.loads(options.before.read_text())]
        print("\nbefore, **after**:\n", beside(before, found), sep="\n")


if __name__ == "__main__":
    main()
