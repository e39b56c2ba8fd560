"""One server of the bundled model, with an API key, for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server import Server, start_server

from weft.models.checkpoint.locate import locate

KEY = "the key of all clients"


@pytest.fixture(scope="package")
def key() -> str:
    """The server's API key."""
    return KEY


@pytest.fixture(scope="package")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The bundled model, which computes, and knows tools."""
    path = tmp_path_factory.mktemp("demo")
    with start_server(locate("weft-demo"), path, api_key=KEY) as server:
        yield server
