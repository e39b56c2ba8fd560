"""Two servers for all clients, with an API key: the bundled model, and one with a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import echo_runner, tool_loop
from support.server import Server, start_server

from weft.models.checkpoint.locate import locate

KEY = "the key of all clients"


@pytest.fixture(scope="session")
def key() -> str:
    """The server's API key."""
    return KEY


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, which computes, and knows tools."""
    path = tmp_path_factory.mktemp("demo")
    with start_server(locate("weft-demo"), path, api_key=KEY) as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A model with thoughts, tool calls and answers from `tool_loop.SCRIPT`."""
    path = tmp_path_factory.mktemp("scripted")
    model = echo_runner.write_script(path / "scripted", tool_loop.SCRIPT)
    with start_server(model, path, loader=echo_runner.LOADER, api_key=KEY) as server:
        yield server
