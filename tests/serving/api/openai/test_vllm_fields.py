"""vLLM's fields for chats and completions: each field's effect, alone and in pairs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from support import echo_runner
from support.server import Server, start_server
from support.tokenizers import write_byte_level, write_sentencepiece

from weft.serving.api.prompts import PromptOptions
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.engine.tokenizer import Tokenizer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "the weft crosses the warp, and the warp crosses the weft"


def body(path: str, **fields: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": PROMPT}]
    else:
        asked["prompt"] = PROMPT
    return asked | fields


def post(http: httpx.Client, path: str, **fields: Any) -> dict[str, Any]:
    response = http.post(path, json=body(path, **fields))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = http.post(path, json=body(path, **fields) | {"stream": True})
    assert response.status_code == 200, response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def refusal(http: httpx.Client, path: str, **fields: Any) -> tuple[str, str]:
    response = http.post(path, json=body(path, **fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def tokens(http: httpx.Client, **fields: Any) -> list[int]:
    response = http.post("/tokenize", json=fields)
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


def said(content: str, role: str = "user") -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_the_model_may_be_left_out(http: httpx.Client, path: str) -> None:
    assert post(http, path)["model"] == "tiny"
    assert {event["model"] for event in stream(http, path)} == {"tiny"}
    response = http.post(path, json=body(path, model="other"))
    assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_token_ids(http: httpx.Client, path: str) -> None:
    """In a stream, the ids from all events together are the answer's ids."""
    answer = post(http, path, return_token_ids=True, n=2)
    whole = [choice["token_ids"] for choice in answer["choices"]]
    assert answer["usage"]["completion_tokens"] == sum(map(len, whole))
    prompt = (
        answer["prompt_token_ids"] if path == CHAT else answer["choices"][1]["prompt_token_ids"]
    )
    assert len(prompt) == answer["usage"]["prompt_tokens"]
    events = stream(http, path, return_token_ids=True, n=2)
    parts: list[list[int]] = [[], []]
    prompts = []
    for event in events:
        prompts += [event["prompt_token_ids"]] if "prompt_token_ids" in event else []
        for choice in event["choices"]:
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
            parts[choice["index"]] += choice.get("token_ids", [])
    assert parts == whole
    assert prompts == [prompt] * (1 if path == CHAT else 2)
    assert "token_ids" not in post(http, path)["choices"][0]


