"""Hugging Face's InferenceClient, which asks an OpenAI-compatible server at `base_url`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import BadRequestError, HfHubHTTPError
from support.server import Server

from weft.models.bundled.tasks import held_out

MODEL = "weft-demo"
MESSAGES = [{"role": "user", "content": "What is 47 plus 85?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture
def client(demo: Server, key: str) -> Iterator[InferenceClient]:
    with InferenceClient(base_url=f"{demo.url}/v1", api_key=key) as client:
        yield client


def test_a_chat(client: InferenceClient) -> None:
    answer = client.chat_completion(
        MESSAGES, model=MODEL, temperature=0, logprobs=True, top_logprobs=2, max_tokens=40
    )
    (choice,) = answer.choices
    assert "132" in choice.message.content
    assert choice.finish_reason == "stop"
    assert len(choice.logprobs.content[0].top_logprobs) == 2
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_joins_to_the_same(client: InferenceClient) -> None:
    whole = client.chat.completions.create(MESSAGES, model=MODEL, temperature=0)
    chunks = client.chat.completions.create(
        MESSAGES, model=MODEL, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = chunks
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens


async def test_async(demo: Server, key: str) -> None:
    async with AsyncInferenceClient(base_url=f"{demo.url}/v1", api_key=key) as client:
        stream = await client.chat_completion(MESSAGES, model=MODEL, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "132" in text


def test_tools(client: InferenceClient) -> None:
    question = held_out("tool_call", 1)[0]
    answer = client.chat_completion(
        list(question.messages), model=MODEL, temperature=0, tools=list(question.tools or ())
    )
    (call,) = answer.choices[0].message.tool_calls
    right = json.loads(question.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert call.function.name == right["name"]
    assert json.loads(call.function.arguments) == right["arguments"]


def test_structured_output(client: InferenceClient) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat_completion(MESSAGES, model=MODEL, response_format=form, max_tokens=100)
    assert json.loads(answer.choices[0].message.content)["city"] in ("Paris", "Rome")


def test_errors(client: InferenceClient, demo: Server) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        client.chat_completion(MESSAGES, model=MODEL, temperature=7)
    with (
        InferenceClient(base_url=f"{demo.url}/v1", api_key="another key") as stranger,
        pytest.raises(HfHubHTTPError, match="401"),
    ):
        stranger.chat_completion(MESSAGES, model=MODEL)
