"""POST /v1/completions, through a real socket, to a real (tiny) model."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.server import Server

from weft.serving.api.openai.requests import CompletionRequest
from weft.serving.engine.sampling_params import Grammar, SamplingParams

PROMPT = "the weft crosses the warp"


def complete(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8} | fields
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def stream(http: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, without [DONE]."""
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8} | fields
    response = http.post("/v1/completions", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def logged(answer: dict[str, Any]) -> list[str]:
    """The tokens of an answer with logprobs."""
    tokens: list[str] = answer["choices"][0]["logprobs"]["tokens"]
    return tokens


def streamed(events: list[dict[str, Any]], count: int) -> list[str]:
    """Each answer's pieces, joined."""
    joined = [""] * count
    for event in events:
        for choice in event["choices"]:
            joined[choice["index"]] += choice["text"]
    return joined


def test_shape(http: httpx.Client) -> None:
    answer = complete(http)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice["finish_reason"] in ("stop", "length")
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


@pytest.mark.parametrize("seed", range(6))
def test_streamed_equals_unstreamed(http: httpx.Client, seed: int) -> None:
    """The model's noise holds broken characters, and the stop strings cut them apart."""
    fields = {
        "temperature": 1.0,
        "seed": seed,
        "n": 3,
        "max_tokens": 60,
        "stop": ["e", "\ufffd\ufffd", " t"] if seed % 2 else None,
        "ignore_eos": True,
    }
    whole = complete(http, **fields)
    events = stream(http, **fields)
    assert streamed(events, 3) == texts(whole)
    reasons = {
        choice["index"]: choice["finish_reason"]
        for event in events
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    }
    assert reasons == {c["index"]: c["finish_reason"] for c in whole["choices"]}


def test_a_prompt_may_be_text_or_ids_alone_or_many(http: httpx.Client) -> None:
    scored = complete(http, echo=True, logprobs=0, max_tokens=0)
    assert texts(scored) == [PROMPT]
    one = texts(complete(http))
    assert texts(complete(http, prompt=[PROMPT])) == one
    other = texts(complete(http, prompt="another"))
    assert texts(complete(http, prompt=[PROMPT, "another"])) == one + other
    ids = [5, 6, 7]
    assert texts(complete(http, prompt=[ids, ids])) == texts(complete(http, prompt=ids)) * 2


def test_n_answers_have_their_own_seeds(http: httpx.Client) -> None:
    fields = {"temperature": 1.0, "prompt": [PROMPT, "another"], "n": 3, "best_of": 3}
    answer = complete(http, seed=7, **fields)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len(set(texts(answer))) == 6
    assert texts(complete(http, seed=7, **fields)) == texts(answer)
    second = complete(http, temperature=1.0, seed=8)
    assert texts(second) == texts(answer)[1:2]


def test_usage_counts_each_prompt_once(http: httpx.Client) -> None:
    one = complete(http, max_tokens=4, ignore_eos=True)["usage"]
    many = complete(http, max_tokens=4, ignore_eos=True, n=3, prompt=[PROMPT, PROMPT])["usage"]
    assert many["prompt_tokens"] == 2 * one["prompt_tokens"]
    assert many["completion_tokens"] == 6 * one["completion_tokens"] == 24
    events = stream(http, max_tokens=4, ignore_eos=True, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 4
    assert all(event["usage"] is None for event in events[:-1])
    assert "usage" not in stream(http)[0]


def test_a_prompt_seen_before_is_cached(http: httpx.Client) -> None:
    prompt = list(range(3, 200))
    complete(http, prompt=prompt)
    details = complete(http, prompt=prompt)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 160


def test_logprobs(http: httpx.Client) -> None:
    answer = complete(http, logprobs=3, ignore_eos=True)
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(values) for values in logprobs.values()} == {8}
    for chosen, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 3  # greedy: the chosen token is the first of them
        assert max(top.values()) == chosen <= 0
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_streamed_logprobs_equal_unstreamed(http: httpx.Client) -> None:
    fields = {"logprobs": 2, "echo": True, "max_tokens": 30, "ignore_eos": True, "stop": ["q"]}
    whole = complete(http, **fields)["choices"][0]["logprobs"]
    pieces: dict[str, list[Any]] = {name: [] for name in whole}
    for event in stream(http, **fields):
        for name, values in event["choices"][0]["logprobs"].items():
            pieces[name] += values
    assert pieces["tokens"] == whole["tokens"]
    assert pieces["text_offset"] == whole["text_offset"]
    assert pieces["token_logprobs"][0] is whole["token_logprobs"][0] is None
    # Not always bit for bit: the prompt may be cached the second time.
    assert pieces["token_logprobs"][1:] == pytest.approx(whole["token_logprobs"][1:], abs=1e-3)


def test_echo_scores_the_prompt(http: httpx.Client) -> None:
    """As lm-eval asks: the continuation's log probability, and whether it is the greedy one."""
    answer = complete(http, prompt=[5, 6, 7, 8], echo=True, logprobs=1, max_tokens=1, seed=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    for chosen, top in zip(
        logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True
    ):
        assert chosen in top.values()
        assert max(top.values()) <= 0
    text = answer["choices"][0]["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or text[offset:].startswith(token)


def test_echo_alone_generates_nothing(http: httpx.Client) -> None:
    answer = complete(http, echo=True, logprobs=1, max_tokens=0)
    assert texts(answer) == [PROMPT]
    assert answer["usage"]["completion_tokens"] == 0
    assert "".join(answer["choices"][0]["logprobs"]["tokens"]) == PROMPT
    assert streamed(stream(http, echo=True, max_tokens=0), 1) == [PROMPT]


def test_parts_of_characters_are_named_by_their_bytes(http: httpx.Client) -> None:
    answer = complete(http, prompt="日", echo=True, logprobs=0, max_tokens=0)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["bytes:\\xe6", "bytes:\\x97", "bytes:\\xa5"]
    assert logprobs["text_offset"] == [0, 0, 0]


def test_stop_string_is_left_out(http: httpx.Client) -> None:
    whole = texts(complete(http, max_tokens=40, ignore_eos=True))[0]
    stop = whole[10:13]
    answer = complete(http, max_tokens=40, ignore_eos=True, stop=stop)
    assert texts(answer) == [whole[: whole.index(stop)]]
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("one", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}])
def test_a_distribution_cut_to_one_token_is_greedy(
    http: httpx.Client, one: dict[str, float]
) -> None:
    random = {"temperature": 2.0, "seed": 1, "ignore_eos": True}
    greedy = texts(complete(http, ignore_eos=True))
    assert texts(complete(http, **random)) != greedy
    assert texts(complete(http, **random, **one)) == greedy


def test_end_tokens_can_be_ignored_or_held_back(http: httpx.Client) -> None:
    """The model's own end, which the bias makes it choose whenever it may."""

    def ending(**fields: Any) -> tuple[str, int]:
        answer = complete(http, logit_bias={"2": 100}, **fields)
        return answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]

    assert ending() == ("stop", 1)
    assert ending(min_tokens=3) == ("stop", 4)
    assert ending(min_tokens=8) == ("length", 8)
    assert ending(ignore_eos=True) == ("length", 8)


