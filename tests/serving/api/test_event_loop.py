"""What takes long with a large request is done beside the event loop, which others need."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from support.echo_runner import LOADER, write_echo
from support.engine import started

from weft.serving.api import generation
from weft.serving.api.app import build_app
from weft.serving.api.local import LocalApi
from weft.serving.api.middleware import access_log
from weft.serving.api.middleware.request_context import RequestContext
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
            {"encode", "decode", "validate"},
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
