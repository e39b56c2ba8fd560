"""Stored responses, with OpenAI's client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses.response_item_list import ResponseItemList
from support.echo_runner import LOADER, write_echo
from support.server import Server, start_server

from weft.errors import RequestError
from weft.serving.api.responses.store import ResponseStore, Stored

KEYS = "alices-key", "bobs-long-key"


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An echo model, with two keys, and room for few responses."""
    path = tmp_path_factory.mktemp("keyed")
    model = write_echo(path / "echo", marks="<tool_call> <think> </think>")
    with start_server(
        model, path, loader=LOADER, api_key=",".join(KEYS), response_memory=40_000
    ) as server:
        yield server


@pytest.fixture
def alice(keyed: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


@pytest.fixture
def bob(keyed: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEYS[1], max_retries=0) as client:
        yield client


def test_a_conversation_by_ids(alice: openai.OpenAI) -> None:
    first = alice.responses.create(model="echo", input="one", instructions="be brief")
    with alice.responses.stream(model="echo", input="two", previous_response_id=first.id) as events:
        for _ in events:
            pass
        second = events.get_final_response()
    assert (second.output_text, second.previous_response_id) == ("two", first.id)
    third = alice.responses.create(model="echo", input="three", previous_response_id=second.id)
    assert alice.responses.retrieve(third.id) == third
    assert alice.responses.retrieve(second.id).output_text == "two"
    items = alice.responses.input_items.list(third.id, order="asc", limit=2)
    assert isinstance(items.data[0].to_dict()["content"], list)
    texts = [item.to_dict()["content"][0]["text"] for item in items]  # over all pages
    assert texts == ["one", "one", "two", "two", "three"]
    newest = alice.responses.input_items.list(third.id, limit=1)
    assert newest.data[0].to_dict()["content"][0]["text"] == "three"
    assert newest.has_more
    ResponseItemList.model_validate(items.model_dump(), strict=True)
    counted = alice.responses.input_tokens.count(
        model="echo", input="three", previous_response_id=second.id
    )
    assert third.usage is not None
    assert counted.input_tokens == third.usage.input_tokens


def test_references_to_items(alice: openai.OpenAI) -> None:
    first = alice.responses.create(model="echo", input="a")
    second = alice.responses.create(model="echo", input="a")
    (message,) = first.output
    assert message.type == "message"
    conversation: Any = [
        {"type": "item_reference", "id": message.id},
        {"id": second.output[0].id},  # the type may be missing
        {"role": "user", "content": "b"},
    ]
    answer = alice.responses.create(model="echo", input=conversation)
    assert answer.output_text == "b"
    items = alice.responses.input_items.list(answer.id, order="asc")
    assert [item.to_dict()["role"] for item in items] == ["assistant", "assistant", "user"]
    own: Any = [{"role": "user", "content": "secret", "id": "msg_1"}]
    alice.responses.create(model="echo", input=own)  # the id is not the server's
    unknown: Any = [{"type": "item_reference", "id": "msg_1"}]
    with pytest.raises(openai.NotFoundError, match="msg_1"):
        alice.responses.create(model="echo", input=unknown)


def test_many_references_to_an_item_are_refused(alice: openai.OpenAI) -> None:
    """A small body could otherwise stand for any amount of text."""
    (message,) = alice.responses.create(model="echo", input="a").output
    reference: Any = {"type": "item_reference", "id": message.id}
    with pytest.raises(openai.BadRequestError, match=f"{message.id}' twice; refer to it once"):
        alice.responses.create(model="echo", input=[reference] * 1000)
    with pytest.raises(openai.BadRequestError, match="twice"):
        alice.responses.input_tokens.count(model="echo", input=[reference, reference])


def test_a_deleted_response_is_gone(alice: openai.OpenAI) -> None:
    answer = alice.responses.create(model="echo", input="a")
    alice.responses.delete(answer.id)
    assert_gone(alice, answer.id)


def test_store_false_keeps_nothing(alice: openai.OpenAI) -> None:
    answer = alice.responses.create(model="echo", input="a", store=False)
    assert answer.to_dict()["store"] is False
    assert_gone(alice, answer.id)
    (message,) = answer.output
    reference: Any = [{"type": "item_reference", "id": message.id}]
    with pytest.raises(openai.NotFoundError, match="not stored"):
        alice.responses.create(model="echo", input=reference)


def test_a_key_sees_its_own_responses(alice: openai.OpenAI, bob: openai.OpenAI) -> None:
    answer = alice.responses.create(model="echo", input="a")
    assert_gone(bob, answer.id)
    (message,) = answer.output
    reference: Any = [{"type": "item_reference", "id": message.id}]
    with pytest.raises(openai.NotFoundError, match="not stored"):
        bob.responses.create(model="echo", input=reference)
    assert alice.responses.retrieve(answer.id).id == answer.id


def assert_gone(client: openai.OpenAI, response: str) -> None:
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.retrieve(response)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.delete(response)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.input_items.list(response)
    with pytest.raises(openai.NotFoundError, match="not stored"):
        client.responses.cancel(response)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="echo", input="a", previous_response_id=response)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_what_a_stored_response_cannot_do(alice: openai.OpenAI, keyed: Server) -> None:
    answer = alice.responses.create(model="echo", input="a")
    with pytest.raises(openai.BadRequestError, match="close its connection"):
        alice.responses.cancel(answer.id)
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        list(alice.responses.retrieve(answer.id, stream=True))
    with pytest.raises(openai.NotFoundError, match="after is 'msg_1'"):
        alice.responses.input_items.list(answer.id, after="msg_1")
    assert httpx.get(f"{keyed.url}/v1/responses/{answer.id}").status_code == 401


def test_the_least_recently_used_go_first(alice: openai.OpenAI) -> None:
    first = alice.responses.create(model="echo", input="a")
    answers = []
    for _ in range(40):
        answers.append(alice.responses.create(model="echo", input="a").id)
        alice.responses.retrieve(first.id)
    assert_gone(alice, answers[0])
    assert alice.responses.retrieve(answers[-1]).id == answers[-1]
    assert alice.responses.retrieve(first.id).id == first.id


def test_the_store_s_size() -> None:
    store = ResponseStore(10_000)
    for i in range(20):
        store.put("a", f"resp_{i}", Stored(b"{}" * 500, b"[]"), ("msg_same", f"msg_{i}"))
    kept = [i for i in range(20) if _has(store, f"resp_{i}")]
    assert 2 < len(kept) < 10
    assert kept == list(range(20 - len(kept), 20))
    assert store.with_item("a", "msg_same") is store.get("a", "resp_19")
    store.put("a", "resp_large", Stored(b"{}" * 5000, b"[]"), ())
    assert not _has(store, "resp_large")
    assert kept == [i for i in range(20) if _has(store, f"resp_{i}")], "it displaced the others"
    for i in kept:
        store.delete("a", f"resp_{i}")
    with pytest.raises(RequestError, match="msg_same"):
        store.with_item("a", "msg_same")
    assert not ResponseStore(0).keeps


def _has(store: ResponseStore, response: str) -> bool:
    try:
        store.get("a", response)
    except RequestError:
        return False
    return True


def test_a_server_that_stores_nothing(tmp_path: Path) -> None:
    model = write_echo(tmp_path / "echo")
    with start_server(model, tmp_path, loader=LOADER, response_memory=0) as server:
        body = {"model": "echo", "input": "a", "store": True}
        answer = server.http.post("/v1/responses", json=body).json()
        assert answer["store"] is False
        assert server.http.get(f"/v1/responses/{answer['id']}").status_code == 404
