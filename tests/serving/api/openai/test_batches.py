"""/v1/files and /v1/batches, with OpenAI's client over a real socket."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch, FileObject
from support.batches import answer, prompt
from support.documents import check_documented
from support.mock_runner import CRASH_TOKEN
from support.server import ENVIRONMENT, TIMEOUT, Server, start_server
from support.tokenizers import write_byte_level

SLOW_MOCK = "support.mock_runner:load_slowly"
URL: Any = "/v1/completions"
KEYS = ("sk-first-key", "sk-other-key")
ENDED = ("completed", "failed", "cancelled", "expired")


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of a mock model, which keeps its files."""
    path = tmp_path_factory.mktemp("mock")
    model = write_byte_level(path / "mock")
    settings = {"max_num_seqs": 8, "max_model_len": 4096, "state_dir": str(path / "state")}
    keys = ",".join(KEYS)
    with start_server(model, path, loader=SLOW_MOCK, api_key=keys, **settings) as server:
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield server


@pytest.fixture
def client(mock: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mock.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


@contextlib.contextmanager
def own(path: Path, **settings: Any) -> Iterator[tuple[Server, openai.OpenAI]]:
    """A server of the test's own, which is started again on the same folder."""
    model = write_byte_level(path / "mock")
    state = {"state_dir": str(path / "state"), "max_num_seqs": 8, "prefix_caching": False}
    with (
        start_server(model, path, loader=SLOW_MOCK, **(state | settings)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield server, client


def row(custom_id: str, **body: Any) -> dict[str, Any]:
    content = {"model": "mock", "prompt": [1, 2], "max_tokens": 4, "ignore_eos": True} | body
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": content}


def upload(client: openai.OpenAI, rows: list[Any]) -> FileObject:
    text = "".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows)
    return client.files.create(file=("rows.jsonl", text.encode()), purpose="batch")


def create(client: openai.OpenAI, rows: list[Any], **more: Any) -> Batch:
    file = upload(client, rows)
    return client.batches.create(
        input_file_id=file.id, endpoint=URL, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    deadline = time.monotonic() + TIMEOUT
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    return batch


def lines(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """A file of answers, by the rows' custom_ids."""
    assert file_id is not None
    found = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    by_id = {line["custom_id"]: line for line in found}
    assert len(by_id) == len(found)
    return by_id


def test_a_batch_from_upload_to_content(client: openai.OpenAI, mock: Server) -> None:
    rows = [row(f"r{i}", prompt=[1, 2, 3 + i]) for i in range(20)]
    rows.insert(7, row("hot", temperature=9))
    batch = create(client, rows, metadata={"who": "tests"})
    assert batch.status == "validating"
    assert batch.metadata == {"who": "tests"}
    batch = ended(client, batch)
    assert batch.status == "completed", batch
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (21, 20, 1)
    times = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert times == sorted(times, key=lambda moment: moment or 0)
    assert batch.expires_at == batch.created_at + 24 * 3600
    answers = lines(client, batch.output_file_id)
    assert answers.keys() == {f"r{i}" for i in range(20)}
    for line in answers.values():
        assert line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] == 4
    (error,) = lines(client, batch.error_file_id).values()
    assert error["response"]["status_code"] == 400
    assert error["response"]["body"]["error"]["param"] == "temperature"
    assert batch.output_file_id is not None
    output = client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.bytes) == (
        "batch_output",
        len(client.files.content(output.id).content),
    )
    check_bodies(mock.http, batch)


def check_bodies(http: httpx.Client, batch: Batch) -> None:
    """What is answered has OpenAI's types and shapes."""
    seen = {
        "Batch": http.get(f"/v1/batches/{batch.id}").json(),
        "ListBatchesResponse": http.get("/v1/batches").json(),
        "OpenAIFile": http.get(f"/v1/files/{batch.output_file_id}").json(),
        "ListFilesResponse": http.get("/v1/files").json(),
    }
    Batch.model_validate(seen["Batch"], strict=True)
    FileObject.model_validate(seen["OpenAIFile"], strict=True)
    for name, body in seen.items():
        check_documented(name, body)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([], [("empty_file", None)]),
        ([row("a"), row("b"), row("a")], [("duplicate_custom_id", 3)]),
        (["{", row("b"), {"prompt": "x"}], [("invalid_request", 1), ("invalid_request", 3)]),
        ([row("a") | {"url": "/v1/chat/completions"}], [("invalid_request", 1)]),
        ([row("a", stream=True)], [("invalid_request", 1)]),
    ],
    ids=["empty", "duplicate", "no requests", "another endpoint", "streamed"],
)
def test_an_input_that_is_wrong_fails_before_anything_is_run(
    client: openai.OpenAI, mock: Server, rows: list[Any], found: list[tuple[str, int | None]]
) -> None:
    before = mock.metric("generation_tokens_total")
    batch = ended(client, create(client, rows))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line) for error in batch.errors.data] == found
    assert batch.output_file_id is None
    assert mock.metric("generation_tokens_total") == before
    check_documented("Batch", mock.http.get(f"/v1/batches/{batch.id}").json())


