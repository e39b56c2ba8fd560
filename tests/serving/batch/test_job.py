"""A job with a stub in the place of the model: order, memory, and what ends it."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.server import ENVIRONMENT

from weft.errors import EngineError, WeftError
from weft.serving.batch import journal as journal_module
from weft.serving.batch.files import Inputs
from weft.serving.batch.job import Job
from weft.serving.batch.journal import Journal

ANSWER = {
    "choices": [{"text": "x" * 100, "finish_reason": "stop"}],
    "usage": {"completion_tokens": 3},
}
WORKERS = 16


@pytest.fixture
def inputs(tmp_path: Path) -> Inputs:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"prompt": "{row}", "id": {row}}}\n' for row in range(200)))
    return Inputs([path])


@pytest.fixture
def journal(tmp_path: Path, inputs: Inputs) -> Iterator[Journal]:
    with closing(Journal(tmp_path / "state", [tmp_path / "out.jsonl"])) as journal:
        journal.begin({}, ((line.index, line.place, None) for line in inputs))
        journal.open()
        yield journal


def written(journal: Journal) -> list[int]:
    lines = journal.paths[0].read_text().splitlines()
    return [json.loads(line)["index"] for line in lines]


Enter = Callable[[], None]


async def slowly(_: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
    row = int(json.loads(body)["prompt"])
    await asyncio.sleep(random.Random(row).uniform(0, 0.01))
    return 200, json.dumps(ANSWER).encode()


async def test_ordered_rows_come_in_order_and_hold_little(
    inputs: Inputs, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first row is answered when no other can be: they wait for it, a few hundred bytes."""
    monkeypatch.setattr(journal_module, "HELD_BYTES", 1000)
    begun = 0
    others_wait = asyncio.Event()

    async def post(url: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
        nonlocal begun
        begun += 1
        if json.loads(body)["prompt"] != "0":
            return await slowly(url, body, answers, enter)
        await others_wait.wait()
        return 200, json.dumps(ANSWER).encode()

    async def watch() -> None:
        before = -1
        while before != begun:
            before = begun
            await asyncio.sleep(0.1)
        others_wait.set()

    watching = asyncio.create_task(watch())
    await Job(inputs, journal, model="m", seed=0, ordered=True).run(post, WORKERS)
    await watching
    assert written(journal) == list(range(200))


async def test_as_they_finish_otherwise(inputs: Inputs, journal: Journal) -> None:
    counted: list[tuple[int, int]] = []
    job = Job(inputs, journal, model="m", seed=0, on_done=lambda *counts: counted.append(counts))
    await job.run(slowly, WORKERS)
    assert written(journal) != list(range(200))
    assert sorted(written(journal)) == list(range(200))
    assert counted == [(200, 3)] * 200


async def test_what_is_answered_before_a_failure_is_written(
    inputs: Inputs, journal: Journal
) -> None:
    async def post(url: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
        if json.loads(body)["prompt"] == "100":
            raise EngineError("gone")
        return await slowly(url, body, answers, enter)

    job = Job(inputs, journal, model="m", seed=0)
    with pytest.raises(EngineError, match="gone"):
        await job.run(post, WORKERS)
    assert 100 - WORKERS <= len(written(journal)) <= 100 + WORKERS
    await Job(inputs, journal, model="m", seed=0).run(slowly, WORKERS)
    assert sorted(written(journal)) == list(range(200))


async def test_stop_finishes_what_has_begun(inputs: Inputs, journal: Journal) -> None:
    job = Job(inputs, journal, model="m", seed=0)
    begun = set[str]()

    async def post(url: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
        begun.add(json.loads(body)["prompt"])
        if len(begun) == 50:
            job.stop()
        return await slowly(url, body, answers, enter)

    await job.run(post, WORKERS)
    assert {str(row) for row in written(journal)} == begun
    assert 50 <= len(begun) < 50 + WORKERS


@pytest.mark.parametrize("ordered", [True, False])
async def test_what_is_answered_is_written_when_it_is_cancelled_at_the_end(
    inputs: Inputs, journal: Journal, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """While a group is written, and others wait for that. Twice."""
    monkeypatch.setattr(journal_module, "GROUP_SECONDS", 0.001)
    append, close = journal.append, journal_module.Writer.close
    writes, closing, counted = threading.Event(), asyncio.Event(), 0

    def slow(answers: Any) -> None:
        assert writes.wait(60)
        append(answers)

    def noted(writer: journal_module.Writer) -> None:
        close(writer)
        closing.set()

    def on_done(status: int, tokens: int) -> None:
        nonlocal counted
        counted += 1

    monkeypatch.setattr(journal, "append", slow)
    monkeypatch.setattr(journal_module.Writer, "close", noted)
    job = Job(inputs, journal, model="m", seed=0, ordered=ordered, on_done=on_done)
    task = asyncio.create_task(job.run(slowly, WORKERS))
    await closing.wait()
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    writes.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sorted(written(journal)) == list(range(200))
    assert counted == sum(journal.counts()) == 200


@pytest.mark.parametrize("ordered", [True, False])
async def test_a_disk_that_fails_ends_it(
    inputs: Inputs, journal: Journal, monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """Also those that wait for room, of which there is none here beyond a line."""
    monkeypatch.setattr(journal_module, "GROUP_BYTES", 1)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(WeftError, match=r"out\.jsonl: No space left on device"):
        await Job(inputs, journal, model="m", seed=0, ordered=ordered).run(slowly, WORKERS)
    assert written(journal) == []


# argv: a folder and a number of rows. Writes the most memory that it has had, in KiB, before its
# rows and in the end.
_MEMORY = """
import asyncio, resource, sys
from pathlib import Path
from weft.serving.cli.batch import _row_ids
from weft.serving.batch.files import Inputs
from weft.serving.batch.job import Job
from weft.serving.batch.journal import Journal

folder, rows = Path(sys.argv[1]), int(sys.argv[2])
answer = b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}'

async def post(path, body, answers, enter):
    return 200, answer

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

def batch(rows):
    source = folder / f"in-{rows}.jsonl"
    with source.open("w") as file:
        for row in range(rows):
            file.write('{"custom_id": "row-%d", "method": "POST", "url": "/v1/completions", '
                       '"body": {"prompt": "a"}}\\n' % row)
    inputs = Inputs([source])
    journal = Journal(folder / f"state-{rows}", [folder / f"out-{rows}.jsonl"])
    journal.begin({}, _row_ids(inputs, "m"))
    journal.open()
    asyncio.run(Job(inputs, journal, model="m", seed=0).run(post, 256))
    assert journal.counts() == [rows]
    journal.close()

batch(2000)
before = most()
batch(rows)
print(before, most())
"""


@pytest.mark.parametrize("rows", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, rows: int) -> None:
    """Their ids alone would take 100 bytes each. SQLite and the group under way have 8 MiB."""
    command = [sys.executable, "-c", _MEMORY, str(tmp_path), str(rows)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    print(f"{rows} rows: {before} KiB before, {after} KiB after")
    assert after - before < 8 * 1024


def guilty(row: str, *, seen: list[int], restarts: bool) -> Any:
    """An engine that fails, with all that it has, when it is given a row; how many it had then."""
    has: dict[int, asyncio.Future[None]] = {}
    before = len(seen)

    async def post(_: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
        if len(seen) > before and not restarts:
            raise EngineError("gone")
        enter()
        prompt = json.loads(body)["prompt"]
        future = has[int(prompt)] = asyncio.get_running_loop().create_future()
        if prompt == row:
            await asyncio.sleep(0.002)  # others come after it
            seen.append(len(has))
            for each in has.values():
                if not each.done():
                    each.set_exception(EngineError("gone"))
            has.clear()
        else:
            asyncio.get_running_loop().call_later(
                0.003, lambda: future.done() or future.set_result(None)
            )
        await future
        has.pop(int(prompt), None)
        return 200, json.dumps(ANSWER).encode()

    return post


async def test_only_rows_that_were_in_the_engine_count_as_those_it_failed_with(
    inputs: Inputs, journal: Journal
) -> None:
    """Two are; all others wait for room."""
    waiting = 0

    async def post(_: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
        nonlocal waiting
        if json.loads(body)["prompt"] not in ("3", "5"):
            waiting += 1
            await asyncio.Event().wait()
        enter()
        while waiting < WORKERS - 2:
            await asyncio.sleep(0)
        raise EngineError("gone")

    with pytest.raises(EngineError, match="gone"):
        await Job(inputs, journal, model="m", seed=0).run(post, WORKERS)
    assert journal.failures() == {3: 1, 5: 1}


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("retries", [True, False])
async def test_a_row_that_the_engine_fails_with_twice_is_an_error(
    inputs: Inputs, journal: Journal, ordered: bool, retries: bool
) -> None:
    """At first among others, which are then not guilty; then alone, also in another run."""
    seen: list[int] = []
    runs = 1 if retries else 3
    for run in range(runs):
        job = Job(inputs, journal, model="m", seed=0, ordered=ordered, retries=retries)
        if run < runs - 1:
            with pytest.raises(EngineError, match="gone"):
                await job.run(guilty("100", seen=seen, restarts=retries), WORKERS)
        else:
            await job.run(guilty("100", seen=seen, restarts=retries), WORKERS)
    assert seen[0] > 1
    assert seen[1:] == [1]
    assert sorted(written(journal)) == list(range(200))
    if ordered:
        assert written(journal) == list(range(200))
    (error,) = [
        line["error"]
        for line in map(json.loads, journal.paths[0].read_text().splitlines())
        if "error" in line
    ]
    assert error["code"] == "engine_failed"
    assert error["message"] == "the engine failed 2 times with this row"
    assert journal.failures() == {}


async def test_rows_that_are_nested_deeply_are_errors(tmp_path: Path) -> None:
    """At any depth: up to some they are read, up to fewer they can be written."""
    rows = []
    for depth in [*range(900, 1001), 100_000]:
        deep = "[" * depth + "]" * depth
        rows.append(f'{{"prompt": "a", "x": {deep}}}')
        rows.append(f'{{"prompt": "a", "id": {deep}}}')
        rows.append(f'{{"custom_id": {deep}, "url": "u", "body": {{}}}}')
        rows.append(f'{{"custom_id": "a", "url": {deep}, "body": {{}}}}')
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(rows))
    inputs = Inputs([path])
    with closing(Journal(tmp_path / "state", [tmp_path / "out.jsonl"])) as journal:
        journal.begin({}, ((line.index, line.place, None) for line in inputs))
        journal.open()
        await Job(inputs, journal, model="m", seed=0).run(refusing, WORKERS)
        found = [json.loads(line) for line in journal.paths[0].read_text().splitlines()]
    assert len(found) == len(rows)
    messages = [line["error"]["message"] for line in found]
    assert any("is nested too deeply" in message for message in messages)
    assert any("id must be a string or a number" in message for message in messages)
    assert any(message == "no" for message in messages)


async def refusing(_: str, body: bytes, answers: int, enter: Enter) -> tuple[int, bytes]:
    return 400, b'{"error": {"code": null, "message": "no"}}'
