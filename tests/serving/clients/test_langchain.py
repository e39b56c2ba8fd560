"""LangChain's client of OpenAI's API: chats, streams, tools, structured output, many at once."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from support.server import Server

from weft.models.bundled.tasks import held_out

SUM = "What is 47 plus 85?"


@pytest.fixture
def model(demo: Server, key: str) -> ChatOpenAI:
    return chat(demo, key)


def chat(server: Server, key: str, **settings: Any) -> ChatOpenAI:
    return ChatOpenAI(
        model="weft-demo",
        base_url=f"{server.url}/v1",
        api_key=key,
        temperature=0,
        max_retries=0,
        **settings,
    )


def test_a_chat(model: ChatOpenAI) -> None:
    answer = model.invoke([HumanMessage(SUM)], logprobs=True)
    assert "132" in answer.content
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["logprobs"]["content"]
    again = model.invoke([HumanMessage(SUM), answer, HumanMessage("What is 20 plus 21?")])
    assert "41" in again.content


def test_a_stream_joins_to_the_same(model: ChatOpenAI) -> None:
    chunks = list(model.stream(SUM, stream_usage=True))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert len(chunks) > 3
    assert whole.content == model.invoke(SUM).content
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["input_tokens"] > 0


async def test_many_at_once(model: ChatOpenAI) -> None:
    answers = await model.abatch([f"What is {i} plus 30?" for i in range(10, 18)])
    for i, answer in enumerate(answers):
        assert str(i + 40) in answer.content


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_tools(demo: Server, key: str, responses: bool) -> None:
    """A call, and what the model says of its result; by both of OpenAI's routes."""
    question = held_out("tool_call", 1)[0]
    assert question.tools is not None
    model = chat(demo, key, use_responses_api=responses).bind_tools(question.tools)
    asked = [HumanMessage(question.messages[-1]["content"])]
    answer = model.invoke(asked)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    right = json.loads(question.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert {"name": call["name"], "arguments": call["args"]} == right
    told = model.invoke([*asked, answer, ToolMessage("done", tool_call_id=call["id"])])
    assert told.text


class City(BaseModel):
    """Where something is."""

    name: Literal["Paris", "Rome"]
    large: bool


def test_structured_output(model: ChatOpenAI) -> None:
    assert isinstance(model.with_structured_output(City).invoke("Paris is large."), City)


def test_structured_output_by_a_call(model: ChatOpenAI) -> None:
    """The model must call the tool that stands for it."""
    question = held_out("tool_call", 1)[0]
    right = json.loads(question.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    (tool,) = (t for t in question.tools or () if t["function"]["name"] == right["name"])
    caller = model.with_structured_output(tool["function"], method="function_calling")
    assert caller.invoke(question.messages[-1]["content"]) == right["arguments"]


def test_a_completion(demo: Server, key: str) -> None:
    base_url = f"{demo.url}/v1"
    model = OpenAI(model="weft-demo", base_url=base_url, api_key=key, max_tokens=5, temperature=0)
    assert "".join(model.stream("What is")) == model.invoke("What is") != ""


def test_errors(demo: Server, key: str) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        chat(demo, key, top_p=7).invoke(SUM)
    with pytest.raises(openai.AuthenticationError):
        chat(demo, "another key").invoke(SUM)
