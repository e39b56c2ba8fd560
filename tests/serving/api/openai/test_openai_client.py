"""OpenAI's own client and OpenAI's own schemas agree with what is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from support.documents import SCHEMAS, check_documented, check_type
from support.server import Server

MESSAGES: Any = [{"role": "user", "content": "who weaves the weft?"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").object == "model"


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
    )
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content
    answer = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, answer.choices[0].message, *MESSAGES], max_tokens=2
    )
    assert answer.usage is not None


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="weft", max_tokens=8, temperature=0)
    stream = client.completions.create(
        model="tiny", prompt="weft", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text


async def test_async(server: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 8


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature") as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert caught.value.param == "temperature"


def bodies(http: httpx.Client) -> dict[str, list[Any]]:
    """Responses of every kind, by the name of their schema in OpenAI's document."""
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "n": 2}
    scored = chat | {"logprobs": True, "top_logprobs": 2}
    text = {"model": "tiny", "prompt": "weft", "max_tokens": 5, "n": 2}
    usage = {"stream": True, "stream_options": {"include_usage": True}}

    def post(path: str, body: dict[str, Any]) -> list[Any]:
        response = http.post(path, json=body)
        if not body.get("stream"):
            return [response.json()]
        return [json.loads(e.removeprefix("data: ")) for e in response.text.split("\n\n")[:-2]]

    completions, chats = "/v1/completions", "/v1/chat/completions"
    return {
        "CreateCompletionResponse": [
            *post(completions, text),
            *post(completions, text | {"logprobs": 2}),
        ],
        "CreateChatCompletionResponse": [*post(chats, chat), *post(chats, scored)],
        "CreateChatCompletionStreamResponse": [
            *post(chats, chat | usage),
            *post(chats, scored | usage),
        ],
        "ListModelsResponse": [http.get("/v1/models").json()],
        "Model": [http.get("/v1/models/tiny").json()],
        "ErrorResponse": [http.get("/v1/nothing").json(), *post(chats, {})],
    }


def test_responses_have_the_types_of_the_openai_package(http: httpx.Client) -> None:
    for name, found in bodies(http).items():
        assert found
        for body in found:
            check_type(name, body)


def test_responses_follow_openais_document(http: httpx.Client) -> None:
    if not SCHEMAS.is_file():
        pytest.skip("OpenAI's OpenAPI document is not at hand")
    for name, found in bodies(http).items():
        for body in found:
            check_documented(name, body)
