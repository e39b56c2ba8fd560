"""What takes long with a large request is done beside the event loop, which others need."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.echo_runner import LOADER, write_echo
from support.engine import started

from weft.serving.api import body as bodies
from weft.serving.api import generation
from weft.serving.api.app import build_app
from weft.serving.api.body_room import LARGE
from weft.serving.api.local import LocalApi
from weft.serving.api.middleware import access_log
from weft.serving.api.middleware.request_context import RequestContext, heavy
from weft.serving.api.responses.writer import Writer
from weft.serving.api.state import ServerState
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine

CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


class Watch:
    """Notes where functions are called: in the test's own thread, or elsewhere."""

    def __init__(self) -> None:
        self._here = threading.get_ident()
        self.here: set[str] = set()
        self.elsewhere: set[str] = set()

    def over(self, owner: Any, name: str) -> Callable[..., Any]:
        """An owner's function, watched."""
        function = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            (self.here if threading.get_ident() == self._here else self.elsewhere).add(name)
            return function(*args, **named)

        return watched


class Backend:
    """A tokenizer's, of which `id_to_token` is watched."""

    def __init__(self, backend: Any, watch: Watch) -> None:
        self._backend = backend
        self.id_to_token = watch.over(backend, "id_to_token")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(model=str(write_echo(tmp_path / "echo", marks="<tool_call>")))
    async with started(config, in_process=True, runner_factory=LOADER) as engine:
        yield engine


@pytest.mark.parametrize(
    ("path", "body", "work"),
    [
        ("/tokenize", {"prompt": "hello", "return_token_strs": True}, {"encode", "id_to_token"}),
        ("/detokenize", {"tokens": [1, 2]}, {"decode"}),
        ("/v1/embeddings", {"input": ["hello"]}, {"encode", "decode", "validate"}),
        (
            "/v1/completions",
            {"prompt": "<|im_start|>a<|im_end|>"},
            {"encode", "decode", "validate_all"},
        ),
        ("/v1/chat/completions", CHAT, {"encode", "decode", "_with_grammar", "validate"}),
    ],
)
async def test_it_is_done_in_a_thread(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    work: set[str],
) -> None:
    watch = Watch()
    tokenizer = engine.tokenizer
    state = ServerState("echo", engine=engine, log_prompts=True)
    for owner, name in (
        (tokenizer, "encode"),
        (tokenizer, "decode"),
        (engine, "validate"),
        (engine, "validate_all"),
        (generation, "_with_grammar"),
    ):
        monkeypatch.setattr(owner, name, watch.over(owner, name))
    monkeypatch.setattr(tokenizer, "backend", Backend(tokenizer.backend, watch))
    context = RequestContext("one")
    monkeypatch.setattr(access_log, "RequestContext", lambda _: context)
    status, answer = await LocalApi(build_app(state)).post(
        path, json.dumps({"model": "echo"} | body).encode()
    )
    assert status == 200, answer
    assert work <= watch.elsewhere
    assert not work & watch.here
    assert (context.prompts is not None) == path.startswith("/v1/")


@pytest.mark.parametrize(
    ("stream", "owner", "work"), [(False, msgspec.json, "encode"), (True, Writer, "_end")]
)
async def test_a_response_with_log_probabilities_is_written_in_a_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, stream: bool, owner: Any, work: str
) -> None:
    """Its last events repeat all of them."""
    watch = Watch()
    monkeypatch.setattr(owner, work, watch.over(owner, work))
    body = {"model": "echo", "input": "hi", "stream": stream}
    body["include"] = ["message.output_text.logprobs"]
    status, answer = await LocalApi(build_app(ServerState("echo", engine=engine))).post(
        "/v1/responses", json.dumps(body).encode()
    )
    assert status == 200, answer
    assert watch.elsewhere == {work}
    assert not watch.here


MANY = [{"role": "user", "content": "hi"}] * 5000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * LARGE}),
        ("/v1/completions", {"prompt": [1] * LARGE}),
        ("/v1/chat/completions", {"messages": MANY}),
        ("/v1/responses", {"input": MANY}),
        ("/v1/messages", {"messages": MANY, "max_tokens": 4}),
        ("/v1/embeddings", {"input": ["a" * LARGE]}),
        ("/tokenize", {"messages": MANY}),
        ("/detokenize", {"tokens": [1] * LARGE}),
    ],
)
async def test_a_large_body_is_read_in_a_thread(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    watch = Watch()
    for name in ("count", "from_json"):
        monkeypatch.setattr(bodies, name, watch.over(bodies, name))
    state = ServerState("echo", engine=engine)
    data = json.dumps({"model": "echo"} | body).encode()
    status, answer = await LocalApi(build_app(state)).post(path, data)
    assert status in (200, 400), answer
    assert watch.elsewhere == {"count", "from_json"}
    assert not watch.here


async def test_heavy_requests_take_turns_and_others_pass_them() -> None:
    """Even if there are more requests than threads."""
    state = ServerState("echo")
    release = threading.Event()
    running = most = 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        release.wait(60)
        running -= 1

    async def asked() -> None:
        heavy.set(True)
        await state.aside(work)

    heavies = [asyncio.create_task(asked()) for _ in range(100)]
    await asyncio.sleep(0)
    assert await state.aside(lambda: "light") == "light"
    release.set()
    await asyncio.gather(*heavies)
    assert most == 1


async def test_no_garbage_is_collected_in_a_heavy_turn() -> None:
    """A collection would stop all threads, for as long as the body has objects."""
    state = ServerState("echo")
    assert gc.isenabled()
    assert await state.aside(gc.isenabled)
    heavy.set(True)
    assert not await state.aside(gc.isenabled)
    with pytest.raises(ZeroDivisionError):
        await state.aside(lambda: 1 / 0)
    assert gc.isenabled()


@pytest.mark.parametrize("many", [False, True])
async def test_a_conversation_that_is_far_too_long_is_not_rendered(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    watch = Watch()
    templates = type(engine.tokenizer.chat_templates)
    monkeypatch.setattr(templates, "render", watch.over(templates, "render"))
    message = {"role": "user", "content": "hi " * 100_000}
    messages = [message | {"content": ""}] * (2 * engine.info.max_model_len + 1)
    body = {"model": "echo", "messages": messages if many else [message]}
    status, answer = await LocalApi(build_app(ServerState("echo", engine=engine))).post(
        "/v1/chat/completions", json.dumps(body).encode()
    )
    assert (status, json.loads(answer)["error"]["code"]) == (400, "context_length_exceeded")
    assert not watch.here | watch.elsewhere
