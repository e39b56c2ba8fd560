"""POST /v1/embeddings, by OpenAI's client and as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.documents import check_documented, check_type
from support.engine import SLOW, collect, mock_config, params, started
from support.mock_runner import NOT_FINITE_TOKEN, hidden_state
from support.server import Server

from weft.errors import RequestError
from weft.serving.api.app import build_app
from weft.serving.api.state import ServerState

TEXTS = ["who weaves the weft?", "the weather is one and two", "w"]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def embed(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post("/v1/embeddings", json={"model": "tiny"} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    check_type("CreateEmbeddingResponse", answer)
    check_documented("CreateEmbeddingResponse", answer)
    return answer


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [each["embedding"] for each in answer["data"]]


def test_openais_client(client: openai.OpenAI, http: httpx.Client) -> None:
    """Which asks for base64 by itself: the numbers are the same."""
    answer = client.embeddings.create(model="tiny", input=TEXTS, user="me")
    plain = client.embeddings.create(model="tiny", input=TEXTS, encoding_format="float")
    assert [each.index for each in answer.data] == [0, 1, 2]
    for one, two in zip(answer.data, plain.data, strict=True):
        assert one.embedding == two.embedding
        assert len(one.embedding) == 64
        assert np.linalg.norm(one.embedding) == pytest.approx(1.0, abs=1e-6)
    assert answer.model == "tiny"
    counts = [http.post("/tokenize", json={"prompt": t}).json()["count"] for t in TEXTS]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(counts)
    few = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8)
    start = np.array(answer.data[0].embedding[:8])
    np.testing.assert_allclose(few.data[0].embedding, start / np.linalg.norm(start), atol=1e-6)


def test_texts_and_token_ids_are_the_same_inputs(http: httpx.Client) -> None:
    ids = [http.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in TEXTS]
    together = vectors(embed(http, {"input": TEXTS}))
    np.testing.assert_allclose(vectors(embed(http, {"input": ids})), together, atol=1e-5)
    for text, own, vector in zip(TEXTS, ids, together, strict=True):
        for single in (text, own, [text], [own]):
            np.testing.assert_allclose(vectors(embed(http, {"input": single})), [vector], atol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "input", "input is missing"),
        ({"input": ""}, "input", "input is empty"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[1], []]}, "input", "input[1] is empty"),
        ({"input": ["a", [1]]}, "input", "input[1] has another type than [0]"),
        ({"input": 3}, "input", "input must be a text, a list of token ids"),
        ({"input": ["a"] * 2049}, "input", "input has 2049 prompts; at most 2048"),
        ({"input": [[1], [320]]}, "input", "input[1]: the prompt has token 320; token ids are in"),
        ({"input": [[1], [5] * 513]}, "input", "input[1]: the prompt has 513 tokens; the context"),
        (
            {"input": ["a", "a " * 9000]},
            "input",
            "input[1]: the prompt of 18000 characters has more",
        ),
        ({"input": "a", "dimensions": 65}, "dimensions", "dimensions is 65; it must be in [1, 64]"),
        (
            {"input": "a", "dimensions": 0},
            "dimensions",
            "dimensions is 0; it should be greater than",
        ),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "this server takes 'float'"),
        ({"input": "a", "temperature": 1}, "temperature", "temperature is not a field"),
        ({"input": "a", "model": "other"}, "model", "there is no model 'other'"),
    ],
)
def test_what_is_wrong_is_named(
    http: httpx.Client, body: dict[str, Any], param: str, message: str
) -> None:
    response = http.post("/v1/embeddings", json={"model": "tiny"} | body)
    assert response.status_code == (404 if param == "model" else 400)
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_a_prompt_may_fill_the_context(http: httpx.Client) -> None:
    assert len(vectors(embed(http, {"input": [7] * 512}))) == 1


def test_more_inputs_than_there_are_places(mock: Server) -> None:
    """Eight run and four wait at once; each is answered, in order, with its own numbers."""
    inputs = [[1 + i % 50, 2, 3] for i in range(40)]
    answer = embed(mock.http, {"model": "mock", "input": inputs})
    for ids, vector in zip(inputs, vectors(answer), strict=True):
        state = hidden_state(ids)
        np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-6)


async def test_a_queue_that_fills_up_meanwhile_refuses_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take each place as soon as it is free."""
    config = replace(mock_config(tmp_path, monkeypatch), max_queue=4)
    inputs = [[1 + i % 50, 2, 3] for i in range(200)]
    async with started(config, in_process=True, runner_factory=SLOW) as engine:

        async def fill() -> None:
            while True:
                with suppress(RequestError):
                    await collect(engine, [3], params(max_tokens=20, ignore_eos=True))
                await asyncio.sleep(0)

        transport = httpx.ASGITransport(build_app(ServerState(model="mock", engine=engine)))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            body = {"model": "mock", "input": inputs}
            asking = asyncio.create_task(http.post("/v1/embeddings", json=body))
            while not engine.live:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(fill()) for _ in range(engine.places)]
            response = await asking
            for task in others:
                task.cancel()
            await asyncio.wait(others)
    assert response.status_code == 200, response.text
    assert len(vectors(response.json())) == len(inputs)


def test_metrics_count_them_and_a_broken_one_fails_its_request_alone(mock: Server) -> None:
    def counted(name: str) -> float:
        lines = mock.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    stopped, sent = 'weft_answers_total{finish_reason="stop"', "weft_request_prompt_tokens_sum"
    before = counted(stopped), counted(sent)
    embed(mock.http, {"model": "mock", "input": [[1, 2, 3], [4, 5]]})
    assert (counted(stopped), counted(sent)) == (before[0] + 2, before[1] + 5)
    bad = {"model": "mock", "input": [[1, 2], [3, NOT_FINITE_TOKEN]]}
    response = mock.http.post("/v1/embeddings", json=bad)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the model's output is not finite"
    embed(mock.http, {"model": "mock", "input": [[1, 2]]})