def test_prompt_logprobs_are_those_of_an_echo(http: httpx.Client) -> None:
    answer = post(http, TEXT, prompt_logprobs=2, echo=True, logprobs=1)["choices"][0]
    ids = tokens(http, prompt=PROMPT)
    first, *rest = answer["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(ids) - 1
    lists = answer["logprobs"]
    assert all(len(top) in (1, 2) for top in lists["top_logprobs"][1:])
    for i, (token, entry) in enumerate(zip(ids[1:], rest, strict=True), start=1):
        assert len(entry) in (2, 3)
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(lists["token_logprobs"][i])
        assert own["decoded_token"] == lists["tokens"][i]
        values = [each["logprob"] for each in sorted(entry.values(), key=lambda e: e["rank"])]
        assert values == sorted(values, reverse=True)
    chat = post(http, CHAT, prompt_logprobs=0, return_token_ids=True)
    assert [None if e is None else list(e) for e in chat["prompt_logprobs"]] == [
        None,
        *([str(token)] for token in chat["prompt_token_ids"][1:]),
    ]


def test_an_echo_alone_has_no_output_that_could_end_it(http: httpx.Client) -> None:
    (end,) = tokens(http, prompt="<|im_end|>")
    fields = {"echo": True, "max_tokens": 0, "allowed_token_ids": [end]}
    (choice,) = post(http, TEXT, **fields)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    *_, last = stream(http, TEXT, **fields)
    assert last["choices"][0]["finish_reason"] == "length"


def test_usage_in_each_event(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path in (CHAT, TEXT):
        events = stream(http, path, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert counts == sorted(counts)
        assert counts[-1] == 8
        assert len(set(counts)) > 1
        assert len({event["usage"]["prompt_tokens"] for event in events}) == 1
        *events, _ = stream(http, path, stream_options={"include_usage": True})
        assert {json.dumps(event["usage"]) for event in events} == {"null"}
        events = stream(http, path, stream_options={"continuous_usage_stats": True})
        assert all("usage" not in event for event in events)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_only_the_end_of_the_prompt(http: httpx.Client, path: str) -> None:
    whole = post(http, path, return_token_ids=True)
    ids = (whole if path == CHAT else whole["choices"][0])["prompt_token_ids"]
    cut = post(http, path, return_token_ids=True, truncate_prompt_tokens=5)
    assert (cut if path == CHAT else cut["choices"][0])["prompt_token_ids"] == ids[-5:]
    assert cut["usage"]["prompt_tokens"] == 5
    assert (
        post(http, path, truncate_prompt_tokens=len(ids))["choices"] == post(http, path)["choices"]
    )
    for value in (0, -2, 1.5, "5"):
        assert refusal(http, path, truncate_prompt_tokens=value)[0] == "truncate_prompt_tokens"


def test_a_prompt_beyond_the_context_is_cut_to_fit(http: httpx.Client) -> None:
    context = http.get("/v1/models/tiny").json()["max_model_len"]
    long = "the weft " * context
    assert refusal(http, TEXT, prompt=long)[0] == "prompt"
    answer = post(http, TEXT, prompt=long, truncate_prompt_tokens=-1, max_tokens=3, ignore_eos=True)
    assert answer["usage"]["prompt_tokens"] == context - 3
    assert answer["usage"]["completion_tokens"] == 3
    for path in (CHAT, TEXT):
        param, message = refusal(http, path, truncate_prompt_tokens=-1, max_tokens=context)
        assert param == "truncate_prompt_tokens"
        assert f"{context} tokens of output leave no room" in message
    echoed = post(http, TEXT, prompt=long, truncate_prompt_tokens=4, echo=True, max_tokens=0)
    assert long.endswith(echoed["choices"][0]["text"])
    assert len(tokens(http, prompt=echoed["choices"][0]["text"])) == 4


def test_a_token_before_the_text_stays_before_its_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path))
    info = SimpleNamespace(max_model_len=100)
    engine: Any = SimpleNamespace(tokenizer=tokenizer, info=info)

    def encoded(special: bool = True, **options: Any) -> list[int]:
        return PromptOptions(**options).encode(
            engine, "hello hello", SamplingParams(), special=special
        )

    whole = encoded()
    (begin,) = tokenizer.encode("")
    assert whole[0] == begin
    assert encoded(truncate=3) == [begin, *whole[-2:]]
    assert encoded(truncate=1) == whole[-1:]
    assert encoded(add_special_tokens=False) == whole[1:] == encoded(special=False)
    assert encoded(special=False, add_special_tokens=True) == whole
    assert encoded(truncate=3, add_special_tokens=False) == whole[-3:]


def test_a_salt_parts_the_prefix_cache(http: httpx.Client) -> None:
    def cached(**fields: Any) -> int:
        usage = post(http, TEXT, prompt=PROMPT * 3, **fields)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        return count

    cached()
    assert cached() > 0
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") > 0
    assert cached(cache_salt="yours") == 0
    short = {"prompt": "a", "max_tokens": 64, "ignore_eos": True, "cache_salt": "mine"}
    answer = post(http, TEXT, **short, return_token_ids=True)["choices"][0]
    again = answer["prompt_token_ids"] + answer["token_ids"]
    for salt, known in (("mine", True), ("yours", False)):
        usage = post(http, TEXT, prompt=again, cache_salt=salt)["usage"]
        assert (usage["prompt_tokens_details"]["cached_tokens"] > 0) is known
    for value in ("", "a" * 2000, 5):
        assert refusal(http, TEXT, cache_salt=value)[0] == "cache_salt"


def test_the_answer_continues_the_last_message(http: httpx.Client) -> None:
    messages = [said("hi"), said("hello world, the", "assistant")]
    ends = {"continue_final_message": True, "add_generation_prompt": False}
    ids = tokens(http, messages=messages, **ends)
    plain = tokens(http, messages=messages, add_generation_prompt=False)
    assert ids == plain[: len(ids)]
    assert len(ids) < len(plain)
    answer = post(http, CHAT, messages=messages, continue_final_message=True)
    text = answer["choices"][0]["message"]["content"]
    assert post(http, TEXT, prompt=ids)["choices"][0]["text"] == text
    echoed = {"messages": messages, "echo": True} | ends
    assert (
        post(http, CHAT, **echoed)["choices"][0]["message"]["content"]
        == messages[1]["content"] + text
    )
    deltas = [event["choices"][0]["delta"] for event in stream(http, CHAT, **echoed)]
    assert "".join(delta.get("content") or "" for delta in deltas) == messages[1]["content"] + text
    assert post(http, CHAT, echo=True)["choices"] == post(http, CHAT)["choices"]

    both = {"continue_final_message": True, "add_generation_prompt": True}
    param, message = refusal(http, CHAT, messages=messages, **both)
    assert param == "continue_final_message"
    assert "add_generation_prompt" in message
    param, message = refusal(http, CHAT, continue_final_message=True)
    assert (param, "its role is 'user'" in message) == ("continue_final_message", True)
    call = {"id": "a", "function": {"name": "add", "arguments": "{}"}}
    messages = [said("hi"), said("I add.", "assistant") | {"tool_calls": [call]}]
    param, message = refusal(http, CHAT, messages=messages, continue_final_message=True)
    assert (param, "has tool_calls" in message) == ("continue_final_message", True)


@pytest.fixture(scope="module")
def prefilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that repeats the first message. The prompt ends with the assistant's prefill."""
    path = tmp_path_factory.mktemp("prefilled")
    template = (
        f"{{# </think> #}}{echo_runner.START}{{{{ messages[0].content }}}}{echo_runner.END}"
        "{{ messages[-1].content if messages[-1].role == 'assistant' }}"
    )
    write_byte_level(path / "model", ["<think>", "</think>"], chat_template=template)
    with start_server(path / "model", path, loader=echo_runner.LOADER) as server:
        yield server


@pytest.mark.parametrize(
    ("prefill", "reasoning", "content"),
    [
        ("Well,", None, "<think>one</think>two"),
        ("<think>so</think>Well,", None, "<think>one</think>two"),
        ("<think>so", "<think>one", "two"),
    ],
)
def test_a_continued_text_is_within_a_thought_or_after_it(
    prefilled: Server, prefill: str, reasoning: str | None, content: str
) -> None:
    messages = [said("<think>one</think>two"), said(prefill, "assistant")]
    fields = {"messages": messages, "continue_final_message": True, "max_tokens": 64}
    message = post(prefilled.http, CHAT, **fields)["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


def test_a_grammar_holds_for_the_rest_of_a_continued_text(prefilled: Server) -> None:
    messages = [said("yes"), said("Well: ", "assistant")]
    fields = {"messages": messages, "continue_final_message": True, "guided_choice": ["yes"]}
    assert post(prefilled.http, CHAT, **fields)["choices"][0]["message"]["content"] == "yes"


def test_reasoning_may_be_left_out(echo: Server) -> None:
    messages = [said("<think>first</think>then")]
    fields = {"messages": messages, "max_tokens": 64}
    kept = post(echo.http, CHAT, **fields, include_reasoning=True)
    assert kept["choices"][0]["message"]["reasoning"] == "first"
    answer = post(echo.http, CHAT, **fields, include_reasoning=False)
    assert "reasoning" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["message"]["content"] == "then"
    assert answer["usage"] | kept["usage"] == kept["usage"]
    events = stream(echo.http, CHAT, **fields, include_reasoning=False)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert all("reasoning" not in delta for delta in deltas)
    assert "".join(delta.get("content") or "" for delta in deltas) == "then"


def test_the_stop_string_stays(http: httpx.Client) -> None:
    whole = post(http, CHAT, max_tokens=16)["choices"][0]["message"]["content"]
    stop = whole[4:6]
    cut = post(http, CHAT, max_tokens=16, stop=stop)["choices"][0]
    kept = post(http, CHAT, max_tokens=16, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert cut["finish_reason"] == kept["finish_reason"] == "stop"
    assert kept["message"]["content"] == cut["message"]["content"] + stop


def test_special_tokens_in_the_text_have_their_place(http: httpx.Client) -> None:
    (end,) = tokens(http, prompt="<|im_end|>")
    only = {"allowed_token_ids": [end], "ignore_eos": True, "max_tokens": 3, "logprobs": 0}
    skipped = post(http, TEXT, **only)["choices"][0]
    assert (skipped["text"], skipped["logprobs"]["text_offset"]) == ("", [0, 0, 0])
    shown = post(http, TEXT, **only, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<|im_end|>" * 3
    assert shown["logprobs"]["text_offset"] == [0, 10, 20]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**6]),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", [1, "a"]),
        ("bad_words", [""]),
        ("bad_words", "a"),
        ("bad_words", ["a", 1]),
        ("bad_words", ["a" * 2000]),
        ("bad_words", ["a"] * 300),
        ("bad_words", ["a" * 1000] * 17),
        ("stop_token_ids", [1] * 1025),
        ("prompt_logprobs", 21),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", True),
        ("top_k", -2),
        ("return_token_ids", 1),
        ("echo", "yes"),
        ("length_penalty", 0),
        ("best_of", 2),
        ("best_of", 0),
    ],
)
def test_wrong_values_are_named(http: httpx.Client, path: str, field: str, value: Any) -> None:
    param, message = refusal(http, path, **{field: value})
    assert param.partition("[")[0] == field
    assert field in message