def test_cancel_keeps_what_is_answered(client: openai.OpenAI) -> None:
    """And a batch that waits behind it is cancelled without waiting; its file is then free."""
    first = create(client, [row(f"r{i}", max_tokens=200) for i in range(100)])
    behind = create(client, [row("b", max_tokens=200)])
    deadline = time.monotonic() + TIMEOUT
    while (counts := client.batches.retrieve(first.id).request_counts) is None or (
        counts.completed == 0
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(openai.ConflictError, match="reads file"):
        client.files.delete(behind.input_file_id)
    assert client.batches.cancel(behind.id).status in ("cancelling", "cancelled")
    behind = ended(client, behind)
    assert behind.status == "cancelled"
    assert behind.output_file_id is None
    assert client.files.delete(behind.input_file_id).deleted
    assert client.batches.cancel(first.id).status == "cancelling"
    first = ended(client, first)
    assert first.status == "cancelled"
    assert first.cancelled_at is not None
    assert first.request_counts is not None
    assert 0 < first.request_counts.completed < 100
    for batch in (first, behind):
        with pytest.raises(openai.ConflictError, match="is cancelled; it cannot be cancelled"):
            client.batches.cancel(batch.id)
    assert len(lines(client, first.output_file_id)) == first.request_counts.completed
    with pytest.raises(openai.BadRequestError, match="no file"):
        client.batches.create(
            input_file_id=behind.input_file_id, endpoint=URL, completion_window="24h"
        )


def test_interactive_requests_go_first(client: openai.OpenAI) -> None:
    """A batch that has more than the engine can run leaves a place to others."""
    batch = create(client, [row(f"r{i}", max_tokens=400) for i in range(40)])
    deadline = time.monotonic() + TIMEOUT
    while client.batches.retrieve(batch.id).status != "in_progress":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for i in range(5):
        answer = client.completions.create(model="mock", prompt=[9, i], max_tokens=4)
        assert answer.choices[0].finish_reason in ("stop", "length")
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    assert counts.completed < 40
    client.batches.cancel(batch.id)
    ended(client, batch)


def test_files(client: openai.OpenAI, mock: Server, tmp_path: Path) -> None:
    content = b'{"custom_id": "a"}\n' * 200_000  # more than is kept in memory
    path = tmp_path / "large.jsonl"
    path.write_bytes(content)
    file = client.files.create(file=path, purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("large.jsonl", len(content), "batch")
    assert client.files.content(file.id).content == content
    assert client.files.retrieve(file.id) == file
    others = [upload(client, [row(str(i))]) for i in range(3)]
    newest = [f.id for f in client.files.list(limit=2)]  # which asks for all pages
    assert newest[:4] == [*(f.id for f in reversed(others)), file.id]
    oldest = client.files.list(limit=1, order="asc", purpose="batch")
    assert oldest.has_more
    assert len(oldest.data) == 1
    gone = mock.http.delete(f"/v1/files/{file.id}").json()
    check_documented("DeleteFileResponse", gone)
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError, match="there is no file"):
            ask(file.id)


def test_files_may_expire(client: openai.OpenAI) -> None:
    rows = json.dumps(row("a")).encode()
    file = client.files.create(
        file=("rows.jsonl", rows),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id).expires_at == file.expires_at
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint=URL,
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    output = client.files.retrieve(str(ended(client, batch).output_file_id))
    assert output.expires_at == output.created_at + 7200
    assert upload(client, [row("a")]).expires_at is None


def test_an_expiry_that_is_refused(client: openai.OpenAI, mock: Server) -> None:
    upload: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}}
    anchor, seconds = "expires_after[anchor]", "expires_after[seconds]"
    for form, param in (
        ({anchor: "created_at"}, seconds),
        ({seconds: "3600"}, anchor),
        ({anchor: "now", seconds: "3600"}, anchor),
        ({anchor: "created_at", seconds: "3599"}, seconds),
        ({anchor: "created_at", seconds: "2592001"}, seconds),
        ({anchor: "created_at", seconds: "an hour"}, seconds),
        ({anchor: "created_at", seconds: "9" * 5000}, seconds),
        ({anchor: "created_at", seconds: "-3600"}, seconds),
    ):
        data = {"purpose": "batch"} | form
        response = mock.http.post("/v1/files", **upload, data=data)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert param in response.json()["error"]["message"]
    for expiry in ({"anchor": "created_at", "seconds": 60}, {"anchor": "x", "seconds": 3600}, 5):
        with pytest.raises(openai.BadRequestError, match="output_expires_after"):
            create(client, [row("a")], output_expires_after=expiry)


