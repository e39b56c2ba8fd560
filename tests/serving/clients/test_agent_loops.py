"""Agent loops with thinking and tools, by the official clients: two calls, then the answer.

The model answers from the script in `support.tool_loop`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from support.echo_runner import THOUGHT
from support.server import Server
from support.tool_loop import ANSWER, BOTH, DIRECT, FUNCTIONS, GREETING, PARALLEL, QUESTION, compute

MAX_TURNS = 5


@pytest.fixture
def client(scripted: Server, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture
def claude(scripted: Server, key: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key=key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("question", [QUESTION, PARALLEL])
@pytest.mark.parametrize("effort", ["none", "low", None])
@pytest.mark.parametrize("strict", [False, True])
def test_chats_of_openai(client: openai.OpenAI, question: str, effort: Any, strict: bool) -> None:
    """Whole answers; the SDK's own messages go back."""
    more = {"strict": True} if strict else {}
    ask: dict[str, Any] = {
        "model": "scripted",
        "tools": [{"type": "function", "function": each | more} for each in FUNCTIONS],
    }
    if effort is not None:
        ask["reasoning_effort"] = effort
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(messages=messages, temperature=2, **ask)
        (choice,) = answer.choices
        thought = None if effort == "none" else THOUGHT
        assert (choice.message.model_extra or {}).get("reasoning") == thought
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        tokens = answer.usage.completion_tokens_details.reasoning_tokens
        assert (tokens == 0) is (effort == "none")
        messages.append(choice.message)
        if choice.finish_reason == "stop":
            break
        assert choice.finish_reason == "tool_calls"
        for call in choice.message.tool_calls or ():
            assert call.type == "function"
            result = compute(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert messages[-1].content == (ANSWER if question == QUESTION else BOTH)


@pytest.mark.parametrize("question", [QUESTION, PARALLEL])
@pytest.mark.parametrize("effort", ["none", "high"])
def test_streamed_chats_of_openai(client: openai.OpenAI, question: str, effort: Any) -> None:
    """Calls are collected as OpenAI's guide does it, and go back with their `index`."""
    ask: dict[str, Any] = {
        "model": "scripted",
        "tools": [{"type": "function", "function": each} for each in FUNCTIONS],
        "reasoning_effort": effort,
    }
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        calls: dict[int, Any] = {}
        text = thought = ""
        for chunk in client.chat.completions.create(messages=messages, stream=True, **ask):
            delta = chunk.choices[0].delta
            text += delta.content or ""
            thought += (delta.model_extra or {}).get("reasoning_content") or ""
            for part in delta.tool_calls or ():
                if part.index not in calls:
                    calls[part.index] = part
                else:
                    calls[part.index].function.arguments += part.function.arguments  # type: ignore[union-attr]
        assert thought == ("" if effort == "none" else THOUGHT)
        if not calls:
            break
        said = {"content": text, "reasoning_content": thought, "tool_calls": list(calls.values())}
        messages.append({"role": "assistant"} | said)
        for call in calls.values():
            result = compute(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert text == (ANSWER if question == QUESTION else BOTH)
    # The client's own collector.
    with client.chat.completions.stream(messages=messages, **ask) as stream:
        assert stream.get_final_completion().choices[0].message.content == text


def test_vllm_s_switch(client: openai.OpenAI) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    messages: Any = [{"role": "user", "content": DIRECT}]
    for switch, thought in ((off, None), ({}, THOUGHT)):
        answer = client.chat.completions.create(
            model="scripted", messages=messages, extra_body=switch
        )
        assert answer.choices[0].message.content == GREETING
        assert (answer.choices[0].message.model_extra or {}).get("reasoning") == thought


@pytest.mark.parametrize("question", [QUESTION, PARALLEL])
@pytest.mark.parametrize("effort", ["none", "high"])
@pytest.mark.parametrize("streaming", [False, True])
def test_responses_of_openai(
    client: openai.OpenAI, question: str, effort: str, streaming: bool
) -> None:
    """The output goes back unchanged: thoughts, texts and calls."""
    tools: Any = [{"type": "function"} | each | {"strict": False} for each in FUNCTIONS]
    items: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        ask: Any = {
            "model": "scripted",
            "input": items,
            "tools": tools,
            "reasoning": {"effort": effort},
        }
        if streaming:
            with client.responses.stream(**ask) as events:
                answer: Any = events.get_final_response()
        else:
            answer = client.responses.create(**ask)
        assert (answer.output[0].type == "reasoning") is (effort == "high")
        items += answer.output
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            break
        for call in calls:
            result = compute(call.name, call.arguments)
            given = {"call_id": call.call_id, "output": result}
            items.append({"type": "function_call_output"} | given)
    assert answer.output_text == (ANSWER if question == QUESTION else BOTH)


@pytest.mark.parametrize("question", [QUESTION, PARALLEL])
@pytest.mark.parametrize("thinking", ["enabled", "disabled"])
@pytest.mark.parametrize("streaming", [False, True])
def test_messages_of_anthropic(
    claude: anthropic.Anthropic, question: str, thinking: str, streaming: bool
) -> None:
    """The blocks go back unchanged, the results in one message."""
    tools: Any = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS]
    budget = {"budget_tokens": 1024} if thinking == "enabled" else {}
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        ask: Any = {
            "model": "scripted",
            "max_tokens": 2000,
            "messages": messages,
            "tools": tools,
            "thinking": {"type": thinking} | budget,
        }
        if streaming:
            with claude.messages.stream(**ask) as events:
                answer: Any = events.get_final_message()
        else:
            answer = claude.messages.create(**ask)
        messages.append({"role": "assistant", "content": answer.content})
        if answer.stop_reason == "end_turn":
            break
        assert answer.stop_reason == "tool_use"
        calls = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {
                "type": "tool_result",
                "tool_use_id": call.id,
                "content": compute(call.name, call.input),
            }
            for call in calls
        ]
        messages.append({"role": "user", "content": results})
    *thoughts, text = answer.content
    assert [block.thinking for block in thoughts] == [THOUGHT] * (thinking == "enabled")
    assert text.text == (ANSWER if question == QUESTION else BOTH)


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@pytest.mark.parametrize("question", [QUESTION, PARALLEL])
@pytest.mark.parametrize("effort", ["none", "low"])
@pytest.mark.parametrize("streaming", [False, True])
def test_langchain(scripted: Server, key: str, question: str, effort: str, streaming: bool) -> None:
    tools = {"multiply": multiply, "add": add}
    model = ChatOpenAI(
        model="scripted",
        base_url=f"{scripted.url}/v1",
        api_key=key,
        reasoning_effort=effort,
        verbosity="medium",
        streaming=streaming,
        stream_usage=True,
        max_retries=0,
    ).bind_tools(list(tools.values()))
    messages: list[Any] = [HumanMessage(question)]
    for _ in range(MAX_TURNS):
        answer = model.invoke(messages)
        assert isinstance(answer, AIMessage)
        messages.append(answer)
        if not answer.tool_calls:
            break
        for call in answer.tool_calls:
            result = tools[call["name"]].invoke(call["args"])
            messages.append(ToolMessage(str(result), tool_call_id=call["id"]))
    assert answer.text == (ANSWER if question == QUESTION else BOTH)
    assert answer.usage_metadata is not None
    thought = answer.usage_metadata["output_token_details"]["reasoning"]
    assert (thought == 0) is (effort == "none")
