"""Servers that the tests here share, each for all tests of a process: it starts for seconds."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from support.checkpoints import make_checkpoint
from support.echo_runner import LOADER, write_echo
from support.server import Server, start_server
from support.tokenizers import write_byte_level

from weft.models.checkpoint.locate import locate

SLOW_MOCK = "support.mock_runner:load_slowly"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`weft serve` of a tiny random model: its text is noise, with half characters."""
    path = tmp_path_factory.mktemp("server")
    with start_server(make_checkpoint(path / "tiny", "llama"), path) as server:
        yield server


@pytest.fixture(scope="session")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A mock model with steps of 5 ms, 64 token ids, eight places and a queue of four."""
    path = tmp_path_factory.mktemp("mock")
    model = write_byte_level(path / "mock")
    settings = {"max_num_seqs": 8, "max_queue": 4, "max_model_len": 4096}
    with start_server(model, path, loader=SLOW_MOCK, **settings) as server:
        yield server


@pytest.fixture(scope="session")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model that says what the last message says, with Qwen's marks of calls and reasoning."""
    path = tmp_path_factory.mktemp("echo")
    model = write_echo(path / "echo", marks="<tool_call> <think> </think>")
    with start_server(model, path, loader=LOADER) as server:
        yield server


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the bundled model, which knows tools."""
    with (
        start_server(locate("weft-demo"), tmp_path_factory.mktemp("demo")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture
def http(server: Server) -> httpx.Client:
    """A client of the tiny model's server."""
    return server.http
