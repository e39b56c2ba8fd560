"""POST /v1/chat/completions, through a real socket, to a real (tiny) model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.checkpoints import CHAT_TEMPLATE, make_checkpoint, make_tokenizer
from support.server import Server, start_server
from tokenizers import Tokenizer

MESSAGES = [{"role": "user", "content": "who weaves the weft?"}]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
SHOWS_TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    + CHAT_TEMPLATE
    + "{% for message in messages %}{% for call in message.tool_calls %}"
    "{{ call.function.arguments.city }}"
    "{% endfor %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`weft serve` of a tiny random model whose template shows the tools to it."""
    path = tmp_path_factory.mktemp("server")
    model = make_checkpoint(path / "tiny", "llama")
    (model / "chat_template.jinja").write_text(SHOWS_TOOLS)
    with start_server(model, path) as server:
        yield server


@pytest.fixture(scope="module")
def begins_a_character(tmp_path_factory: pytest.TempPathFactory) -> int:
    """The token of the first byte of a character of several, in every tiny model's tokenizer."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    (first, *_) = Tokenizer.from_file(str(path / "tokenizer.json")).encode("\u65e5").ids
    assert isinstance(first, int)
    return first


def chat(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 8} | fields
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without [DONE]."""
    body = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 8} | fields
    response = http.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def prompt_tokens(http: httpx.Client, **fields: Any) -> int:
    """Length of the rendered prompt."""
    count: int = chat(http, max_tokens=1, **fields)["usage"]["prompt_tokens"]
    return count


def test_shape(http: httpx.Client) -> None:
    answer = chat(http)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None


@pytest.mark.parametrize("seed", range(6))
def test_streamed_equals_unstreamed(http: httpx.Client, seed: int) -> None:
    fields = {"temperature": 1.0, "seed": seed, "n": 2, "max_tokens": 60, "ignore_eos": True}
    if seed % 2:
        fields["stop"] = ["e", "\ufffd\ufffd"]
    whole = chat(http, **fields)
    events = stream(http, **fields)
    pieces, reasons = ["", ""], ["", ""]
    for event in events:
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            assert not reasons[choice["index"]], "an event after the answer's end"
            pieces[choice["index"]] += choice["delta"].get("content", "")
            reasons[choice["index"]] = choice["finish_reason"] or ""
    assert pieces == [choice["message"]["content"] for choice in whole["choices"]]
    assert reasons == [choice["finish_reason"] for choice in whole["choices"]]
    first = [event["choices"][0]["delta"] for event in events if "role" in str(event)]
    assert first == [{"role": "assistant", "content": "", "refusal": None}] * 2


def test_a_part_of_a_character_is_an_event(http: httpx.Client, begins_a_character: int) -> None:
    def contents() -> list[str]:
        """Of the events after the role's."""
        bias = {str(begins_a_character): 100}
        _, *events = stream(http, logit_bias=bias, max_tokens=3, ignore_eos=True)
        deltas = [event["choices"][0]["delta"] for event in events]
        return [delta["content"] for delta in deltas if "content" in delta]

    # Tokens that come while the server is busy share an event: not in all of so many answers.
    answers = [contents() for _ in range(30)]
    assert all("".join(answer) == "\ufffd" * 3 for answer in answers)
    assert any(answer[0] == "" for answer in answers)


def test_streamed_usage(http: httpx.Client) -> None:
    events = stream(http, stream_options={"include_usage": True}, ignore_eos=True)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is None for event in events[:-1])


def test_max_completion_tokens(http: httpx.Client) -> None:
    answer = chat(http, max_tokens=None, max_completion_tokens=3, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_max_tokens_the_context_is_the_limit(http: httpx.Client) -> None:
    usage = chat(http, max_tokens=None, ignore_eos=True)["usage"]
    assert usage["total_tokens"] == 512


def test_logprobs(http: httpx.Client) -> None:
    answer = chat(http, logprobs=True, top_logprobs=2, ignore_eos=True)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == 8
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] <= 0
    text = b"".join(bytes(entry["bytes"]) for entry in entries).decode(errors="replace")
    assert text == content(answer)
    events = stream(http, logprobs=True, ignore_eos=True)
    streamed = [
        entry
        for event in events
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert [entry["bytes"] for entry in streamed] == [entry["bytes"] for entry in entries]
    assert streamed[0]["top_logprobs"] == []


def test_text_parts_are_joined_by_lines(http: httpx.Client) -> None:
    def length(content: str | list[dict[str, str]]) -> int:
        return prompt_tokens(http, messages=[{"role": "user", "content": content}])

    parts = [{"type": "text", "text": "who weaves"}, {"type": "text", "text": "the weft?"}]
    assert length(parts) == length("who weaves\nthe weft?")
    assert length(parts) not in (length("who weaves the weft?"), length("who weavesthe weft?"))


def test_developer_is_system_to_a_template_that_does_not_know_it(http: httpx.Client) -> None:
    def length(role: str) -> int:
        return prompt_tokens(http, messages=[{"role": role, "content": "be brief"}, *MESSAGES])

    assert length("developer") == length("system") != length("user")


def test_an_answer_can_be_sent_back(http: httpx.Client) -> None:
    message = chat(http)["choices"][0]["message"]
    extras = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    again = {"role": "user", "content": "and who crosses it?"}
    chat(http, messages=[*MESSAGES, message | extras, again])


def test_tools_are_shown_unless_the_choice_is_none(http: httpx.Client) -> None:
    plain = prompt_tokens(http)
    shown = prompt_tokens(http, tools=[WEATHER])
    assert shown > plain + 30
    assert prompt_tokens(http, tools=[WEATHER, WEATHER]) > shown + 30
    auto = {"tool_choice": "auto", "parallel_tool_calls": True}
    assert prompt_tokens(http, tools=[WEATHER], **auto) == shown
    assert prompt_tokens(http, tools=[WEATHER], tool_choice="none") == plain


def test_a_conversation_with_calls(http: httpx.Client) -> None:
    """The template gets the arguments as an object, and can name what is in it."""

    def length(city: str, **fields: Any) -> int:
        function = {"name": "weather", "arguments": json.dumps({"city": city})}
        call = {"id": "call_1", "type": "function", "function": function}
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        ]
        return prompt_tokens(http, messages=messages, **fields)

    assert length("xyz") == length("") + 3
    assert length("xyz", tools=[WEATHER]) > length("xyz", tools=[WEATHER], tool_choice="none")


def test_fields_that_clients_add_to_calls_are_not_shown(http: httpx.Client) -> None:
    """Streamed calls have an index. OpenAI's SDK and litellm add parsed fields."""
    added = {"parsed": None, "provider_specific_fields": {"reasoning": "Hm."}}

    def length(**more: Any) -> int:
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        parsed = {"function": call["function"] | more} if "parsed_arguments" in more else more
        message = {"role": "assistant", "content": "", "tool_calls": [call | parsed]}
        return prompt_tokens(http, messages=[*MESSAGES, message | added])

    assert length(index=0) == length(parsed_arguments={"a": 1}) == length()


def test_settings_that_change_nothing_are_taken(http: httpx.Client) -> None:
    neutral = {
        "audio": None,
        "function_call": None,
        "functions": None,
        "prediction": None,
        "reasoning_effort": None,
        "verbosity": None,
        "web_search_options": None,
        "frequency_penalty": None,
        "logit_bias": None,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": False,
        "user": "u",
    }
    assert content(chat(http, **neutral)) == content(chat(http))
