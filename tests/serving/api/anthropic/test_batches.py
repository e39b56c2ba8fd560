"""/v1/messages/batches, with Anthropic's client over a real socket."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types.messages import MessageBatch
from support import echo_runner
from support.server import TIMEOUT, Server, start_server
from support.tokenizers import write_byte_level

from weft.serving.api.anthropic.batches import _counts, _results
from weft.serving.batch import objects
from weft.serving.batch.storage import Store

KEYS = ("sk-first-key", "sk-other-key")
SLOW_MOCK = "support.mock_runner:load_slowly"


@pytest.fixture(scope="module")
def batcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys; its model repeats the last message."""
    path = tmp_path_factory.mktemp("batcher")
    model = echo_runner.write_echo(path / "echo", marks="<tool_call>")
    settings = {"api_key": ",".join(KEYS), "state_dir": str(path / "state")}
    with start_server(model, path, loader=echo_runner.LOADER, **settings) as server:
        server.http.headers["authorization"] = f"Bearer {KEYS[0]}"
        yield server


def connect(server: Server, key: str = KEYS[0]) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(batcher: Server) -> Iterator[anthropic.Anthropic]:
    with connect(batcher) as client:
        yield client


def request(custom_id: str, said: str = "hello", **params: Any) -> Any:
    message = {"role": "user", "content": said}
    asked = {"model": "echo", "max_tokens": 30, "messages": [message]} | params
    return {"custom_id": custom_id, "params": asked}


def ended(client: anthropic.Anthropic, batch: MessageBatch) -> MessageBatch:
    deadline = time.monotonic() + TIMEOUT
    while batch.processing_status != "ended":
        assert time.monotonic() < deadline, batch
        assert sum(batch.request_counts.to_dict().values()) == batch.request_counts.processing
        time.sleep(0.05)
        batch = client.messages.batches.retrieve(batch.id)
    return batch


def test_a_batch_from_creation_to_deletion(client: anthropic.Anthropic) -> None:
    requests = [request(f"r{i}", said=f"this is {i}") for i in range(5)]
    requests += [request("hot", temperature=9), request("none", messages=[])]
    batch = client.messages.batches.create(requests=requests)
    assert batch.id.startswith("msgbatch_")
    assert batch.request_counts.processing == 7
    assert (batch.processing_status, batch.results_url) == ("in_progress", None)
    assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
    assert batch._request_id
    batch = ended(client, batch)
    assert batch.ended_at is not None
    assert batch.ended_at >= batch.created_at
    assert batch.request_counts.to_dict() == {
        "processing": 0,
        "succeeded": 5,
        "errored": 2,
        "canceled": 0,
        "expired": 0,
    }
    found = {line.custom_id: line.result for line in client.messages.batches.results(batch.id)}
    assert found.keys() == {request["custom_id"] for request in requests}
    for i in range(5):
        result = found[f"r{i}"]
        assert result.type == "succeeded"
        (text,) = result.message.content
        assert text.type == "text"
        assert text.text == f"this is {i}"
        assert result.message.usage.output_tokens > 0
    for name, words in (("hot", "temperature is 9"), ("none", "messages is []")):
        result = found[name]
        assert result.type == "errored"
        assert result.error.error.type == "invalid_request_error"
        assert result.error.error.message.startswith(words)
    deleted = client.messages.batches.delete(batch.id)
    assert (deleted.id, deleted.type) == (batch.id, "message_batch_deleted")
    with pytest.raises(anthropic.NotFoundError, match=batch.id):
        client.messages.batches.retrieve(batch.id)


def test_files_go_with_their_batch(client: anthropic.Anthropic, batcher: Server) -> None:
    def files() -> set[str]:
        return {file["id"] for file in batcher.http.get("/v1/files").json()["data"]}

    before = files()
    batch = ended(client, client.beta.messages.batches.create(requests=[request("a")]))
    with openai.OpenAI(base_url=f"{batcher.url}/v1", api_key=KEYS[0], max_retries=0) as other:
        same = other.batches.retrieve(batch.id)
    assert (same.endpoint, same.status) == ("/v1/messages", "completed")
    assert files() - before == {same.input_file_id, same.output_file_id}
    client.messages.batches.delete(batch.id)
    assert files() == before


def test_pages(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=[request("a")]).id for _ in range(5)]
    for id in made:
        ended(client, client.messages.batches.retrieve(id))
    newest = [batch.id for batch in client.messages.batches.list(limit=2)][:5]
    assert newest == made[::-1]
    page = client.messages.batches.list(before_id=made[1], limit=2)
    assert [batch.id for batch in page.data] == [made[3], made[2]]
    assert page.has_more
    assert (page.first_id, page.last_id) == (made[3], made[2])
    page = client.messages.batches.list(before_id=made[4], limit=2)
    assert (page.data, page.has_more, page.first_id) == ([], False, None)
    with pytest.raises(anthropic.BadRequestError, match="one of after_id and before_id"):
        client.messages.batches.list(before_id=made[4], after_id=made[0])
    with pytest.raises(anthropic.BadRequestError, match="limit"):
        client.messages.batches.list(limit=1001)


