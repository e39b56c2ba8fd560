"""A real server: `weft serve` in a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec
import psutil

from support import mock_runner
from weft.serving.config.fields import settings_of
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.executor.loading import LoadedModel, Progress

TESTS = Path(__file__).parent.parent
TIMEOUT = 120.0  # seconds; a loaded machine takes long to import torch

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
ENVIRONMENT["PYTHONFAULTHANDLER"] = "1"

# `weft serve` with another way to load the model: argv is the settings and the loader's name.
_WITH_LOADER = """
import msgspec, sys
from weft.errors import WeftError
from weft.serving.config import logs
from weft.serving.api.server import serve
from weft.serving.config.settings import EngineConfig, ServerConfig

engine = msgspec.json.decode(sys.argv[1], type=EngineConfig)
server = msgspec.json.decode(sys.argv[2], type=ServerConfig)
logs.configure(engine.log_format)
try:
    sys.exit(serve(engine, server, runner_factory=sys.argv[3]))
except WeftError as error:
    sys.exit(f"weft: error: {error}")
"""


def load_when_told(config: EngineConfig, progress: Progress) -> LoadedModel:
    """A loader: the mock model, once there is a file "go" in the model's directory.

    It makes a file "loads" there when it is called.
    """
    (Path(config.model) / "loads").touch()
    while not (Path(config.model) / "go").exists():
        time.sleep(0.01)
    return mock_runner.load(config, progress)


@dataclass
class Server:
    """A running server.

    Attributes:
        url: "http://127.0.0.1:PORT".
        model: its name in the API.
        process: of the HTTP server; the engine is a child of it.
        log: the file that its stderr goes to.
        http: a client for `url`.
    """

    url: str
    model: str
    process: subprocess.Popen[bytes]
    log: Path
    http: httpx.Client

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.url.rpartition(":")[2])

    def processes(self) -> list[psutil.Process]:
        """It, and those that it has started."""
        front = psutil.Process(self.process.pid)
        return [front, *front.children(recursive=True)]

    def ask(self, body: dict[str, Any], **headers: str) -> socket.socket:
        """A socket on which a completion has been asked for, with headers that have no hyphens."""
        content = json.dumps(body).encode()
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            b"content-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
            % (more, len(content))
            + content
        )
        return connection

    def raw(self, data: bytes) -> bytes:
        """What it answers to bytes on a socket; it may hang up before it has read them all."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT) as connection:
            answer = b""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while chunk := connection.recv(65536):
                    answer += chunk
            return answer

    def metric(self, name: str) -> float:
        """The value of a metric without labels but the model's, such as "requests_running"."""
        text = self.http.get("/metrics").text
        found = re.search(rf"^weft_{name}\{{[^}}]*\}} (\S+)$", text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def wait_until_said(self, text: str, times: int = 1) -> None:
        """Wait for something to be in its log, so many times."""
        deadline = time.monotonic() + TIMEOUT
        while (log := self.log.read_text()).count(text) < times:
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.02)

    def wait_until(self, name: str, value: float) -> None:
        """Wait for a metric to have a value."""
        deadline = time.monotonic() + TIMEOUT
        while (seen := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {seen} and not {value}"
            time.sleep(0.01)


def free_port() -> int:
    """A port that nobody listens at, and that the system gives to nobody who asks for any port."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def start_server(
    model: Path | str,
    log: Path,
    *,
    loader: str | None = None,
    until: Literal["started", "healthy", "ready"] = "ready",
    python: Path = Path(sys.executable),
    environment: Mapping[str, str] = ENVIRONMENT,
    **settings: Any,
) -> Iterator[Server]:
    """Start a server, and end it with SIGTERM if it still runs.

    Args:
        model: a checkpoint's directory, or another model argument for `weft serve`.
        log: a directory for the server's stderr, and to run it in.
        loader: "module:function" that stands in for loading a model; may be in tests/.
        until: what to wait for: the process, /health (for which `port` must be set), or that
            requests are served.
        python: of the environment that weft is installed in.
        environment: variables, all of them.
        settings: as `weft serve` has them, with underscores; `port` is a free one by default.
    """
    settings = {"port": 0, "threads": 1} | settings
    url = f"http://127.0.0.1:{settings['port']}"
    file = log / f"server-{time.monotonic_ns()}.log"
    with file.open("wb") as stderr:
        process = subprocess.Popen(
            [str(python), *_arguments(model, loader, settings)],
            cwd=log,
            stderr=stderr,
            stdout=stderr,
            env=environment,
        )
    try:
        if until == "ready":
            url = _wait_ready(process, file)
        elif until == "healthy":
            _wait_healthy(process, file, url)
        with httpx.Client(base_url=url, timeout=TIMEOUT) as http:
            yield Server(url, Path(model).name, process, file, http)
    except Exception as error:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may be about to end
            process.wait(timeout=1)
        error.add_note(f"the server's exit code is {process.returncode}; it said:")
        error.add_note(file.read_text(errors="replace")[-10_000:])
        raise
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


def _arguments(model: Path | str, loader: str | None, settings: dict[str, Any]) -> list[str]:
    if loader is None:
        flags = [_flag(name, value) for name, value in settings.items()]
        return ["-m", "weft", "serve", str(model), *flags]
    of_server = {setting.name for setting in settings_of(ServerConfig)} & settings.keys()
    server = {name: settings[name] for name in of_server}
    engine = {name: settings[name] for name in settings.keys() - of_server} | {"model": str(model)}
    configs = [msgspec.json.encode(config).decode() for config in (engine, server)]
    return ["-c", _WITH_LOADER, *configs, loader]


def _flag(name: str, value: object) -> str:
    flag = "--" + name.replace("_", "-")
    return flag if value is True else f"{flag}={value}"


def _wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that the server prints when it is ready."""
    deadline = time.monotonic() + TIMEOUT
    while (found := re.search(r' at (https?://[^\s"]+)', log.read_text())) is None:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    return found[1]


def _wait_healthy(process: subprocess.Popen[bytes], log: Path, url: str) -> None:
    deadline = time.monotonic() + TIMEOUT
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                return
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