def test_what_a_key_has_made_is_not_there_for_others(client: openai.OpenAI, mock: Server) -> None:
    batch = ended(client, create(client, [row("a")]))
    assert batch.output_file_id is not None
    options: Any = {"base_url": f"{mock.url}/v1", "api_key": KEYS[1], "max_retries": 0}
    with openai.OpenAI(**options) as other:
        assert not list(other.files.list())
        assert not list(other.batches.list())
        for id in (batch.input_file_id, batch.output_file_id):
            for ask in (other.files.retrieve, other.files.content, other.files.delete):
                with pytest.raises(openai.NotFoundError, match="there is no file"):
                    ask(id)
        for ask_batch in (other.batches.retrieve, other.batches.cancel):
            with pytest.raises(openai.NotFoundError, match="there is no batch"):
                ask_batch(batch.id)
        for list_after in (
            lambda: other.batches.list(after=batch.id),
            lambda: other.files.list(after=batch.input_file_id),
            lambda: other.batches.create(
                input_file_id=batch.input_file_id, endpoint=URL, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.BadRequestError, match="there is no"):
                list_after()
        own_batch = ended(other, create(other, [row("b")]))
        assert lines(other, own_batch.output_file_id).keys() == {"b"}
        assert {file.id for file in other.files.list()} == {
            own_batch.input_file_id,
            own_batch.output_file_id,
        }
    assert client.files.content(batch.output_file_id).text


def test_pages_of_batches(client: openai.OpenAI) -> None:
    made = [ended(client, create(client, [])).id for _ in range(5)]
    listed = [batch.id for batch in client.batches.list(limit=2)]
    assert listed[:5] == made[::-1]
    page = client.batches.list(limit=2, after=made[2])
    assert [batch.id for batch in page.data] == [made[1], made[0]]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 36}}, "output_expires"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_batch_that_cannot_be_made_is_400(
    client: openai.OpenAI, change: dict[str, Any], param: str
) -> None:
    file = upload(client, [row("a")])
    wish = {"input_file_id": file.id, "endpoint": URL, "completion_window": "24h"}
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/batches", cast_to=Batch, body=wish | change)
    assert str(caught.value.param).startswith(param)


@pytest.mark.parametrize(
    ("seed", "kills"), [(1, 2), pytest.param(2, 20, marks=pytest.mark.slow)], ids=["2", "20"]
)
def test_a_server_that_is_killed_goes_on(tmp_path: Path, seed: int, kills: int) -> None:
    """Two batches; kill -9 at random moments. Each row is there once, with what it must be."""
    rng = random.Random(seed)
    count = 60 * kills
    rows = [row(f"r{i}", prompt=prompt(i), max_tokens=1 + i % 20) for i in range(count)]
    with own(tmp_path) as (server, client):
        batches = [create(client, part).id for part in (rows, rows[:9])]
        server.process.kill()
    for _ in range(kills - 1):
        with own(tmp_path) as (server, client):
            time.sleep(rng.uniform(0, 1.5))
            server.process.kill()
    with own(tmp_path) as (server, client):
        for id, size in zip(batches, (count, 9), strict=True):
            batch = ended(client, client.batches.retrieve(id))
            assert batch.status == "completed", batch
            assert batch.request_counts is not None
            assert batch.request_counts.completed == batch.request_counts.total == size
            found = lines(client, batch.output_file_id)
            assert found.keys() == {f"r{i}" for i in range(size)}
            for i in range(size):
                (choice,) = found[f"r{i}"]["response"]["body"]["choices"]
                assert choice["text"] == answer(i)
    assert not list(tmp_path.glob("state/batches/*/state*"))


