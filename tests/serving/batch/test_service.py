"""A server's batches in this process, with an engine on a mock model: what goes wrong with one."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace as replace_config
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace
from support.batches import prompt
from support.disks import small_disk
from support.engine import SLOW, collect, mock_config, params, started

from weft.errors import DiskError, RequestError
from weft.serving.api.app import build_app
from weft.serving.api.state import ServerState
from weft.serving.batch import service as service_module
from weft.serving.batch.files import Inputs
from weft.serving.batch.objects import LIVE, BatchObject, FileObject, new_id, now
from weft.serving.batch.service import BatchService
from weft.serving.batch.storage import ANYONE, Store
from weft.serving.engine.engine import AsyncEngine

OWNER = "somebody"
URL = "/v1/completions"


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncEngine]:
    """Eight places, steps of 5 ms."""
    config = mock_config(tmp_path / "mock", monkeypatch)
    async with started(config, in_process=True, runner_factory=SLOW) as engine:
        yield engine


@asynccontextmanager
async def serving(folder: Path, engine: AsyncEngine) -> AsyncIterator[BatchService]:
    """The batches of a server, which begins no more rows when it ends."""
    state = ServerState(model="mock", engine=engine, state_dir=folder)
    state.batches.open()
    state.batches.start(engine)
    try:
        yield state.batches
    finally:
        state.draining = True
        await state.batches.close()


def row(custom_id: str, **body: Any) -> dict[str, Any]:
    content = {"prompt": [1, 2], "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": content}


def upload(store: Store, name: str, rows: list[dict[str, Any]]) -> None:
    """A file of this name."""
    path = store.upload_path(name)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    store.add_file(FileObject(name, 0, name, "batch", now()), path, OWNER)


def new(id: str, file: str) -> BatchObject:
    return BatchObject(id, URL, file, "24h", now(), now() + 24 * 3600)


async def create(service: BatchService, id: str, rows: list[dict[str, Any]]) -> str:
    upload(service.store, f"{id}-rows", rows)
    await service.create(new(id, f"{id}-rows"), OWNER)
    return id


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)


async def ended(service: BatchService, id: str) -> BatchObject:
    await until(lambda: service.store.batch(id, ANYONE).status not in LIVE)
    return service.store.batch(id, ANYONE)


def lines(store: Store, file: Any) -> dict[str, Any]:
    """A file of answers, by the rows' custom_ids."""
    found = [json.loads(line) for line in store.content(file, OWNER).read_text().splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found)
    return by_id


def long(count: int) -> list[dict[str, Any]]:
    """Rows of which the first are answered soon, and all of them in a while."""
    return [row(f"r{i}", prompt=prompt(i), max_tokens=4 if i < 9 else 100) for i in range(count)]


async def interrupted(folder: Path, engine: AsyncEngine) -> Path:
    """A batch "first" of 40 rows, of which some are answered; its folder."""
    async with serving(folder, engine) as service:
        await create(service, "first", long(40))
        output = service.store.folder / "batches" / "first" / "output"
        await until(lambda: output.exists() and output.stat().st_size > 0)
    return output.parent


def _input_is_gone(folder: Path) -> None:
    (folder.parent.parent / "files" / "first-rows").unlink()


def _input_is_another(folder: Path) -> None:
    with (folder.parent.parent / "files" / "first-rows").open("a") as file:
        file.write(json.dumps(row("more")) + "\n")


def _output_is_another(folder: Path) -> None:
    data = (folder / "output").read_bytes()
    (folder / "output").write_bytes(data[:50] + bytes([data[50] ^ 1]) + data[51:])


def _state_is_gone(folder: Path) -> None:
    for path in folder.glob("state*"):
        path.unlink()


def _state_is_none(folder: Path) -> None:
    _state_is_gone(folder)
    (folder / "state").write_text("These are my notes, which are older than SQLite.\n" * 99)


@pytest.mark.parametrize(
    ("damage", "message", "kept"),
    [
        (_input_is_gone, "input file first-rows is gone", True),
        (_input_is_another, "input file first-rows has changed since the batch began", True),
        (_output_is_another, "bytes 0 to ", False),
        (_state_is_gone, "the state of the batch is gone", False),
        (_state_is_none, "the state batches/first/state: file is not a database", False),
    ],
)
async def test_what_cannot_be_mended_ends_a_batch_and_no_other(
    engine: AsyncEngine,
    tmp_path: Path,
    damage: Callable[[Path], None],
    message: str,
    kept: bool,
) -> None:
    folder = await interrupted(tmp_path / "state", engine)
    done = len((folder / "output").read_bytes().splitlines())
    damage(folder)
    async with serving(tmp_path / "state", engine) as service:
        await create(service, "second", [row("a")])
        assert (await ended(service, "second")).status == "completed"
        first = await ended(service, "first")
        assert first.status == "failed"
        assert first.failed_at is not UNSET
        assert first.errors is not UNSET
        (error,) = first.errors.data
        assert error.code == "cannot_be_run"
        assert error.message.startswith(message)
        if kept:
            assert len(lines(service.store, first.output_file_id)) == done
            assert first.request_counts.completed == done
        else:
            assert first.output_file_id is UNSET