def test_pairs_that_do_not_go_together(http: httpx.Client) -> None:
    param, message = refusal(http, TEXT, prompt_logprobs=1, stream=True)
    assert param == "prompt_logprobs"
    assert "stream" in message
    ids = tokens(http, prompt="a")
    param, message = refusal(http, TEXT, allowed_token_ids=ids, bad_words=["a"])
    assert param == "bad_words"
    assert "allowed_token_ids" in message
    fields = {"guided_choice": ["yes"], "allowed_token_ids": ids}
    param, message = refusal(http, TEXT, **fields)
    assert param == "guided_choice"
    assert "allowed_token_ids" in message
    assert post(http, TEXT, best_of=3, n=3)["choices"][2]


def test_very_many_log_probabilities_of_prompts(http: httpx.Client) -> None:
    """They are refused before anything is computed; the error names the requesting field."""
    many: dict[str, Any] = {"n": 128, "prompt": [1] * 200}
    for fields in (
        {"prompt_logprobs": 20},
        {"prompt_logprobs": 20, "logprobs": 1, "echo": True},
        {"logprobs": 20, "echo": True},
        {"logprobs": 20, "echo": True, "stream": True},
    ):
        param, message = refusal(http, TEXT, **many, **fields)
        assert param == next(iter(fields))
        assert message.startswith(f"{param} is 20; for 25,600 tokens ")
        assert "537,600 log probabilities" in message
    chat = {"messages": [said("a" * 200)], "n": 128, "prompt_logprobs": 20}
    assert refusal(http, CHAT, **chat)[0] == "prompt_logprobs"


def test_many_bad_words(http: httpx.Client) -> None:
    words = [f"{i}w" for i in range(256)]
    assert post(http, TEXT, bad_words=words)["choices"]
