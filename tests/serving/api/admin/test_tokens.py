"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.server import Server

TEXT = "hello <|im_start|>日本 \x00"


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_text_there_and_back(echo: Server) -> None:
    tokens = post(echo.http, "/tokenize", {"model": "echo", "prompt": TEXT})
    assert tokens.keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert tokens["count"] == len(tokens["tokens"]) > 0
    assert tokens["max_model_len"] == 4096
    assert tokens["token_strs"] is None
    back = post(echo.http, "/detokenize", {"model": "echo", "tokens": tokens["tokens"]})
    assert back == {"prompt": TEXT}
    assert post(echo.http, "/detokenize", {"tokens": []}) == {"prompt": ""}


def test_names_of_tokens(echo: Server) -> None:
    body = {"prompt": TEXT, "return_token_strs": True}
    tokens = post(echo.http, "/tokenize", body)
    assert len(tokens["token_strs"]) == tokens["count"]
    assert "<|im_start|>" in tokens["token_strs"]


def test_a_conversation_is_what_a_chat_counts(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "who weaves?"}]
    tokens = post(http, "/tokenize", {"messages": messages})
    chat = {"model": "tiny", "messages": messages, "max_tokens": 1}
    usage = post(http, "/v1/chat/completions", chat)["usage"]
    assert tokens["count"] == usage["prompt_tokens"]
    less = post(http, "/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert less["count"] < tokens["count"]


def test_special_tokens_around_a_prompt(http: httpx.Client) -> None:
    body = {"prompt": "who weaves?"}
    plain = post(http, "/tokenize", body | {"add_special_tokens": False})["tokens"]
    around = post(http, "/tokenize", body)["tokens"]
    completion = {"model": "tiny", "prompt": "who weaves?", "max_tokens": 1}
    usage = post(http, "/v1/completions", completion)["usage"]
    assert len(around) == usage["prompt_tokens"]
    assert around[len(around) - len(plain) :] == plain


def test_what_the_tokenizer_is(echo: Server) -> None:
    info = echo.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>"
    assert "messages[-1]" in info["chat_template"]
    assert info["vocab_size"] > 256
    assert info["max_model_len"] == 4096


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "tool"}]}, "messages[0].content"),
        ("/tokenize", {"prompt": "a", "chat_template": "x"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_what_cannot_be_is_named(echo: Server, path: str, body: dict[str, Any], param: str) -> None:
    response = echo.http.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_a_prompt_that_is_far_too_long_names_its_field(echo: Server) -> None:
    text = "word " * 200_000
    messages = [{"role": "user", "content": text}]
    for path, field, given in (
        ("/tokenize", "prompt", text),
        ("/tokenize", "messages", messages),
        ("/v1/chat/completions", "messages", messages),
        ("/v1/responses", "input", text),
        ("/v1/responses/input_tokens", "input", text),
    ):
        error = echo.http.post(path, json={"model": "echo", field: given}).json()["error"]
        assert (error["param"], error["code"]) == (field, "context_length_exceeded"), path


def test_half_of_a_surrogate_pair(echo: Server) -> None:
    headers = {"content-type": "application/json"}
    response = echo.http.post("/tokenize", content=b'{"prompt": "a\\ud800"}', headers=headers)
    assert response.status_code == 400