async def test_a_fault_of_ours_ends_a_batch_and_no_other(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = service_module.validate

    def faulty(batch: BatchObject, *args: Any, **options: Any) -> Any:
        assert batch.id != "first", "planted"
        return validate(batch, *args, **options)

    monkeypatch.setattr(service_module, "validate", faulty)
    async with serving(tmp_path / "state", engine) as service:
        await create(service, "first", [row("a")])
        await create(service, "second", [row("a")])
        assert (await ended(service, "second")).status == "completed"
        first = await ended(service, "first")
        assert first.status == "failed"
        assert first.errors is not UNSET
        assert [error.code for error in first.errors.data] == ["internal_error"]


@pytest.fixture
def disk() -> Iterator[Path]:
    with small_disk(1 << 20) as path:
        yield path


async def test_a_full_disk_is_waited_for(
    engine: AsyncEngine, disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Uploads and new batches are a 507; a batch that is there is validated when there is room."""
    monkeypatch.setattr(service_module, "RETRY", 0.05)
    store = Store(disk)
    upload(store, "rows", [row("a")])
    store.add_batch(new("first", "rows"), OWNER)
    store.close()
    ballast = disk / "ballast"
    async with serving(disk, engine) as service:
        pass  # what it makes at its start has room
    batch = replace(new("second", "rows"), metadata={"a": "x" * 500})
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(512)):
            pass
    state = ServerState(model="mock", engine=engine, state_dir=disk)
    async with serving(disk, engine) as service:
        state.batches = service
        await until(lambda: "batch first is paused" in caplog.text)
        with pytest.raises(DiskError, match="disk is full"):
            await create_many(service, batch)
        transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            for content in (b"{}\n" * 1000, b""):
                form: Any = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
                response = await http.post("/v1/files", **form)
                assert response.status_code == 507, response.text
                assert response.json()["error"]["code"] == "insufficient_storage"
        assert {path.name for path in (disk / "files").iterdir()} == {"rows"}
        ballast.unlink()
        assert (await ended(service, "first")).status == "completed"


async def create_many(service: BatchService, batch: BatchObject) -> None:
    """There may be room for some in what the database has."""
    for number in range(100):
        await service.create(replace(batch, id=f"second-{number}"), OWNER)


async def test_cancel_while_it_is_validated(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read once, and given up."""
    validate = service_module.validate
    begun, goes_on = threading.Event(), threading.Event()
    times = 0

    def slow(*args: Any, **options: Any) -> Any:
        nonlocal times
        times += 1
        begun.set()
        assert goes_on.wait(60)
        return validate(*args, **options)

    monkeypatch.setattr(service_module, "validate", slow)
    async with serving(tmp_path / "state", engine) as service:
        await create(service, "first", [row("a")])
        await until(begun.is_set)
        assert (await service.cancel("first", OWNER)).status == "cancelling"
        goes_on.set()
        first = await ended(service, "first")
        assert first.status == "cancelled"
        assert first.output_file_id is UNSET
    assert times == 1


@asynccontextmanager
async def others(engine: AsyncEngine, count: int) -> AsyncIterator[None]:
    """So many requests of others are in the engine all the time."""

    async def ask(number: int) -> None:
        while True:
            with suppress(RequestError):  # the queue is full
                await collect(engine, [3, number], params(max_tokens=10, ignore_eos=True))
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(ask(number)) for number in range(count)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def test_rows_of_many_answers_get_on_while_others_are_served(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Each answer takes a place as one is free; of eight one is for others."""
    wide = [row("n", n=8), row("prompts", prompt=[[1], [2]], n=4), row("very", n=30)]
    narrow = [row(f"r{i}", n=1 + i % 3, prompt=prompt(i)) for i in range(20)]
    rows = [*narrow[:5], *wide, *narrow[5:]]
    most = 0
    async with serving(tmp_path / "state", engine) as service, others(engine, 2):
        await create(service, "first", rows)
        while service.store.batch("first", ANYONE).status in LIVE:
            most = max(most, engine.live)
            await asyncio.sleep(0.001)
        first = await ended(service, "first")
        assert first.request_counts.completed == len(rows)
        answers = lines(service.store, first.output_file_id)
    for each in rows:
        prompts = len(each["body"]["prompt"]) if each["custom_id"] == "prompts" else 1
        choices = answers[each["custom_id"]]["response"]["body"]["choices"]
        assert len(choices) == prompts * each["body"].get("n", 1)
    assert 6 <= most <= 7 + 2  # others come whenever they like
    # Nobody waited for the end of the batch.
    assert list(answers).index("very") < len(rows) - 3


async def test_rows_wait_while_others_need_all_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a row, too, which is an answer in the end."""
    texts = [[1 + i % 50, 2, 3] for i in range(400)]
    body = {"model": "mock", "input": texts}
    url = "/v1/embeddings"
    config = replace_config(mock_config(tmp_path / "mock", monkeypatch), max_queue=4)
    async with (
        started(config, in_process=True, runner_factory=SLOW) as engine,
        serving(tmp_path / "state", engine) as service,
    ):
        rows = [{"custom_id": "a", "method": "POST", "url": url, "body": body}]
        upload(service.store, "rows", rows)
        await service.create(replace(new("first", "rows"), endpoint=url), OWNER)
        await until(lambda: engine.stats.steps > 0)
        async with others(engine, engine.places):
            await until(lambda: engine.live == engine.places)
            steps = engine.stats.steps
            await until(lambda: engine.stats.steps > steps + 50)
            assert service.store.batch("first", ANYONE).status == "in_progress"
        first = await ended(service, "first")
        assert first.request_counts.completed == 1
        response = lines(service.store, first.output_file_id)["a"]["response"]
        assert len(response["body"]["data"]) == len(texts)


async def test_one_that_drains_begins_no_rows_and_goes_on_later(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    """Those that run come to their end, and are not run again."""
    folder = await interrupted(tmp_path / "state", engine)
    before = (folder / "output").read_bytes()
    assert 0 < len(before.splitlines()) < 40
    async with serving(tmp_path / "state", engine) as service:
        first = await ended(service, "first")
        content = service.store.content(str(first.output_file_id), OWNER)
        assert content.read_bytes().startswith(before)
        for i, line in enumerate(lines(service.store, first.output_file_id).values()):
            assert line["response"]["status_code"] == 200, i
        assert first.request_counts.completed == 40


async def test_what_is_left_when_the_time_is_over_is_an_error(
    engine: AsyncEngine, tmp_path: Path
) -> None:
    await interrupted(tmp_path / "state", engine)
    store = Store(tmp_path / "state")
    store.change("first", lambda batch: replace(batch, expires_at=now()), ANYONE)
    store.close()
    async with serving(tmp_path / "state", engine) as service:
        first = await ended(service, "first")
        assert first.status == "expired"
        assert first.expired_at is not UNSET
        left = lines(service.store, first.error_file_id)
        assert len(left) == first.request_counts.failed == 40 - first.request_counts.completed
        assert {line["error"]["code"] for line in left.values()} == {"batch_expired"}
        for id, line in lines(service.store, first.output_file_id).items():
            (choice,) = line["response"]["body"]["choices"]
            tokens = 4 if int(id[1:]) < 9 else 100
            assert len(choice["text"]) == tokens


async def test_a_file_whose_deletion_was_cut_short_is_removed(
    engine: AsyncEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An output; the errors beside it stay, as do others' files."""
    async with serving(tmp_path, engine) as service:
        await create(service, "first", [row("a"), row("hot", temperature=9)])
        first = await ended(service, "first")
    folder = tmp_path / "batches" / "first"
    (folder / "somebody's own").touch()
    store = Store(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", raise_interrupted)
        with pytest.raises(InterruptedError):
            store.delete_file(str(first.output_file_id), OWNER)
    store.close()
    assert (folder / "output").exists()
    store = Store(tmp_path)
    assert {path.name for path in folder.iterdir()} == {"errors", "somebody's own"}
    assert lines(store, first.error_file_id).keys() == {"hot"}
    store.close()


def raise_interrupted(*_: Any, **__: Any) -> None:
    raise InterruptedError


def test_what_a_server_that_was_killed_has_left_is_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    upload(store, "whole", [row("a")])
    store.close()
    for name in (new_id("file-"), "somebody's own"):
        (tmp_path / "files" / name).write_bytes(b"{")
    store = Store(tmp_path)
    left = {path.name for path in (tmp_path / "files").iterdir()}
    assert left == {"whole", "somebody's own"}
    assert list(Inputs([store.content("whole", OWNER)]))
    store.close()


async def test_a_file_that_has_expired_is_removed(engine: AsyncEngine, tmp_path: Path) -> None:
    """No client finds it; a batch can still read it, and its other files stay."""
    store = Store(tmp_path)
    for name in ("read", "old", "lasts", "young"):
        upload(store, name, [row(str(i), max_tokens=40) for i in range(40)])
    store.add_batch(new("first", "read"), OWNER)
    for name, left in (("read", -1), ("old", 0), ("young", 3600)):
        with store._db.transaction() as db:
            file = msgspec.json.encode(replace(store.file(name, ANYONE), expires_at=now() + left))
            db.execute("UPDATE file SET body = ? WHERE id = ?", (file, name))
    store.close()
    async with serving(tmp_path, engine) as service:
        store = service.store
        names = [file.id for file in listed(store)]
        assert names == ["lasts", "young"]
        for name in ("read", "old"):
            with pytest.raises(RequestError, match="there is no file"):
                store.content(name, OWNER)
            with pytest.raises(RequestError, match="there is no file"):
                store.add_batch(new("second", name), OWNER)
        await until(lambda: not store.upload_path("old").exists())
        assert store.upload_path("read").exists()
        batch = await ended(service, "first")
        assert batch.status == "completed"
        assert batch.request_counts.completed == 40
        await until(lambda: not store.upload_path("read").exists())
        assert {"lasts", "young"} < {file.id for file in listed(store)}


def listed(store: Store) -> list[FileObject]:
    return store.files(OWNER, purpose=None, after=None, limit=9, newest_first=False)
