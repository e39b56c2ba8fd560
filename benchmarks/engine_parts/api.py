"""The API process alone: a real HTTP server over sockets, in front of an engine that is a mock.

The paced engine makes 10,000 tokens per second over all streams, which the
API process keeps up with, so that every token is an event of its own. The
figure is events per second of the API process's CPU time (user and system, all
its threads): what one core does, however the client and the engine share the
others. The instant engine never waits; the API process then merges what it
has not written yet, and is as fast as its readers can have it.

The client is this process: it reads bytes and counts, and parses nothing.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
from make_checkpoint import END, TEMPLATE, make_tokenizer

from engine_parts.measure import Case
from engine_parts.mock import PIECE, RATE, TOKEN, VOCAB_SIZE

BENCHMARKS = Path(__file__).parent.parent
GOAL = 8000.0
PROMPT = list(range(1000, 1032))
ENDLESS = 100_000  # tokens; no stream gets there
ROUTES: dict[str, dict[str, object]] = {
    "completions": {"prompt": PROMPT},
    "chat": {"messages": [{"role": "user", "content": "How is cloth made?"}]},
}

_SERVE = """
import sys
from weft.serving.api.server import serve
from weft.serving.config.settings import EngineConfig, ServerConfig

engine = EngineConfig(model=sys.argv[1], max_model_len=131072, max_num_seqs=256)
sys.exit(serve(engine, ServerConfig(port=0), runner_factory=sys.argv[2]))
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its port, and the process id of the HTTP side."""

    port: int
    pid: int

    def cpu_seconds(self) -> float:
        """CPU time of the API process so far; the engine is another process."""
        # The first number is nanoseconds; /proc/PID/stat would count in hundredths of a second.
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in threads) * 1e-9


@contextmanager
def start_server(checkpoint: Path, loader: str) -> Iterator[Server]:
    """Start a server on a free port, and end it with SIGTERM."""
    command = [sys.executable, "-c", _SERVE, str(checkpoint), f"engine_parts.mock:{loader}"]
    # The engine process finds the mock by this path.
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(BENCHMARKS)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            log = []
            for line in process.stderr:
                log.append(line)
                if "serves" in line:
                    yield Server(int(line.rpartition(":")[2]), process.pid)
                    break
            else:
                raise RuntimeError(f"the server did not start:\n{''.join(log)}")
        finally:
            process.terminate()


class Reader(asyncio.Protocol):
    """Asks for one stream, and counts what comes.

    Attributes:
        events, tokens: so far.
        first: done at the first token.
        last: done at the end of the stream, or of the connection.
    """

    _EVENT, _TOKEN, _DONE = b"data: {", PIECE.encode(), b"data: [DONE]"

    def __init__(self, route: str, max_tokens: int) -> None:
        loop = asyncio.get_running_loop()
        body = {"model": "mock", "max_tokens": max_tokens, "stream": True, **ROUTES[route]}
        self._body = msgspec.json.encode(body)
        self._path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
        self._tail = b""
        self.events = self.tokens = 0
        self.first: asyncio.Future[None] = loop.create_future()
        self.last: asyncio.Future[None] = loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        head = (
            f"POST {self._path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            f"content-length: {len(self._body)}\r\n\r\n"
        )
        transport.write(head.encode() + self._body)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(b"HTTP/1.1 200"):
            self._fail(f"the server answers {data[:200]!r}")
            return
        # What a read cuts in two is counted with the next one.
        self.events += self._count(self._EVENT, data)
        self.tokens += self._count(self._TOKEN, data)
        if self.tokens and not self.first.done():
            self.first.set_result(None)
        if self._count(self._DONE, data):
            self._end()
        self._tail = (self._tail + data)[-len(self._DONE) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _count(self, mark: bytes, data: bytes) -> int:
        return (self._tail[1 - len(mark) :] + data).count(mark)

    def _end(self) -> None:
        if not self.last.done():
            self.last.set_result(None)

    def _fail(self, reason: str) -> None:
        for future in (self.first, self.last):
            if not future.done():
                future.set_exception(RuntimeError(reason))


@asynccontextmanager
async def _streams(
    server: Server, route: str, count: int, max_tokens: int
) -> AsyncIterator[list[Reader]]:
    """So many streams at once, all asked for; closed at the end."""
    loop = asyncio.get_running_loop()
    readers = []
    try:
        for _ in range(count):
            make = partial(Reader, route, max_tokens)
            readers.append((await loop.create_connection(make, "127.0.0.1", server.port))[1])
        yield readers
    finally:
        for reader in readers:
            reader.transport.close()
        await asyncio.gather(*(reader.last for reader in readers))


async def _steady(server: Server, route: str, count: int, seconds: float) -> tuple[float, float]:
    """Events per second of CPU and of time, while all streams run."""
    async with _streams(server, route, count, ENDLESS) as readers:
        await asyncio.gather(*(reader.first for reader in readers))
        events, cpu = sum(reader.events for reader in readers), server.cpu_seconds()
        begin = time.perf_counter()
        await asyncio.sleep(seconds)
        taken = time.perf_counter() - begin
        events = sum(reader.events for reader in readers) - events
        return events / (server.cpu_seconds() - cpu), events / taken


async def _whole(server: Server, count: int, max_tokens: int) -> float:
    """Tokens per second of answers, from their start to their end."""
    begin = time.perf_counter()
    async with _streams(server, "completions", count, max_tokens) as readers:
        await asyncio.gather(*(reader.last for reader in readers))
        taken = time.perf_counter() - begin
        tokens = sum(reader.tokens for reader in readers)
        assert tokens == count * max_tokens, f"{tokens} tokens came"
        return tokens / taken


async def _requests(server: Server, seconds: float) -> float:
    """Requests of one token, 16 at a time, per second of CPU."""
    requests, cpu = 0, server.cpu_seconds()
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        async with _streams(server, "completions", 16, 1) as readers:
            await asyncio.gather(*(reader.last for reader in readers))
        requests += len(readers)
    return requests / (server.cpu_seconds() - cpu)


@contextmanager
def cases() -> Iterator[list[Case]]:
    """See the module's text."""
    with ExitStack() as stack:
        checkpoint = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "mock"
        _write_checkpoint(checkpoint)
        paced = stack.enter_context(start_server(checkpoint, "load_paced"))
        instant = stack.enter_context(start_server(checkpoint, "load_instant"))

        def steady(route: str, count: int) -> Case:
            name = f"{count} streams of {route}, on one core"
            run = lambda seconds: asyncio.run(_steady(paced, route, count, seconds))[0]  # noqa: E731
            return Case(name, "events/s", run, at_least=GOAL)

        yield [
            steady("completions", 16),
            steady("completions", 64),
            steady("completions", 256),
            steady("chat", 64),
            Case(
                f"64 streams, of {RATE:,.0f} tokens/s made",
                "events/s",
                lambda seconds: asyncio.run(_steady(paced, "completions", 64, seconds))[1],
                at_least=GOAL,
            ),
            Case(
                "64 answers of 512 tokens, engine never waits",
                "tokens/s",
                lambda seconds: asyncio.run(_whole(instant, 64, 512)),
            ),
            Case(
                "requests of one token, on one core",
                "requests/s",
                lambda seconds: asyncio.run(_requests(instant, seconds)),
            ),
        ]


def _write_checkpoint(path: Path) -> None:
    """A checkpoint as far as the API process reads it."""
    path.mkdir()
    tokenizer = make_tokenizer(VOCAB_SIZE)
    assert tokenizer.token_to_id(PIECE) == TOKEN
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