def test_another_key_sees_nothing(client: anthropic.Anthropic, batcher: Server) -> None:
    batch = client.messages.batches.create(requests=[request("a")])
    with connect(batcher, KEYS[1]) as other:
        assert [each.id for each in other.messages.batches.list()] == []
        for call in (
            other.messages.batches.retrieve,
            other.messages.batches.cancel,
            other.messages.batches.delete,
        ):
            with pytest.raises(anthropic.NotFoundError):
                call(batch.id)
        response = batcher.http.get(
            f"/v1/messages/batches/{batch.id}/results",
            headers={"authorization": f"Bearer {KEYS[1]}"},
        )
        assert response.status_code == 404
    ended(client, batch)


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], r"requests is \[\]"),
        (
            [request("a"), request("b"), request("a")],
            r"requests\[2\].custom_id is 'a', as in reque",
        ),
        ([request("a", stream=True)], r"requests\[0\].params.stream must be false"),
        ([request("a", stream={})], r"requests\[0\].params.stream must be false"),
        ([request("a b")], r"requests\[0\].custom_id"),
        ([{"custom_id": "a"}], r"requests\[0\].params is missing"),
    ],
)
def test_what_is_refused(client: anthropic.Anthropic, requests: Any, words: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=words):
        client.messages.batches.create(requests=requests)


def test_a_batch_of_the_other_api_is_not_there(batcher: Server) -> None:
    """But a file in OpenAI's form may have Messages rows; their errors have Anthropic's shape."""
    with openai.OpenAI(base_url=f"{batcher.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        rows = [
            {"custom_id": each["custom_id"], "url": "/v1/messages", "body": each["params"]}
            for each in (request("a"), request("b", top_p=3))
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        file = client.files.create(file=("rows.jsonl", text.encode()), purpose="batch")
        endpoint: Any = "/v1/messages"
        batch = client.batches.create(
            input_file_id=file.id, endpoint=endpoint, completion_window="24h"
        )
        deadline = time.monotonic() + TIMEOUT
        while batch.status not in ("completed", "failed"):
            assert time.monotonic() < deadline, batch
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed", batch
        for id, part in ((batch.output_file_id, "content"), (batch.error_file_id, "error")):
            assert id is not None
            line = json.loads(client.files.content(id).text)
            assert part in line["response"]["body"]
            assert line["response"]["body"]["type"] == ("message" if part == "content" else "error")
    response = batcher.http.get(f"/v1/messages/batches/{batch.id}")
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "not_found_error"


def test_a_cancelled_batch(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Each request has a result: an answer, or its cancellation."""
    path = tmp_path_factory.mktemp("cancelled")
    model = write_byte_level(path / "mock")
    with (
        start_server(model, path, loader=SLOW_MOCK, max_num_seqs=2) as server,
        connect(server) as client,
    ):
        requests = [
            request(f"r{i}", model="mock", max_tokens=1 if i == 0 else 3000) for i in range(40)
        ]
        batch = client.messages.batches.create(requests=requests)
        with pytest.raises(anthropic.ConflictError, match="cancel it first"):
            client.messages.batches.delete(batch.id)
        response = server.http.get(f"/v1/messages/batches/{batch.id}/results")
        assert response.status_code == 409
        batch = client.messages.batches.cancel(batch.id)
        assert batch.cancel_initiated_at is not None
        batch = ended(client, batch)
        counts = batch.request_counts
        assert counts.canceled > 0
        assert counts.succeeded + counts.errored + counts.canceled == 40
        found = [line.result.type for line in client.messages.batches.results(batch.id)]
        assert found.count("canceled") == counts.canceled
        assert len(found) == 40
        with pytest.raises(anthropic.ConflictError, match="cannot be cancelled"):
            client.messages.batches.cancel(batch.id)


def test_requests_that_did_not_run(tmp_path_factory: pytest.TempPathFactory) -> None:
    """In an expired batch, and in a failed batch."""
    store = Store(tmp_path_factory.mktemp("store"))
    lines = {
        "output": {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None},
        "errors": {
            "custom_id": "b",
            "response": None,
            "error": {"code": "batch_expired", "message": "late"},
        },
        "input": {"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": {}},
    }
    ids = {}
    for name, line in lines.items():
        more = [line | {"custom_id": "c"}] if name == "input" else []
        path = store.upload_path(f"file-{name}")
        path.write_text("".join(json.dumps(each) + "\n" for each in [line, *more]))
        file = objects.FileObject(f"file-{name}", 1, name, "batch", objects.now())
        store.add_file(file, path, "")
        ids[name] = file.id
    batch = objects.BatchObject(
        "msgbatch_1", "/v1/messages", ids["input"], "24h", 1, 2, "expired",
        request_counts=objects.RequestCounts(2, 1, 1),
        output_file_id=ids["output"], error_file_id=ids["errors"], expired_at=3,
    )  # fmt: skip
    counts = _counts(store, batch)
    assert (counts.succeeded, counts.errored, counts.expired) == (1, 0, 1)
    kinds = {each.custom_id: type(each.result).__name__ for each in _results(store, batch)}
    assert kinds == {"a": "Succeeded", "b": "Expired"}
    failed = objects.BatchErrors([objects.BatchError("disk_error", "no space")])
    batch.status, batch.errors, batch.error_file_id = "failed", failed, objects.UNSET
    batch.request_counts = objects.RequestCounts(2, 1, 0)
    assert _counts(store, batch).errored == 1
    kinds = {each.custom_id: type(each.result).__name__ for each in _results(store, batch)}
    assert kinds == {"a": "Succeeded", "c": "Errored"}
    store.close()
