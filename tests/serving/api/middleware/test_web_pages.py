"""Requests from web pages: foreign pages change nothing, and only the server's own names work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.browser import chromium, needs_chromium
from support.server import Server, start_server
from support.tokenizers import write_byte_level

from weft.errors import ConfigError
from weft.serving.api.middleware.web_pages import PageGuard
from weft.serving.config.settings import ServerConfig

MOCK = "support.mock_runner:load_slowly"
HERE = "llm.example:8000"
EVIL = "https://evil.example"


async def answer(config: ServerConfig, method: str = "POST", **headers: str) -> str:
    """The guard's error, or "" if the request passes."""
    sent: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["method"] == method
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    fields = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    scope = {"type": "http", "method": method, "path": "/", "headers": fields}
    await PageGuard(app, config)(scope, receive, send)
    if sent[0]["status"] == 200:
        return ""
    assert sent[0]["status"] == 403
    error = json.loads(sent[1]["body"])["error"]
    assert error["type"] == "permission_error"
    return str(error["message"])


WITH_KEY = ServerConfig(api_key="a secret key")
OPEN = ServerConfig(cors_origins="https://a.example, null, chrome-extension://abc")

WRITES: list[tuple[ServerConfig, dict[str, str], str]] = [
    (WITH_KEY, {}, ""),
    (WITH_KEY, {"origin": EVIL}, "Origin"),
    (WITH_KEY, {"origin": "null"}, "Origin"),
    (WITH_KEY, {"origin": "chrome-extension://abc"}, "Origin"),
    (WITH_KEY, {"origin": "chrome-extension://abc", "sec_fetch_site": "none"}, "Origin"),
    (WITH_KEY, {"origin": EVIL, "sec_fetch_site": "cross-site"}, "Origin"),
    (WITH_KEY, {"origin": "http://llm.example:3000", "sec_fetch_site": "same-site"}, "Origin"),
    (WITH_KEY, {"sec_fetch_site": "cross-site"}, "Sec-Fetch-Site"),
    (WITH_KEY, {"sec_fetch_site": "same-site"}, "Sec-Fetch-Site"),
    (WITH_KEY, {"sec_fetch_site": "none"}, ""),
    (WITH_KEY, {"origin": f"http://{HERE}"}, ""),
    (WITH_KEY, {"origin": f"https://{HERE}"}, ""),  # a proxy terminates TLS
    (WITH_KEY, {"origin": f"http://{HERE}", "sec_fetch_site": "cross-site"}, "Origin"),
    (WITH_KEY, {"origin": "https://outside.example", "sec_fetch_site": "same-origin"}, ""),
    (OPEN, {"origin": "https://a.example", "sec_fetch_site": "cross-site"}, ""),
    (OPEN, {"origin": "null"}, ""),
    (OPEN, {"origin": "chrome-extension://abc"}, ""),
    (OPEN, {"origin": EVIL}, "Origin"),
    (ServerConfig(cors_origins="*"), {"origin": EVIL, "sec_fetch_site": "cross-site"}, ""),
]


@pytest.mark.parametrize(("config", "headers", "named"), WRITES)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
async def test_writes(
    config: ServerConfig, headers: dict[str, str], named: str, method: str
) -> None:
    where = HERE if config is WITH_KEY else "localhost:8000"
    message = await answer(config, method, host=where, **headers)
    if not named:
        assert message == ""
        return
    value = headers[named.lower().replace("-", "_")]
    assert message.startswith(f"the {named} header is '{value}': another web page")
    assert "--cors-origins" in message


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS"])
async def test_a_page_may_read_as_far_as_its_browser_allows(method: str) -> None:
    headers = {"origin": EVIL, "sec_fetch_site": "cross-site"}
    assert await answer(WITH_KEY, method, host=HERE, **headers) == ""


LOOPBACK = ServerConfig()
NAMED = ServerConfig(allowed_hosts="LLM.example, other.example", api_key="a secret key")
KEYS: Any = {"api_key_file": "keys.txt", "host": "127.0.0.1"}


