"""A small OpenAI-compatible server that streams what a test tells it to, however odd."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DONE = b"data: [DONE]\n\n"
MODEL = "odd"


def event(content: object) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(piece: str, finish_reason: str | None = None) -> bytes:
    """An event of a completion."""
    return event({"choices": [{"index": 0, "text": piece, "finish_reason": finish_reason}]})


def delta(content: dict[str, object], finish_reason: str | None = None) -> bytes:
    """An event of a chat completion."""
    return event({"choices": [{"index": 0, "delta": content, "finish_reason": finish_reason}]})


def usage(output_tokens: int, prompt_tokens: int = 5, **more: object) -> bytes:
    """The event with the token counts."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": output_tokens, **more}
    return event({"choices": [], "usage": counts})


async def stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """Answer with a stream of these parts, a write each."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
        await asyncio.sleep(0)
    return response


async def answer(request: web.Request) -> web.StreamResponse:
    """Answer as a good server does, in as many tokens as were asked for."""
    count = (await request.json())["max_tokens"]
    pieces = [text("a", "length" if i == count - 1 else None) for i in range(count)]
    return await stream(request, *pieces, usage(count), DONE)


@contextmanager
def sse_server(handler: Handler, models: Handler | None = None) -> Iterator[str]:
    """Serve `handler` for completions and chat from a thread; gives the URL with its /v1.

    Args:
        handler: answers a request.
        models: answers /v1/models; else there is one, `MODEL`.
    """

    async def listed(_: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": MODEL}]})

    app = web.Application()
    app.router.add_get("/v1/models", models or listed)
    app.router.add_post("/v1/completions", handler)
    app.router.add_post("/v1/chat/completions", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    loop = asyncio.new_event_loop()

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    async def stop() -> None:
        await runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:  # of handlers that wait for ever
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result()
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
