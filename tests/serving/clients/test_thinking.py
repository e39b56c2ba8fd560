"""Agent loops with thinking and tools, by the clients of OpenAI and LangChain.

The model answers from a script: it says what the last message says, which is a user's, or a tool's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from support import echo_runner
from support.server import Server, start_server
from support.tokenizers import write_byte_level

TEMPLATE = (
    "{# <tool_call> </think> #}"
    f"{echo_runner.START}{{{{ messages[-1].content }}}}{echo_runner.END}"
    "{{ '<think>' if enable_thinking is not defined or enable_thinking else '<think></think>' }}"
)
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
THOUGHT = "I need a product."
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, key: str) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("thinks")
    model = write_byte_level(path / "thinks", ["<think>", "</think>"], chat_template=TEMPLATE)
    with start_server(model, path, loader=echo_runner.LOADER, api_key=key) as server:
        yield server


@pytest.fixture
def client(server: Server, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def script(effort: str | None, *, call: bool) -> str:
    """What the model is to say: with a thought, unless thinking is off."""
    said = CALL if call else "The product is 42."
    return said if effort == "none" else f"{THOUGHT}</think>{said}"


def multiply_(arguments: str) -> int:
    given = json.loads(arguments)
    product: int = given["a"] * given["b"]
    return product


@pytest.mark.parametrize("effort", ["none", "low", None])
@pytest.mark.parametrize("strict", [False, True])
def test_a_loop_of_openai_s_client(client: openai.OpenAI, effort: Any, strict: bool) -> None:
    """Whole answers; the SDK's own messages go back."""
    function = TOOL["function"] | ({"strict": True} if strict else {})
    ask: dict[str, Any] = {"model": "thinks", "tools": [TOOL | {"function": function}]}
    if effort is not None:
        ask["reasoning_effort"] = effort
    messages: list[Any] = [{"role": "user", "content": script(effort, call=True)}]
    choice = client.chat.completions.create(messages=messages, **ask).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.model_extra or {}).get("reasoning") == (
        None if effort == "none" else THOUGHT
    )
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert multiply_(call.function.arguments) == 42
    result = {"role": "tool", "tool_call_id": call.id, "content": script(effort, call=False)}
    messages += [choice.message, result]
    answer = client.chat.completions.create(messages=messages, **ask)
    assert answer.choices[0].message.content == "The product is 42."
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thought = answer.usage.completion_tokens_details.reasoning_tokens
    assert (thought == 0) is (effort == "none")


@pytest.mark.parametrize("effort", ["none", "high"])
def test_a_streamed_loop_of_openai_s_client(client: openai.OpenAI, effort: Any) -> None:
    """Calls are collected as OpenAI's guide does it, and go back with their `index`."""
    ask: dict[str, Any] = {"model": "thinks", "tools": [TOOL], "reasoning_effort": effort}
    messages: list[Any] = [{"role": "user", "content": script(effort, call=True)}]
    calls: dict[int, Any] = {}
    for chunk in client.chat.completions.create(messages=messages, stream=True, **ask):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.index not in calls:
                calls[part.index] = part
            else:
                calls[part.index].function.arguments += part.function.arguments  # type: ignore[union-attr]
    (call,) = calls.values()
    assert multiply_(call.function.arguments) == 42
    messages += [
        {"role": "assistant", "tool_calls": list(calls.values())},
        {"role": "tool", "tool_call_id": call.id, "content": script(effort, call=False)},
    ]
    with client.chat.completions.stream(messages=messages, **ask) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "The product is 42."


def test_vllm_s_switch(client: openai.OpenAI) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    messages: Any = [{"role": "user", "content": "at once</think>"}]
    answer = client.chat.completions.create(model="thinks", messages=messages, extra_body=off)
    assert answer.choices[0].message.content == "at once</think>"
    answer = client.chat.completions.create(model="thinks", messages=messages)
    assert answer.choices[0].message.content == ""


@tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_loop_of_langchain(server: Server, key: str, effort: str, streaming: bool) -> None:
    model = ChatOpenAI(
        model="thinks",
        base_url=f"{server.url}/v1",
        api_key=key,
        reasoning_effort=effort,
        verbosity="medium",
        streaming=streaming,
        stream_usage=True,
        max_retries=0,
    ).bind_tools([multiply])
    asked: list[Any] = [HumanMessage(script(effort, call=True))]
    answer = model.invoke(asked)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert multiply.invoke(call["args"]) == 42
    told = ToolMessage(script(effort, call=False), tool_call_id=call["id"])
    assert model.invoke([*asked, answer, told]).text == "The product is 42."
    assert answer.usage_metadata is not None
    thought = answer.usage_metadata["output_token_details"]["reasoning"]
    assert (thought == 0) is (effort == "none")