@pytest.mark.parametrize(
    ("config", "host", "passes"),
    [
        (LOOPBACK, "localhost:8000", True),
        (LOOPBACK, "LocalHost", True),
        (LOOPBACK, "localhost.", True),
        (LOOPBACK, "weft.localhost:8000", True),
        (LOOPBACK, "127.0.0.1:8000", True),
        (LOOPBACK, "[::1]:8000", True),
        (LOOPBACK, "10.1.2.3", True),  # a page under a foreign name never has an address as host
        (LOOPBACK, "evil.example", False),
        (LOOPBACK, "evil.example:8000", False),
        (LOOPBACK, "localhost.evil.example", False),
        (LOOPBACK, "127.0.0.1.evil.example", False),
        (LOOPBACK, "[::1", False),
        (ServerConfig(host="::1"), "evil.example", False),
        (ServerConfig(host="localhost"), "evil.example", False),
        (ServerConfig(host="127.0.0.2"), "evil.example", False),
        (ServerConfig(host="0.0.0.0"), "llm.example", True),
        (ServerConfig(api_key="a secret key"), "llm.example", True),
        (ServerConfig(**KEYS), "llm.example", True),
        (ServerConfig(allowed_hosts="*"), "evil.example", True),
        (NAMED, "llm.EXAMPLE:8000", True),
        (NAMED, "other.example", True),
        (NAMED, "localhost", True),
        (NAMED, "evil.example", False),
        (ServerConfig(host="0.0.0.0", allowed_hosts="llm.example"), "evil.example", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_hosts(config: ServerConfig, host: str, passes: bool, method: str) -> None:
    message = await answer(config, method, host=host)
    assert (message == "") == passes
    if not passes:
        assert message.startswith(f"the Host header is '{host}'")
        assert "--allowed-hosts" in message


async def test_a_client_of_http_1_0_names_no_host() -> None:
    assert await answer(LOOPBACK, "GET") == ""


async def test_a_long_value_is_cut() -> None:
    assert len(await answer(WITH_KEY, host=HERE, origin="https://" + "a" * 60_000)) < 300


@pytest.mark.parametrize(
    "settings",
    [
        {"cors_origins": "a.example"},
        {"cors_origins": "https://a.example/"},
        {"cors_origins": "https://a.example,"},
        {"allowed_hosts": "https://a.example"},
        {"allowed_hosts": "a.example:8000"},
        {"allowed_hosts": ""},
    ],
)
def test_a_value_that_no_browser_sends_is_refused(settings: dict[str, str]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^--{name.replace('_', '-')} has '.*'; an? "):
        ServerConfig(**settings)  # type: ignore[arg-type]


# A real server.


@pytest.fixture(scope="module")
def mock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("pages")
    model = write_byte_level(path / "mock")
    with start_server(model, path, loader=MOCK) as server:
        yield server


def test_each_route_has_its_own_form_of_the_error(mock: Server) -> None:
    body = {"model": "mock", "prompt": [1], "max_tokens": 1}
    refused = mock.http.post("/v1/completions", json=body, headers={"origin": EVIL})
    assert refused.status_code == 403
    assert refused.json()["error"]["type"] == "permission_error"
    refused = mock.http.post("/v1/messages", json=body, headers={"host": "evil.example"})
    assert (refused.status_code, refused.json()["type"]) == (403, "error")
    assert refused.json()["error"]["type"] == "permission_error"
    assert mock.http.get("/health", headers={"host": "evil.example"}).status_code == 403
    own = {"origin": mock.url}
    assert mock.http.post("/v1/completions", json=body, headers=own).status_code == 200


def files(server: Server) -> int:
    return len(server.http.get("/v1/files").json()["data"])


def test_a_foreign_page_uploads_no_file(mock: Server) -> None:
    form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"{}")}}
    headers = {"origin": EVIL, "sec-fetch-site": "cross-site"}
    refused = mock.http.post("/v1/files", headers=headers, **form)
    assert refused.status_code == 403
    assert files(mock) == 0
    accepted = mock.http.post("/v1/files", **form)
    assert accepted.status_code == 200
    mock.http.delete(f"/v1/files/{accepted.json()['id']}")


class EvilPage(BaseHTTPRequestHandler):
    """Serves a page; its script posts to the server in the query."""

    def do_GET(self) -> None:
        target = self.path.partition("?")[2]
        page = f"""<script>
            const form = new FormData();
            form.append("purpose", "batch");
            form.append("file", new Blob(["{{}}"]), "a.jsonl");
            fetch("{target}/v1/files", {{method: "POST", mode: "no-cors", body: form}})
              .finally(() => {{ document.title = "sent"; }});
        </script>"""
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(page.encode())

    def log_message(self, *_: Any) -> None:
        pass


@needs_chromium
def test_a_real_browser_says_what_page_it_is(mock: Server) -> None:
    """A page on another port, and a page whose name points to this machine."""
    evil = ThreadingHTTPServer(("127.0.0.1", 0), EvilPage)
    Thread(target=evil.serve_forever, daemon=True).start()
    with chromium("--host-resolver-rules=MAP evil.example 127.0.0.1") as browser:
        page = browser.new_page()
        for host in ("127.0.0.1", "evil.example"):
            with page.expect_response("**/v1/files") as response:
                page.goto(f"http://{host}:{evil.server_port}/?{mock.url}")
            assert response.value.status == 403
        for host, status in (("evil.example", 403), ("localhost", 200)):
            answer = page.goto(f"http://{host}:{mock.port}/v1/models")
            assert answer is not None
            assert answer.status == status
    evil.shutdown()
    evil.server_close()
    assert files(mock) == 0


def test_behind_an_ingress_with_its_own_name(tmp_path: Path) -> None:
    """With a key, any host is right, and this host's page may write."""
    model = write_byte_level(tmp_path / "mock")
    keys: Any = {"api_key": "a secret key", "host": "0.0.0.0"}
    with start_server(model, tmp_path, loader=MOCK, **keys) as server:
        headers = {"host": "llm.example", "origin": "https://llm.example"}
        headers |= {"authorization": "Bearer a secret key"}
        body = {"model": "mock", "prompt": [1], "max_tokens": 1}
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as http:
            for more in ({}, {"sec-fetch-site": "same-origin"}):
                response = http.post("/v1/completions", json=body, headers=headers | more)
                assert response.status_code == 200, response.text
            headers["origin"] = EVIL
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 403