def test_a_folder_has_one_server(mock: Server, tmp_path: Path) -> None:
    with (
        pytest.raises(AssertionError, match="another process has it"),
        own(tmp_path, state_dir=str(mock.log.parent / "state")),
    ):
        pass


def test_without_a_folder_files_go_with_the_server(tmp_path: Path) -> None:
    with TemporaryDirectory() as folder:
        environment, temporary = ENVIRONMENT | {"TMPDIR": folder}, Path(folder)
        with own(tmp_path, state_dir=None, environment=environment) as (server, client):
            assert not list(temporary.glob("weft-*/weft.db"))
            batch = ended(client, create(client, [row("a")]))
            assert batch.status == "completed"
            assert len(list(temporary.glob("weft-*/weft.db"))) == 1
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(timeout=TIMEOUT) == 0
        assert not list(temporary.glob("weft-*"))


def test_an_engine_that_fails_is_not_a_rows_end(tmp_path: Path) -> None:
    """It is started again, and so are the rows that it had; one that it fails with has an error."""
    bad = row("bad", prompt=[1, CRASH_TOKEN])
    rows = [row(f"r{i}", prompt=prompt(i), max_tokens=50) for i in range(4)]
    with own(tmp_path, restart=True) as (_, client):
        batch = ended(client, create(client, [*rows, bad]))
        assert batch.status == "completed", batch
        assert lines(client, batch.output_file_id).keys() == {f"r{i}" for i in range(4)}
        error = lines(client, batch.error_file_id)
        assert error.keys() == {"bad"}
        assert error["bad"]["error"]["code"] == "engine_failed"


def test_uploads_that_are_refused(mock: Server) -> None:
    http, file = mock.http, ("a.jsonl", b"{}\n")
    for form, param in (
        ({"files": {"file": file}, "data": {"purpose": "fine-tune"}}, "purpose"),
        ({"files": {"file": file}}, "purpose"),
        ({"files": {"other": file}, "data": {"purpose": "batch"}}, "other"),
        ({"files": {"x": ("", b"{}")}, "data": {"purpose": "batch", "file": "text"}}, None),
    ):
        response = http.post("/v1/files", **form)  # type: ignore[arg-type]
        assert response.status_code == 400, response.text
        if param is not None:
            assert response.json()["error"]["param"] == param
    assert http.post("/v1/files", json={"purpose": "batch"}).status_code == 415
    with socket.create_connection(("127.0.0.1", mock.port), timeout=TIMEOUT) as connection:
        connection.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\n"
            b"content-type: multipart/form-data; boundary=x\r\nx-api-key: %b\r\n\r\n"
            % KEYS[0].encode()
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
    assert http.get("/v1/files?limit=0").status_code == 400
    assert http.get("/v1/batches?after=batch_none").json()["error"]["param"] == "after"
    assert http.get("/v1/batches/batch_none").status_code == 404
    assert http.post("/v1/batches/batch_none/cancel").status_code == 404


@pytest.mark.parametrize(
    "path",
    [
        "..%2fweft.db",
        "..%2fweft.db/content",
        "../weft.db/content",
        "%2e%2e/content",
        "..%2f..%2f..%2f..%2f..%2f..%2fetc%2fpasswd/content",
        "..%5cweft.db/content",
        "%2fetc%2fpasswd/content",
        "file-%00/content",
    ],
)
def test_a_path_is_no_file(mock: Server, path: str) -> None:
    """As bytes on a socket: clients put such paths in order first."""
    fields = ("host: localhost", f"authorization: Bearer {KEYS[0]}", "connection: close")
    head = "\r\n".join([f"GET /v1/files/{path} HTTP/1.1", *fields, "", ""])
    answer = mock.raw(head.encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_found"
