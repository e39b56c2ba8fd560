"""`weft batch`: each row of input files answered once, by an engine of its own.

`--resume` continues an interrupted run only if the result would be the same: same input contents,
model, seed and order.

Does not handle: streaming, and URLs other than those in `serving.batch.files.URLS`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from weft.errors import ConfigError, WeftError
from weft.serving.batch.files import STDIN, Inputs, find, parse, spool
from weft.serving.batch.job import Feeder, Job
from weft.serving.batch.journal import Journal
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.fields import settings_of
from weft.serving.config.progress import Progress
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import Settings
from weft.serving.engine.admission import width

if TYPE_CHECKING:
    from weft.serving.api.state import ServerState
    from weft.serving.engine.engine import AsyncEngine

_FILE = click.Path(path_type=Path)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@click.command(cls=TopicCommand)
@click.argument("sources", metavar="IN...", nargs=-1, required=True, type=_FILE)
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="OUT.JSONL",
    type=_FILE,
    help="file for the answers, one per line",
)
@click.option(
    "--errors",
    metavar="FILE",
    type=_FILE,
    help="file for the rows that failed; else they are in the output, too",
)
@click.option(
    "--state",
    metavar="FILE",
    type=_FILE,
    help="file that records which rows are done  [default: OUT.JSONL.state]",
)
@click.option(
    "--ordered", is_flag=True, help="write answers in the order of the rows, not as they finish"
)
@click.option("--overwrite", is_flag=True, help="replace existing output")
@click.option("--resume", is_flag=True, help="continue an interrupted run")
@takes(
    EngineConfig,
    ServerConfig,
    only={
        *(setting.name for setting in settings_of(EngineConfig)),
        *("served_model_name", "tool_parser", "reasoning_parser"),
    },
)
def batch(settings: Settings, **options: Any) -> int:
    """Answer every line of the input files exactly once.

    IN is a JSONL file, a directory (every *.jsonl in it) or - for stdin; give as many as you like.
    A line is a request in OpenAI's batch format (custom_id, method, url, body), or simply
    {"prompt": "..."} or {"messages": [...]}, with sampling fields beside it. If a line cannot be
    answered, its output line says why.

    After a crash, even kill -9 or a full disk, run the same command with --resume. It repeats at
    most the rows of the last second, and keeps the others.

    \b
    weft batch questions.jsonl -o answers.jsonl
    weft batch questions.jsonl -o answers.jsonl --resume
    weft batch monday/ tuesday.jsonl -o answers.jsonl --errors failed.jsonl --ordered
    zcat questions.jsonl.gz | weft batch - -o answers.jsonl
    """
    return run(settings.build(EngineConfig), settings.build(ServerConfig), **options)


def run(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    sources: Sequence[Path],
    output: Path,
    *,
    errors: Path | None = None,
    state: Path | None = None,
    ordered: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    runner_factory: str | None = None,
) -> int:
    """Answer the rows of files.

    Args:
        engine_config: settings for the engine.
        server_config: settings for the API, whose routes answer the rows.
        sources: files, directories, "-".
        output: file for the answers.
        errors: file for the answers of failed rows; None puts them into `output`, too.
        state: file that records which rows are done; None puts it beside `output`.
        ordered: write answers in the order of the rows.
        overwrite: replace existing output.
        resume: continue existing output.
        runner_factory: see `AsyncEngine.start`; None is its default.

    Returns:
        0 when every row has a line, even an error; 1 when every row of a run from the start failed;
        128 plus the signal's number after a signal.

    Raises:
        ConfigError: a file cannot be read or written, an output exists and must not be replaced,
            or an input has changed since the run began.
        EngineError: the engine failed; answers so far are written, and `resume` continues.
        RowsFailAlike: the first rows all failed with the same error; `resume` continues.
        DiskError: the disk is full; answers so far are written, and `resume` continues.
    """
    from weft.serving.api.state import ServerState
    from weft.serving.engine.engine import LOAD_MODEL, AsyncEngine

    outputs = [output] if errors is None else [output, errors]
    state = state or Path(f"{output}.state")
    if overwrite and resume:
        raise ConfigError("--overwrite and --resume contradict each other")
    files = find(sources, leave_out=outputs)
    for flag, path in (("--output", output), ("--errors", errors), ("--state", state)):
        if path is not None:
            _check_output(flag, path, files)
    if len({path.resolve() for path in (*outputs, state)}) <= len(outputs):
        raise ConfigError("--output, --errors and --state must be different files")
    existing = next((path for path in outputs if path.exists()), None)
    if existing is not None and not overwrite and not resume:
        raise ConfigError(f"{existing} exists; --resume continues it, --overwrite replaces it")
    if existing is not None and resume and not state.exists():
        raise _no_state(existing, state)
    with closing(Journal(state, outputs)) as journal:
        if existing is not None and resume and journal.settings is None:
            raise _no_state(existing, state)
        factory = LOAD_MODEL if runner_factory is None else runner_factory
        start = partial(AsyncEngine.start, engine_config, runner_factory=factory)
        api = ServerState.of(engine_config, server_config)
        command = _Command(api, start, engine_config.seed, files, journal, ordered)
        return command.run(resume=resume)


def _check_output(flag: str, path: Path, files: Sequence[Path]) -> None:
    if path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise ConfigError(f"{flag} {path} is the input")
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: it must be a file in a directory that exists")


def _no_state(existing: Path, state: Path) -> ConfigError:
    return ConfigError(
        f"{existing} exists, but {state} does not record its rows, so --resume cannot continue "
        "it; --overwrite replaces it"
    )


class _Command:
    """A run whose files are known and checked."""

    def __init__(
        self,
        api: ServerState,
        start: Callable[[], Awaitable[AsyncEngine]],
        seed: int,
        files: list[Path],
        journal: Journal,
        ordered: bool,
    ) -> None:
        self._api, self._start, self._seed = api, start, seed
        self._files, self._journal, self._ordered = files, journal, ordered
        self._kept_stdin = Path(f"{journal.paths[0]}.stdin")
        self._failed = 0

    def run(self, *, resume: bool) -> int:
        """Answer the rows that are not done; see the function `run`."""
        inputs = self._begin(resume)
        journal = self._journal
        before = sum(journal.counts())
        self._progress = progress = Progress("batch", journal.total - before, unit="rows")
        job = Job(
            inputs,
            journal,
            model=self._api.model,
            seed=self._seed,
            ordered=self._ordered,
            stop_if_alike=before == 0,
            on_done=self._on_done,
        )
        status = 1
        try:
            if before < journal.total:
                status = asyncio.run(self._answer(job))
            else:
                journal.open()  # makes the output of an empty input
                status = 0
        finally:
            print(
                f"batch: {progress.done} rows, {self._failed} of them errors, {progress.tokens} "
                f"tokens in {progress.seconds:.1f} s ({progress.rate:.0f} tokens/s)"
                + (f"; {before} rows were done before" if before else ""),
                file=sys.stderr,
            )
            if status:
                print(
                    f"batch: {before + progress.done} of {journal.total} rows are done; "
                    "to continue, run the same command with --resume",
                    file=sys.stderr,
                )
        self._kept_stdin.unlink(missing_ok=True)
        if status == 0 and before == 0 and 0 < journal.total == self._failed:
            reason = f"; {journal.paths[-1]} says why"
            if job.common_error is not None:
                reason = f" with this error: {job.common_error}"
            print(f"batch: every row failed{reason}", file=sys.stderr)
            return 1
        return status

    def _on_done(self, status: int, tokens: int) -> None:
        self._failed += status != 200
        self._progress.advance(tokens)

    def _begin(self, resume: bool) -> Inputs:
        """Read the input once, and begin a run, or check that the input is unchanged."""
        files, journal, spooled = self._files, self._journal, Path(f"{self._kept_stdin}.new")
        if len(files) > 1:
            print(f"batch: reads {', '.join(map(str, files))}", file=sys.stderr)
        if STDIN in files:
            spool(sys.stdin.buffer, spooled)
        try:
            inputs = Inputs([spooled if path == STDIN else path for path in files])
            settings = {
                "inputs": inputs.digests(),
                "ordered": self._ordered,
                "errors": len(journal.paths) > 1,
                "model": self._api.model,
                "seed": self._seed,
            }
            if resume and journal.settings is not None:
                self._require_same(journal.settings, settings)
                if lost := journal.recover():
                    print(f"batch: {lost} rows are no longer in the output", file=sys.stderr)
            else:
                journal.begin(settings, _row_ids(inputs, self._api.model))
        except WeftError:
            spooled.unlink(missing_ok=True)
            raise
        if STDIN in files:
            os.replace(spooled, self._kept_stdin)
        return Inputs([self._kept_stdin if path == STDIN else path for path in files])

    def _require_same(self, begun: dict[str, Any], now: dict[str, Any]) -> None:
        """Raise ConfigError if the run began with another input or other settings."""
        output, remedy = self._journal.paths[0], "--overwrite starts again"
        if len(begun["inputs"]) != len(now["inputs"]):
            raise ConfigError(
                f"{output} was begun with {len(begun['inputs'])} input files, and now there are "
                f"{len(now['inputs'])}; {remedy}"
            )
        for path, was, digest in zip(self._files, begun["inputs"], now["inputs"], strict=True):
            if was != digest:
                name, hint = str(path), ""
                if path == STDIN:
                    name = "stdin"
                    if self._kept_stdin.exists():
                        hint = f" (the earlier stdin is in {self._kept_stdin})"
                raise ConfigError(f"{name} has changed since {output} was begun{hint}; {remedy}")
        for name in ("ordered", "errors", "model", "seed"):
            if begun[name] != now[name]:
                raise ConfigError(
                    f"{output} was begun with {name} = {begun[name]}, which is now {now[name]}; "
                    f"{remedy}"
                )

    async def _answer(self, job: Job) -> int:
        """Load the model and run the job, until its end or a signal; return the exit status."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self._load_and_answer(job))
        status = 0

        def on_signal(number: signal.Signals) -> None:
            nonlocal status
            status = 128 + number
            for each in _SIGNALS:  # a second signal ends the process at once
                loop.remove_signal_handler(each)
            print(f"batch: ends by {number.name}", file=sys.stderr)
            work.cancel()

        for number in _SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        try:
            await work
        except asyncio.CancelledError:
            if not status:
                raise
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
        return status

    async def _load_and_answer(self, job: Job) -> None:
        self._api.engine = engine = await self._start()
        workers = width(engine)
        try:
            self._journal.open()
            with self._progress:
                await job.run(Feeder(self._api, engine, workers).post, workers)
        finally:
            await engine.shutdown(drain=False)


def _row_ids(inputs: Inputs, model: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield the index, place and custom_id of each row, for the journal."""
    for line in inputs:
        yield line.index, line.place, parse(line, model).custom_id
