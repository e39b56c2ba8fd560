"""`weft batch`: answer every line of a file, with the engine full throughout.

A row is a request of the HTTP API without the socket: its body goes to the same
routes, so it is checked, answered and refused in the same words. Lines are read
as the engine has room for them (see window.py), so memory does not grow with
the file, but for the custom_ids, which are kept to refuse one that comes twice.
Answers are written as they finish, in that order; a row is known by its line's
index.

Does not handle: streaming, other URLs than those of completions, an input that
changes between a run and its `--resume`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from weft.errors import ConfigError, EngineError
from weft.serving.batch_file import Output, Row, answered, parse, refused
from weft.serving.config import EngineConfig, ServerConfig
from weft.serving.progress import Progress
from weft.serving.window import for_each, width

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

logger = logging.getLogger(__name__)

QUEUE_FULL_WAIT = 0.2  # seconds until a row that found the queue full is tried again


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    source: Path,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
) -> int:
    """Answer the file; 0 when every row has a line in the output, be it an error.

    Raises:
        ConfigError: a file cannot be read or written, or is there and must not be replaced.
        EngineError: the engine died; what is written stays, for `resume`.
    """
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume contradict each other")
    total = _count(source)
    if output.exists() and output.samefile(source):
        raise ConfigError(f"--output {output} is the input")
    written = Output(output, overwrite=overwrite, resume=resume)
    before = len(written.done)
    progress = Progress("batch", total - before, unit="rows")
    errors = 0
    if before < total:
        work = _answer_all(engine_config, server_config, source, written, progress)
        errors = asyncio.run(work)
    else:
        with written:  # an empty answer to an empty file
            pass
    print(
        f"batch: {progress.done} rows, {errors} of them errors, {progress.tokens} tokens in "
        f"{progress.seconds:.1f} s ({progress.rate:.0f} tokens/s)"
        + (f"; {before} rows were done before" if before else ""),
        file=sys.stderr,
    )
    return 0


async def _answer_all(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    source: Path,
    written: Output,
    progress: Progress,
) -> int:
    """Load the model, and answer every row that has no answer yet; returns the errors' number."""
    from weft.serving.api.app import build_app
    from weft.serving.api.state import ServerState
    from weft.serving.engine import AsyncEngine

    state = ServerState.of(engine_config, server_config)
    state.engine = engine = await AsyncEngine.start(engine_config)
    api = LocalApi(build_app(state))
    errors = 0

    async def answer(row: Row) -> None:
        nonlocal errors
        if row.problem is None:
            # A seed of its own, so that a file has the same answers in each run, and resumed.
            request = {"seed": engine_config.seed + row.index} | row.body
            status, body = await api.post(row.url, msgspec.json.encode(request))
            line = answered(row, status, body)
        else:
            status, body, line = 400, b"{}", refused(row)
        written.write(line)
        errors += status != 200
        progress.advance(msgspec.json.decode(body, type=_Counted).usage.completion_tokens)

    try:
        with written, progress:
            rows = _rows(source, state.model, written.done)
            await for_each(rows, answer, workers=width(engine))
    finally:
        await engine.shutdown(drain=False)
    return errors


class LocalApi:
    """The routes of the HTTP API, called without a socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """The status and the body of the response to a JSON body.

        A full queue is waited for. Raises EngineError when the engine cannot serve any more.
        """
        while True:
            status, answer = await self._post(path, body)
            if status == HTTPStatus.SERVICE_UNAVAILABLE:
                raise EngineError(msgspec.json.decode(answer)["error"]["message"])
            if status != HTTPStatus.TOO_MANY_REQUESTS:
                return status, answer
            await asyncio.sleep(QUEUE_FULL_WAIT)

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
        }
        request: list[Message] = [{"type": "http.request", "body": body}]
        response: list[Message] = []

        async def receive() -> Message:
            if request:
                return request.pop()
            return await asyncio.Future()  # this client never goes away

        async def send(message: Message) -> None:
            response.append(message)

        try:
            await self._app(scope, receive, send)
        except Exception:
            if not response:
                raise
            # It has been answered with a 500; a server logs it and goes on, and so does a batch.
            logger.exception("a row failed unexpectedly")
        return response[0]["status"], b"".join(part.get("body", b"") for part in response)


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Counted(msgspec.Struct):
    """The part of a response that says how many tokens it took."""

    usage: _Usage = msgspec.field(default_factory=_Usage)


def _count(source: Path) -> int:
    if source.exists() and not source.is_file():  # it is read twice
        raise ConfigError(f"{source} is not a regular file; write it to one first")
    try:
        with source.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError as error:
        raise ConfigError(f"{source}: {error.strerror}") from None


def _rows(source: Path, model: str, done: set[int]) -> Iterator[Row]:
    """The rows to do; `model` answers those that name none."""
    line_of: dict[str, int] = {}
    with source.open("rb") as file:
        for index, line in enumerate(file):
            if not line.strip():
                continue
            row = parse(index, line, model)
            if not row.simple and row.id is not None:
                first = line_of.setdefault(str(row.id), index)
                if first != index:
                    problem = f"line {index + 1}: custom_id {row.id!r} is that of line {first + 1}"
                    row = replace(row, problem=problem)
            if index not in done:
                yield row
