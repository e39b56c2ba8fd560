"""API keys, what each may have, HTTPS, browsers, deadlines, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import psutil
import pytest
from anthropic.types import ErrorResponse
from support.server import Server, start_server
from support.tokenizers import write_byte_level

from weft.errors import ConfigError, EngineError, RequestError
from weft.serving.api.app import build_app
from weft.serving.api.middleware.access_log import request_id
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.server import tls_context
from weft.serving.api.state import ServerState
from weft.serving.config.settings import ServerConfig

ORIGINS = "https://a.example, https://b.example"
ALICE, BOB = "alice's secret", "sk-bob-0123456789"
SLOW_MOCK = "support.mock_runner:load_slowly"
SHORT = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
LONG = SHORT | {"max_tokens": 4000, "stream": True}


def start_mock(path: Path, **settings: Any) -> contextlib.AbstractContextManager[Server]:
    model = write_byte_level(path / "mock")
    return start_server(model, path, loader=SLOW_MOCK, max_model_len=4096, **settings)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With two keys, two requests at once for each; the client has none. It listens to all."""
    path = tmp_path_factory.mktemp("locked")
    keys = {"api_key": f"{ALICE}, {BOB}", "max_requests_per_key": 2, "open_metrics": True}
    more = {"host": "0.0.0.0", "cors_origins": ORIGINS, "write_timeout": 0.5, "max_num_seqs": 32}
    with start_mock(path, **keys, **more) as server:
        yield server


def complete(server: Server, key: str, body: dict[str, Any] = SHORT) -> httpx.Response:
    return server.http.post("/v1/completions", json=body, headers=bearer(key))


WRONG: list[dict[str, str]] = [
    {},
    bearer("not a key of this server"),
    {"authorization": "Bearer"},
    bearer(ALICE[:-1]),
    bearer(ALICE + "x"),
    {"authorization": f"Basic {ALICE}"},
    {"authorization": ALICE},
    {"x-api-key": "nor this"},
    bearer("x" * 5000),
]


