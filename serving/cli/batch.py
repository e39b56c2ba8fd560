"""`weft batch`: files in, answers in a file, in this process and an engine of its own.

A run that was interrupted is gone on with only if it would give the same: the
input has the same content, and answers the same model, seed and order.

Does not handle: streaming, other URLs than those of completions.
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

from weft.errors import ConfigError, WeftError
from weft.serving.batch.files import STDIN, Inputs, find, parse, spool
from weft.serving.batch.job import Feeder, Job
from weft.serving.batch.journal import Journal
from weft.serving.config.progress import Progress
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.engine.admission import width
from weft.serving.engine.engine import LOAD_MODEL, AsyncEngine

if TYPE_CHECKING:
    from weft.serving.api.state import ServerState

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    runner_factory: str = LOAD_MODEL,
) -> int:
    """Answer the rows of files.

    Args:
        engine_config: of the engine.
        server_config: of the API whose routes answer.
        sources: files, directories, "-".
        output: for the answers.
        errors: for the answers of rows that failed, if not there, too.
        state: for what is done; beside the output if not given.
        ordered: write answers in the rows' order.
        overwrite: replace the outputs if there are any.
        resume: go on with them.
        runner_factory: see `AsyncEngine.start`.

    Returns:
        0 when every row has a line, be it an error; 128 and the signal's number after a signal.

    Raises:
        ConfigError: a file cannot be read or written, is there and must not be replaced, or is
            not what it was when the run was begun.
        EngineError: the engine died; what is written stays, for `resume`.
        DiskError: the disk is full; so it does then.
    """
    from weft.serving.api.state import ServerState

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
    there = next((path for path in outputs if path.exists()), None)
    if there is not None and not overwrite and not resume:
        raise ConfigError(f"{there} exists; --resume goes on with it, --overwrite replaces it")
    if there is not None and resume and not state.exists():
        raise _no_state(there, state)
    with closing(Journal(state, outputs)) as journal:
        if there is not None and resume and journal.settings is None:
            raise _no_state(there, state)
        start = partial(AsyncEngine.start, engine_config, runner_factory=runner_factory)
        api = ServerState.of(engine_config, server_config)
        command = _Command(api, start, engine_config.seed, files, journal, ordered)
        return command.run(resume=resume)


def _check_output(flag: str, path: Path, files: Sequence[Path]) -> None:
    if path.exists() and any(file.exists() and path.samefile(file) for file in files):
        raise ConfigError(f"{flag} {path} is the input")
    if (path.exists() and not path.is_file()) or not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: it must be a file in a directory that exists")


def _no_state(there: Path, state: Path) -> ConfigError:
    return ConfigError(
        f"{there} exists, and nothing in {state} says what of it is done, so --resume cannot "
        "go on with it; --overwrite replaces it"
    )


class _Command:
    """A run, once it is known where its files are."""

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
        self._kept = Path(f"{journal.paths[0]}.stdin")
        self._failed = 0

    def run(self, *, resume: bool) -> int:
        """See `run` above."""
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
            on_done=self._on_done,
        )
        status = 1
        try:
            if before < journal.total:
                status = asyncio.run(self._answer(job))
            else:
                journal.open()  # an empty answer to an empty file
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
                    "the same command with --resume goes on",
                    file=sys.stderr,
                )
        self._kept.unlink(missing_ok=True)
        return status

    def _on_done(self, status: int, tokens: int) -> None:
        self._failed += status != 200
        self._progress.advance(tokens)

    def _begin(self, resume: bool) -> Inputs:
        """Read the input once, and begin, or see that it is what it was."""
        files, journal, spooled = self._files, self._journal, Path(f"{self._kept}.new")
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
                journal.begin(settings, _identified(inputs, self._api.model))
        except WeftError:
            spooled.unlink(missing_ok=True)
            raise
        if STDIN in files:
            os.replace(spooled, self._kept)
        return Inputs([self._kept if path == STDIN else path for path in files])

    def _require_same(self, begun: dict[str, Any], now: dict[str, Any]) -> None:
        """Refuse to go on with the run of another input, or with other settings."""
        output, anew = self._journal.paths[0], "--overwrite starts anew"
        if len(begun["inputs"]) != len(now["inputs"]):
            raise ConfigError(
                f"{output} was begun with {len(begun['inputs'])} input files, and now there are "
                f"{len(now['inputs'])}; {anew}"
            )
        for path, was, digest in zip(self._files, begun["inputs"], now["inputs"], strict=True):
            if was != digest:
                name = "stdin" if path == STDIN else path
                kept = f" ({self._kept} is)" if path == STDIN and self._kept.exists() else ""
                raise ConfigError(
                    f"{name} is not what it was when {output} was begun{kept}; {anew}"
                )
        for name in ("ordered", "errors", "model", "seed"):
            if begun[name] != now[name]:
                raise ConfigError(
                    f"{output} was begun with {name} = {begun[name]}, which is now {now[name]}; "
                    f"{anew}"
                )

    async def _answer(self, job: Job) -> int:
        """Load the model and run the job, until it ends or a signal comes; the exit status."""
        loop = asyncio.get_running_loop()
        work = asyncio.create_task(self._load_and_answer(job))
        status = 0

        def on_signal(number: signal.Signals) -> None:
            nonlocal status
            status = 128 + number
            for each in _SIGNALS:  # the next one ends this process
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
        most = width(engine)
        try:
            self._journal.open()
            with self._progress:
                await job.run(Feeder(self._api, engine, most).post, most)
        finally:
            await engine.shutdown(drain=False)


def _identified(inputs: Inputs, model: str) -> Iterator[tuple[int, str, str | None]]:
    """Index, place and custom_id of each row, as the journal notes them."""
    for line in inputs:
        yield line.index, line.place, parse(line, model).custom_id
