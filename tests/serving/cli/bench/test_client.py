"""The client understands the streams of every server, and what goes wrong is a reason."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from support.sse_server import DONE, Handler, answer, delta, event, sse_server, stream, text, usage

from weft.serving.cli.bench.client import Client, EventReader, Result
from weft.serving.cli.bench.workload import Turn

ROLE = {"role": "assistant", "content": ""}
STREAMS = {
    # name: the events, how many of them carry tokens, and how many tokens there are
    "weft": ([text("a"), text(""), text("é"), text("\ufffd", "length"), usage(4)], 4, 4),
    "vLLM": ([text("a"), text("bc"), text("", "stop"), usage(4)], 3, 4),
    "several tokens in an event": ([text("abcd"), text("efgh", "length"), usage(8)], 2, 8),
    "usage on every event": (
        [
            event({"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}),
            event(
                {
                    "choices": [{"text": "b", "finish_reason": "stop"}],
                    "usage": {"completion_tokens": 2},
                }
            ),
        ],
        2,
        2,
    ),
    "no usage": ([text("a"), text("b"), text("c", "length")], 3, 3),
    "null usage": ([event({"choices": [{"text": "a"}], "usage": None}), text("b", "stop")], 2, 2),
    "all held back to the end": ([text("", "length"), usage(1)], 1, 1),
    "chat of weft": (
        [
            delta(ROLE),
            delta({"content": "a"}),
            delta({"content": ""}),
            delta({"content": "é"}),
            delta({}, "stop"),
            usage(4),
        ],
        4,
        4,
    ),
    "chat of vLLM": (
        [delta(ROLE), delta({"content": ""}), delta({"content": "é"}, "length"), usage(2)],
        2,
        2,
    ),
    "chat of llama.cpp": (
        [
            delta({"role": "assistant", "content": None}),
            delta({"content": "a"}),
            delta({"content": "b"}),
            delta({}, "length"),
            event({"choices": [], "usage": {"completion_tokens": 2}, "timings": {"n": 1}}),
        ],
        2,
        2,
    ),
    "reasoning": (
        [
            delta(ROLE),
            delta({"reasoning_content": "hm"}),
            delta({"reasoning": "so"}),
            delta({"content": None, "reasoning_content": ""}),
            delta({"content": "a"}),
            delta({"content": ""}, "stop"),
            usage(4),
        ],
        4,
        4,
    ),
}  # fmt: skip


async def ask(
    url: str, turns: int = 1, *, chat: bool = False, tokens: int = 4, timeout: float = 60.0
) -> list[Result]:
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(timeout=limit) as session:
        client = Client(session, url, "odd", chat, {"ignore_eos": True})
        return await client.ask([Turn("how", tokens)] * turns, due=0.0)


def read(parts: list[bytes]) -> Result:
    """The result of a stream whose parts come a second apart."""
    result = Result(due=0.0, start=0.0)
    reader = EventReader(result)
    for second, part in enumerate(parts, 1):
        reader.feed(part, float(second))
    reader.finish()
    return result


@pytest.mark.parametrize("name", STREAMS)
def test_tokens_are_counted_in_the_streams_of_every_server(name: str) -> None:
    events, arrivals, tokens = STREAMS[name]
    result = read([*events, DONE])
    assert result.error is None
    assert len(result.arrivals) == arrivals
    assert result.output_tokens == tokens


def test_the_first_token_is_the_first_event_that_carries_one() -> None:
    for parts, second in (
        ([delta(ROLE), delta({"content": ""}), delta({"content": "é"}, "stop")], 2),
        ([delta(ROLE), delta({"reasoning_content": "hm"}), delta({"content": "é"}, "stop")], 2),
        ([delta({"role": "assistant", "content": "a"}), delta({"content": "é"}, "stop")], 1),
        ([text(""), text("é", "stop")], 1),
        ([text("", "length"), usage(1)], 1),
    ):
        assert read([*parts, DONE]).ttft == second


def test_times_per_token_count_tokens_and_times_between_count_events() -> None:
    result = read([text("abcd"), text("efgh"), text("i", "length"), usage(9), DONE])
    assert result.itl == [1.0, 1.0]
    assert result.tpot == 2.0 / 8


def test_tokens_without_text_last_until_the_end() -> None:
    """As of an answer that goes on with special tokens, which a chat does not show."""
    result = read([delta(ROLE), delta({"content": "a"}), b"", b"", delta({}, "length"), usage(4)])
    assert result.arrivals == [2.0, 5.0]
    assert result.tpot == 1.0


@given(st.data())
def test_however_the_bytes_are_cut_the_result_is_the_same(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(STREAMS)))
    end = data.draw(st.sampled_from([b"\n", b"\r\n"]))
    whole = b": comment\n\n" + b"".join([*STREAMS[name][0], DONE]).replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=20)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    result = read(parts)
    assert (len(result.arrivals), result.output_tokens) == STREAMS[name][1:]
    assert result.error is None


def test_cached_tokens_are_what_the_server_says() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 32}}
    result = read([text("a", "length"), usage(1, 40, **details), DONE])
    assert (result.prompt_tokens, result.cached_tokens) == (40, 32)
    for nothing in (None, {"cached_tokens": None}, {}):
        result = read([text("a", "length"), usage(1, 40, prompt_tokens_details=nothing), DONE])
        assert result.cached_tokens == 0


async def test_the_request_is_what_servers_expect() -> None:
    bodies = []

    async def handler(request: web.Request) -> web.StreamResponse:
        bodies.append((request.path, await request.json()))
        return await answer(request)

    with sse_server(handler) as url:
        (result,) = await ask(url)
    assert result.error is None
    assert (result.prompt_tokens, result.output_tokens, result.asked_tokens) == (5, 4, 4)
    assert bodies == [
        (
            "/v1/completions",
            {
                "prompt": "how", "model": "odd", "max_tokens": 4, "stream": True,
                "stream_options": {"include_usage": True}, "ignore_eos": True,
            },
        )
    ]  # fmt: skip


async def test_each_turn_carries_what_was_said() -> None:
    seen = []

    async def handler(request: web.Request) -> web.StreamResponse:
        seen.append([message["content"] for message in (await request.json())["messages"]])
        parts = (
            delta(ROLE),
            delta({"reasoning_content": "hm"}),
            delta({"content": "well"}, "stop"),
        )
        return await stream(request, *parts, usage(2), DONE)

    with sse_server(handler) as url:
        results = await ask(url, turns=3, chat=True)
    assert [result.error for result in results] == [None, None, None]
    assert seen == [["how"], ["how", "well", "how"], ["how", "well", "how", "well", "how"]]
    assert [later.due for later in results[1:]] == [before.end for before in results[:2]]


async def refuses(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": "no such field"}, status=400)


async def fails_in_the_middle(request: web.Request) -> web.StreamResponse:
    return await stream(request, text("a"), event({"error": {"message": "out of paper"}}), DONE)


async def fails_as_older_llama_cpp(request: web.Request) -> web.StreamResponse:
    return await stream(request, text("a"), b'error: {"message": "out of paper"}\n\n')


async def ends_early(request: web.Request) -> web.StreamResponse:
    return await stream(request, text("a"), text("b"))


async def says_nothing(request: web.Request) -> web.StreamResponse:
    return await stream(request, DONE)


async def makes_no_sense(request: web.Request) -> web.StreamResponse:
    return await stream(request, b"data: {nonsense\n\n")


async def hangs_up(request: web.Request) -> web.StreamResponse:
    response = await stream(request, text("a"))
    assert request.transport is not None
    request.transport.abort()
    return response


async def never_answers(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    return web.Response()


async def stops_in_the_middle(request: web.Request) -> web.StreamResponse:
    await stream(request, text("a"))
    return await never_answers(request)


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (refuses, 'HTTP 400: {"error": "no such field"}'),
        (fails_in_the_middle, "out of paper"),
        (fails_as_older_llama_cpp, "out of paper"),
        (ends_early, "the stream ended in the middle of the answer"),
        (says_nothing, "the answer was empty"),
        (makes_no_sense, "DecodeError"),
        (hangs_up, "ClientPayloadError"),
        (never_answers, "timed out after 0.5 s"),
        (stops_in_the_middle, "timed out after 0.5 s"),
    ],
)
async def test_what_goes_wrong_is_a_reason_and_ends_the_conversation(
    handler: Handler, reason: str
) -> None:
    with sse_server(handler) as url:
        timeout = 0.5 if "timed out" in reason else 60.0
        results = await ask(url, turns=2, chat=True, timeout=timeout)
    assert len(results) == 1
    assert reason in str(results[0].error)
    assert results[0].end >= results[0].start


async def test_a_server_that_is_gone() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        (result,) = await ask(f"http://127.0.0.1:{taken.getsockname()[1]}/v1")
    assert "ClientConnectorError" in str(result.error)