@pytest.mark.parametrize("headers", WRONG)
def test_no_route_answers_without_a_key(locked: Server, headers: dict[str, str]) -> None:
    paths = locked.http.get("/openapi.json", headers=bearer(BOB)).json()["paths"]
    routes = [(method, path) for path, methods in paths.items() for method in methods]
    assert ("post", "/v1/chat/completions") in routes
    open_routes = {("get", "/health"), ("get", "/ready"), ("get", "/metrics")}
    more = [("get", "/openapi.json"), ("get", "/nowhere"), ("get", "/health/"), ("put", "/v1")]
    for method, path in {*routes, *more} - open_routes:
        response = locked.http.request(method, path, headers=headers)
        assert response.status_code == 401, (method, path)
        error = response.json()["error"]
        assert error["type"] == "authentication_error"
        if not path.startswith("/v1/messages"):  # whose errors are Anthropic's, without a code
            assert error["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"
    for method, path in open_routes:
        assert locked.http.request(method, path, headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers", [bearer(ALICE), {"authorization": f"bearer  {BOB}"}, {"x-api-key": BOB}]
)
def test_a_key_opens(locked: Server, headers: dict[str, str]) -> None:
    assert locked.http.get("/v1/models", headers=headers).status_code == 200
    assert locked.http.post("/v1/completions", json=SHORT, headers=headers).status_code == 200


def test_a_body_without_a_key_is_not_read(locked: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", locked.port), timeout=60) as connection:
        connection.sendall(head + b"content-length: 30000000\r\n\r\n")
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert answer.startswith(b"HTTP/1.1 401 ")


def test_keys_are_not_shown(locked: Server) -> None:
    for _ in range(2):
        complete(locked, "a wrong key that nobody else may see")
    assert complete(locked, ALICE).status_code == 200
    log = locked.log.read_text()
    metrics = locked.http.get("/metrics").text
    for secret in (ALICE, BOB, "a wrong key"):
        assert secret not in log
        assert secret not in metrics
    assert ALICE not in repr(ServerConfig(api_key=ALICE, ssl_certfile="a"))


def test_a_key_has_so_many_requests_at_once(locked: Server) -> None:
    """The other key's requests, and routes that only look, are not in the way."""
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            asked = locked.http.stream("POST", "/v1/completions", json=LONG, headers=bearer(ALICE))
            streams.enter_context(asked)
        response = complete(locked, ALICE)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "too_many_requests_of_key"
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) >= 1
        assert complete(locked, BOB).status_code == 200
        assert locked.http.get("/v1/models", headers=bearer(ALICE)).status_code == 200
    locked.wait_until("requests_running", 0)
    assert complete(locked, ALICE).status_code == 200


MESSAGES: Any = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


def ask_anthropic(server: Server, key: str) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        client.messages.create(model="mock", **MESSAGES)


def anthropic_type(error: anthropic.APIStatusError) -> str:
    """Of an error, whose body is checked."""
    body = ErrorResponse.model_validate(error.response.json(), strict=True)
    return body.error.type


def test_refusals_of_anthropics_routes_are_anthropics(locked: Server) -> None:
    """Those of the guard, of the limits of bodies, and of the protocol itself."""
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        ask_anthropic(locked, "not a key of this server")
    assert anthropic_type(wrong.value) == "authentication_error"
    with contextlib.ExitStack() as streams:
        for _ in range(2):
            asked = locked.http.stream("POST", "/v1/completions", json=LONG, headers=bearer(ALICE))
            streams.enter_context(asked)
        with pytest.raises(anthropic.RateLimitError) as busy:
            ask_anthropic(locked, ALICE)
    assert anthropic_type(busy.value) == "rate_limit_error"
    assert int(busy.value.response.headers["retry-after"]) >= 1
    head = b"POST /v1/messages?beta=true HTTP/1.1\r\nhost: a\r\nx-api-key: %b\r\n" % ALICE.encode()
    json_head = head + b"content-type: application/json\r\n"
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    for sent, status, kind in (
        (json_head + b"content-length: 1000000000\r\n\r\n", 413, "request_too_large"),
        (json_head + b"transfer-encoding: chunked\r\n\r\n" + 33 * chunk, 413, "request_too_large"),
        (head + b"x: " + b"a" * 1_000_000, 431, "invalid_request_error"),
    ):
        answer, _, body = locked.raw(sent).partition(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        error = json.loads(body)
        assert (error["type"], error["error"]["type"]) == ("error", kind)
    locked.wait_until("requests_running", 0)


def test_refusals_are_counted_by_reason(locked: Server) -> None:
    def count() -> int:
        lines = locked.http.get("/metrics").text.splitlines()
        name = 'weft_requests_refused_total{reason="invalid_api_key"} '
        return sum(int(float(x.removeprefix(name))) for x in lines if x.startswith(name))

    before = count()
    assert complete(locked, "not one of them").status_code == 401
    assert count() == before + 1


def test_a_key_has_so_many_tokens_in_a_minute(tmp_path: Path) -> None:
    """600 a minute are ten a second; 1000 at once are a debt of 40 seconds."""
    limits = {"api_key": f"{ALICE},{BOB}", "tokens_per_minute_per_key": 600}
    with start_mock(tmp_path, **limits) as server:
        assert server.http.get("/metrics").status_code == 401  # unless it is open
        assert server.http.get("/metrics", headers=bearer(ALICE)).status_code == 200
        assert complete(server, ALICE, SHORT | {"max_tokens": 100}).status_code == 200
        body = SHORT | {"prompt": [[1] * 50, [2] * 50], "n": 2, "max_tokens": 200}
        assert complete(server, ALICE, body).status_code == 200  # what has begun gets to its end
        response = complete(server, ALICE)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "token_rate_exceeded"
        assert 20 <= int(response.headers["retry-after"]) <= 41
        assert complete(server, BOB).status_code == 200


def test_a_prompt_counts_once_it_is_admitted(tmp_path: Path) -> None:
    """Though its client goes before it is computed; one that is refused does not."""
    limits = {"api_key": ALICE, "tokens_per_minute_per_key": 600}
    with start_mock(tmp_path, max_num_seqs=1, max_queue=1, **limits) as server:

        def live() -> int:
            view = server.http.get("/engine", headers=bearer(ALICE)).json()
            return sum(request["ended"] is None for request in view["requests"])

        def wait_for(count: int) -> None:
            while live() != count:
                time.sleep(0.01)

        with contextlib.ExitStack() as asked:
            (engine,) = psutil.Process(server.process.pid).children()
            engine.suspend()
            asked.callback(engine.resume)
            for count in (1, 2):
                body = SHORT | {"prompt": [1] * 200}
                asked.enter_context(server.ask(body, authorization=f"Bearer {ALICE}"))
                wait_for(count)
            response = complete(server, ALICE, SHORT | {"prompt": [1] * 4000})
            assert response.json()["error"]["code"] == "queue_full"
        wait_for(0)
        assert complete(server, ALICE).status_code == 200  # of 600, 400 are gone
        engine.suspend()
        try:
            body = SHORT | {"prompt": [1] * 2000}
            with server.ask(body, authorization=f"Bearer {ALICE}"):
                wait_for(1)
            wait_for(0)
        finally:
            engine.resume()
        response = complete(server, ALICE)
        assert response.json()["error"]["code"] == "token_rate_exceeded"
        assert int(response.headers["retry-after"]) > 60


def test_texts_to_embed_count_each_once(tmp_path: Path) -> None:
    """3000 tokens of 600 a minute are a debt of 240 seconds; what is refused is none."""
    with start_mock(tmp_path, api_key=ALICE, tokens_per_minute_per_key=600) as server:

        def embed(*prompts: list[int]) -> httpx.Response:
            body = {"model": "mock", "input": prompts}
            return server.http.post("/v1/embeddings", json=body, headers=bearer(ALICE))

        assert embed([1] * 1000, [-1]).status_code == 400
        assert embed([1] * 1000, [2] * 1000, [3] * 1000).status_code == 200
        response = embed([1])
        assert response.json()["error"]["code"] == "token_rate_exceeded"
        assert 120 <= int(response.headers["retry-after"]) <= 241


def test_keys_of_a_file_are_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# who may ask\n\n{BOB} bob\nsk-carol-0123456789 carol's team\n")
    with start_mock(tmp_path, api_key_file=str(file), max_requests_per_key=1) as server:
        assert complete(server, BOB).status_code == 200
        file.write_text("sk-carol-0123456789 carol\nsk-dave-0123456789\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_until_said("have been read again")
        assert complete(server, BOB).status_code == 401
        assert complete(server, "sk-dave-0123456789").status_code == 200
        file.unlink()
        server.process.send_signal(signal.SIGHUP)
        server.wait_until_said("the previous keys and certificate stay in use")
        assert complete(server, "sk-dave-0123456789").status_code == 200


def test_reloading_keeps_what_is_in_use(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{BOB} bob\n")
    config = ServerConfig(api_key_file=str(file), max_requests_per_key=1)
    keys = Keyring(config)
    key = keys.find(BOB)
    assert key is not None
    key.running += 1
    file.write_text(f"{BOB} robert\n")
    keys.reload()
    assert keys.find(BOB) is key
    assert key.name == "robert"
    with pytest.raises(RequestError, match="key robert has 1 running requests"):
        keys.check(key)


@pytest.mark.parametrize(
    ("settings", "text", "message"),
    [
        ({"api_key": "short"}, None, "--api-key has an invalid key: a key is 8"),
        ({"api_key": f"{ALICE},"}, None, "--api-key has an invalid key: a key is 8"),
        ({"api_key": "schlüssel-schlüssel"}, None, "--api-key has an invalid key"),
        ({"api_key_file": "FILE"}, None, "FILE: No such file or directory"),
        ({"api_key_file": "FILE"}, "# none\n", "FILE has no key"),
        ({"api_key_file": "FILE"}, f"{BOB}\nsecret\n", "FILE:2 has an invalid key: a key is 8"),
        ({"max_requests_per_key": 3}, None, "--max-requests-per-key needs keys"),
        ({"tokens_per_minute_per_key": 3}, None, "--tokens-per-minute-per-key needs keys"),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, settings: dict[str, Any], text: str | None, message: str
) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    given = {name: str(file) if value == "FILE" else value for name, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        Keyring(ServerConfig(**given))
    assert message.replace("FILE", str(file)) in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_server_that_is_open_to_all_says_so(locked: Server, hasty: Server) -> None:
    """Both listen at 0.0.0.0."""
    said = "has no API keys, so anyone on its network can use it"
    assert said in hasty.log.read_text()
    assert said not in locked.log.read_text()


# Browsers.


@pytest.mark.parametrize(
    ("origin", "allowed"), [("https://b.example", True), ("https://c.example", False)]
)
def test_scripts_of_the_origins_that_are_named_may_ask(
    locked: Server, origin: str, allowed: bool
) -> None:
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    preflight = locked.http.options("/v1/completions", headers=headers)
    assert preflight.status_code == (200 if allowed else 400)
    # Also what is wrong can be read by the page.
    refused = locked.http.get("/v1/models", headers={"origin": origin})
    assert refused.status_code == 401
    assert refused.headers.get("access-control-allow-origin") == (origin if allowed else None)


def test_without_origins_no_script_may_ask(hasty: Server) -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert hasty.http.options("/v1/completions", headers=headers).status_code == 405
    answer = hasty.http.get("/health", headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]


# HTTPS.


def certificate(path: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    cert, key = path / f"{name}.pem", path / f"{name}.key"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    named = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*make.split(), *named, *files], check=True, capture_output=True)
    return cert, key


def test_https(tmp_path: Path) -> None:
    """With a certificate that is replaced while it serves, and clients that must have one."""
    cert, key = certificate(tmp_path, "server")
    own, own_key = certificate(tmp_path, "client")
    files = {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": own}

    def trusting(cert: Path, *own: Path) -> httpx.Client:
        context = ssl.create_default_context(cafile=cert)
        if own:
            context.load_cert_chain(*own)
        return httpx.Client(verify=context, base_url=server.url, timeout=60)

    with start_mock(tmp_path, **{name: str(file) for name, file in files.items()}) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with trusting(cert, own, own_key) as client:
            answer = client.post("/v1/completions", json=SHORT)
            assert answer.json()["usage"]["completion_tokens"] == 5
            with client.stream("POST", "/v1/completions", json=LONG) as stream:
                assert next(stream.iter_lines()).startswith("data: ")
        with trusting(own, own, own_key) as client, pytest.raises(httpx.ConnectError):
            client.get("/health")  # another one's
        with trusting(cert) as client, pytest.raises(httpx.TransportError):
            client.get("/health")
        key.write_bytes(own_key.read_bytes())  # which does not suit: nothing changes
        server.process.send_signal(signal.SIGHUP)
        server.wait_until_said("stay in use")
        with trusting(cert, own, own_key) as client:
            assert client.get("/health").status_code == 200
        new, _ = certificate(tmp_path, "server")
        server.process.send_signal(signal.SIGHUP)
        server.wait_until_said("have been read again")
        with trusting(new, own, own_key) as client:
            assert client.get("/health").status_code == 200


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    _, other = certificate(tmp_path, "other")
    for settings, message in (
        ({"ssl_certfile": "/nowhere.pem"}, "--ssl-certfile /nowhere.pem: No such file"),
        ({"ssl_certfile": cert}, f"--ssl-certfile {cert}: "),
        ({"ssl_certfile": cert, "ssl_keyfile": other}, f"--ssl-keyfile {other}: "),
        (
            {"ssl_certfile": cert, "ssl_keyfile": key, "ssl_ca_certs": key},
            f"--ssl-ca-certs {key}: ",
        ),
        ({"ssl_keyfile": key}, "--ssl-keyfile is given without --ssl-certfile"),
    ):
        with pytest.raises(ConfigError, match=message):
            tls_context(ServerConfig(**{name: str(value) for name, value in settings.items()}))


# Time.


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A request may take four seconds, and a client that reads two. It listens to all."""
    path = tmp_path_factory.mktemp("hasty")
    with start_mock(path, request_timeout=4.0, write_timeout=2.0, host="0.0.0.0") as server:
        yield server


@pytest.mark.parametrize("n", [1, 3])
def test_a_request_that_takes_too_long_is_504(hasty: Server, n: int) -> None:
    body = LONG | {"stream": False, "n": n}
    response = hasty.http.post("/v1/completions", json=body)
    assert response.status_code == 504
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "request_timeout")
    hasty.wait_until("requests_running", 0)
    assert hasty.metric("kv_cache_usage_ratio") == 0
    assert hasty.http.post("/v1/completions", json=SHORT).status_code == 200


class BrokenEngine:
    """One whose requests fail before they begin."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def check_serving(self) -> None:
        raise self._failure


@pytest.mark.parametrize(
    ("failure", "status", "kind", "anthropics"),
    [
        (ZeroDivisionError(), 500, "server_error", "api_error"),
        (EngineError("it loads"), 503, "server_error", "overloaded_error"),
        (RequestError("too late", status=504), 504, "server_error", "timeout_error"),
    ],
)
async def test_failures_have_the_shape_of_their_route(
    failure: Exception, status: int, kind: str, anthropics: str
) -> None:
    state = ServerState("m", engine=cast(Any, BrokenEngine(failure)))
    app = build_app(state)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        chat = await http.post("/v1/chat/completions", json=MESSAGES | {"model": "m"})
        message = await http.post("/v1/messages", json=MESSAGES | {"model": "m"})
    assert (chat.status_code, message.status_code) == (status, status)
    assert chat.json()["error"]["type"] == kind
    assert ErrorResponse.model_validate(message.json(), strict=True).error.type == anthropics
    assert chat.headers.get("retry-after") == message.headers.get("retry-after")


def test_a_stream_that_takes_too_long_ends_with_an_error(hasty: Server) -> None:
    with hasty.http.stream("POST", "/v1/completions", json=LONG) as response:
        assert response.status_code == 200
        *pieces, failure, done = [line for line in response.iter_lines() if line]
    assert len(pieces) > 10
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert done == "data: [DONE]"
    hasty.wait_until("requests_running", 0)


def test_a_client_that_does_not_read_is_cut_off(locked: Server) -> None:
    """What it leaves unread is bounded, and its requests end."""
    content = json.dumps(LONG | {"n": 16, "logprobs": 20}).encode()
    before = answers(locked, "abort")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", locked.port))
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"x-api-key: %b\r\ncontent-length: %d\r\n\r\n" % (BOB.encode(), len(content)) + content
        )
        locked.wait_until("requests_running", 16)
        locked.wait_until("requests_running", 0)
        assert locked.metric("kv_cache_usage_ratio") == 0
        assert answers(locked, "abort") == before + 16
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while chunk := client.recv(65536):
                received += chunk
    assert b"[DONE]" not in received
    assert complete(locked, BOB).status_code == 200


def answers(server: Server, reason: str) -> int:
    """How many have ended for a reason."""
    text = server.http.get("/metrics").text
    found = re.search(rf'^weft_answers_total{{finish_reason="{reason}",.*}} (\S+)$', text, re.M)
    return int(float(found[1])) if found else 0


def test_a_client_that_reads_slowly_is_served(hasty: Server) -> None:
    """One that pauses for less than the limit gets all of it."""

    async def read() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", hasty.port, limit=1024)
        content = json.dumps(SHORT | {"stream": True, "max_tokens": 50}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
            b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(content) + content
        )
        answer = b""
        while chunk := await reader.read(200):
            answer += chunk
            await asyncio.sleep(0.01)
        writer.close()
        return answer

    assert b"data: [DONE]" in asyncio.run(read())


def test_a_full_queue_tells_when_to_come_again(mock: Server) -> None:
    """Each refused client gets a later time; see test_retry_after.py for the rate."""
    with contextlib.ExitStack() as asked:
        for _ in range(12):
            asked.enter_context(mock.ask(LONG))
        mock.wait_until("requests_waiting", 4)
        waits = []
        for _ in range(20):
            response = mock.http.post("/v1/completions", json=SHORT)
            assert response.status_code == 429
            assert response.json()["error"]["code"] == "queue_full"
            waits.append(int(response.headers["retry-after"]))
    assert waits == sorted(waits)
    assert waits[0] >= 1
    mock.wait_until("requests_running", 0)
    assert mock.http.post("/v1/completions", json=SHORT).status_code == 200


# Ids.


def test_an_id_is_taken_or_made(locked: Server) -> None:
    given = {"x-request-id": "job-17/3"}
    for headers in (given, bearer(ALICE) | given):
        assert locked.http.get("/v1/models", headers=headers).headers["x-request-id"] == "job-17/3"
    made = {locked.http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3


@pytest.mark.parametrize("given", [None, "", "a b", "ä", "x" * 129, "a\nb"])
def test_an_id_that_cannot_be_passed_on_is_replaced(given: str | None) -> None:
    made = request_id(given)
    assert made != given
    assert made.startswith("req-")
