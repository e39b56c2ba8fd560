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

from weft.serving.api import embeddings, turns
from weft.serving.api.app import build_app
from weft.serving.api.context import Context, current
from weft.serving.api.state import ServerState
from weft.serving.batch.local import LocalApi
from weft.serving.config import EngineConfig
from weft.serving.engine import AsyncEngine

CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


class Watched:
    """A tokenizer that notes which of its methods are called in the test's own thread."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._here = threading.get_ident()
        self.calls: set[str] = set()
        self.late: set[str] = set()

    def watch(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **named: Any) -> Any:
            (self.late if threading.get_ident() == self._here else self.calls).add(name)
            return function(*args, **named)

        return watched

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        return self.watch(name, value) if callable(value) else value


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
        ("/v1/embeddings", {"input": ["hello"]}, {"encode", "decode", "check_pooled"}),
        ("/v1/completions", {"prompt": "<|im_start|>a<|im_end|>"}, {"encode", "decode"}),
        ("/v1/chat/completions", CHAT, {"encode", "decode", "_with_grammar"}),
    ],
)
async def test_it_is_done_in_a_thread(
    engine: AsyncEngine,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    work: set[str],
) -> None:
    watched = Watched(engine.tokenizer.backend)
    state = ServerState("echo", engine=engine, log_prompts=True)
    state.answer_format(engine)
    monkeypatch.setattr(engine.tokenizer, "backend", watched)
    for module, name in ((embeddings, "check_pooled"), (turns, "_with_grammar")):
        monkeypatch.setattr(module, name, watched.watch(name, getattr(module, name)))
    context = Context("one")
    current.set(context)
    status, answer = await LocalApi(build_app(state)).post(
        path, json.dumps({"model": "echo"} | body).encode()
    )
    assert status == 200, answer
    assert work <= watched.calls
    assert not work & watched.late
    assert (context.prompts is not None) == path.startswith("/v1/")