def test_repetition_penalty(http: httpx.Client) -> None:
    """So strong a one that no token comes twice, nor one of the prompt."""
    prompt = logged(complete(http, echo=True, logprobs=0, max_tokens=0))
    fields = {"max_tokens": 60, "logprobs": 0, "ignore_eos": True}
    plain = logged(complete(http, **fields))
    assert len({*prompt, *plain}) < len({*prompt}) + 60
    tokens = logged(complete(http, repetition_penalty=100.0, **fields))
    assert len({*prompt, *tokens}) == len({*prompt}) + 60


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_of_the_answer(http: httpx.Client, name: str) -> None:
    """They count the answer's tokens only: the first is chosen as without them."""
    fields = {"max_tokens": 60, "logprobs": 0, "ignore_eos": True}
    plain = logged(complete(http, **fields))
    more = logged(complete(http, **fields, **{name: 2.0}))
    less = logged(complete(http, **fields, **{name: -2.0}))
    assert plain[0] == more[0] == less[0]
    assert len({*less}) < len({*plain}) < len({*more})


def test_tokens_without_text_are_streamed_as_they_come(http: httpx.Client) -> None:
    fields = {"logit_bias": {"1": 100}, "max_tokens": 64}  # <|im_start|>, left out of the text
    *pieces, end = [event["choices"][0] for event in stream(http, **fields)]
    assert 8 < len(pieces) < 64  # fewer where the reader is behind; the last is the end
    assert {(piece["text"], piece["finish_reason"]) for piece in pieces} == {("", None)}
    assert (end["text"], end["finish_reason"]) == ("", "length")


def test_logit_bias(http: httpx.Client) -> None:
    fields = {"logprobs": 0, "ignore_eos": True}
    (only,) = {*logged(complete(http, logit_bias={"9": 100}, **fields))}
    banned = {str(token): -100 for token in range(320) if token != 9}
    assert logged(complete(http, logit_bias=banned, **fields)) == [only] * 8


def test_priority_and_user_do_not_change_the_answer(http: httpx.Client) -> None:
    assert texts(complete(http, priority=-5, user="somebody")) == texts(complete(http))


def test_stop_token_ids(http: httpx.Client) -> None:
    answer = complete(http, logit_bias={"9": 100}, stop_token_ids=[9], ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert texts(answer) == [""]


def test_keepalive(server: Server) -> None:
    """Streams too leave the connection usable."""
    with httpx.Client(base_url=server.url, timeout=60) as http:
        complete(http)
        (connection,) = http._transport._pool.connections  # type: ignore[attr-defined]
        stream(http)
        complete(http)
        assert http._transport._pool.connections == [connection]  # type: ignore[attr-defined]


def test_every_sampling_setting_can_be_given() -> None:
    values: dict[str, Any] = {
        name: 2
        for name in SamplingParams.__struct_fields__
        if name not in ("grammar", "prompt_logprobs")
    } | {
        "top_p": 0.5,
        "min_p": 0.5,
        "ignore_eos": True,
        "stop": ["a"],
        "stop_token_ids": [3],
        "logit_bias": {"4": 1.0},
        "allowed_token_ids": [5],
        "bad_words": ["c"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    body = CompletionRequest.model_validate({"model": "tiny", "prompt": "a", "regex": "b"} | values)
    params = body.sampling_params(logprobs=body.logprobs, prompt_logprobs=1)
    assert params == SamplingParams(
        **values
        | {"stop": ("a",), "stop_token_ids": (3,), "logit_bias": {4: 1.0}, "prompt_logprobs": 1}
        | {"allowed_token_ids": (5,), "bad_words": ("c",)},
        grammar=Grammar("regex", "b", "regex"),
    )
