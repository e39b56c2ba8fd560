"""A hub over HTTP, with Hugging Face's routes for downloads, and its faults.

    with Hub() as hub:
        hub.add("owner/name", folder)
        environment = hub.environment(cache)

Sources: huggingface_hub's `HfApi.model_info` and `hf_hub_download`, and the public hub's replies.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

FAR = 4_000_000_000
"""Seconds since 1970 at which tokens of Xet storage expire."""


@dataclass
class Repository:
    """A model on the hub.

    Attributes:
        files: name -> content.
        commit: its only commit.
        token: the token to see it; None for a public model.
        gated: the status for its files without consent; 0 if they need none.
        forbidden: no token may see it.
        xet: file -> its name in Xet storage; such files do not come over HTTP.
        cas: the Xet storage's address.
    """

    files: dict[str, bytes]
    commit: str
    token: str | None = None
    gated: int = 0
    forbidden: bool = False
    xet: dict[str, str] = field(default_factory=dict)
    cas: str = ""

    def move_to_xet(self, store: Path) -> None:
        """Put the weights into Xet storage in a folder, as the public hub does."""
        from hf_xet import XetSession

        self.cas = f"local://{store}"
        store.mkdir()
        with XetSession().new_upload_commit(
            endpoint=self.cas, token="write", token_expiry_unix_secs=FAR
        ) as commit:
            uploads = {
                name: commit.start_upload_bytes(content)
                for name, content in self.files.items()
                if name.endswith(".safetensors")
            }
        self.xet = {name: upload.result().xet_info.hash for name, upload in uploads.items()}


@dataclass
class Hub:
    """A server on its own port, from `with` to its end.

    Attributes:
        url: its address.
        models: id -> repository.
        requests: request counts, by method and path.
        sent: sent content bytes, by file.
        cuts: file -> how many answers end in the middle, with the connection.
        wrong: files to send with one changed byte.
        short: files to send without their last byte.
        held: files to stop after half their bytes, until `gate` is set.
        waiting: set when such an answer has stopped.
    """

    models: dict[str, Repository] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    wrong: set[str] = field(default_factory=set)
    short: set[str] = field(default_factory=set)
    held: set[str] = field(default_factory=set)
    gate: threading.Event = field(default_factory=threading.Event)
    waiting: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        hub = self

        class Handler(_Handler):
            owner = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def add(self, name: str, folder: Path, **options: Any) -> Repository:
        """Offer a folder's files as a model; returns it, to be changed."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        commit = hashlib.sha1(name.encode() + b"".join(files.values())).hexdigest()
        self.models[name] = Repository(files, commit, **options)
        return self.models[name]

    def environment(self, home: Path, **more: str) -> dict[str, str]:
        """Return the environment variables for huggingface_hub: this hub, and a separate cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
        } | more


class _Handler(BaseHTTPRequestHandler):
    owner: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.owner.requests[f"{self.command} {path}"] += 1
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["xet-read-token"]:
            self._token("/".join(parts[2:4]))
        elif parts[:2] == ["api", "models"]:
            self._model("/".join(parts[2:4]), parts[4:])
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "EntryNotFound")

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.owner.models.get(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token and given != repository.token):
            # The public hub does not tell strangers whether a model exists.
            self._refuse(401 if not given else 404, "RepoNotFound")
            return None
        if repository.forbidden:
            self._refuse(403, "")
            return None
        if revision not in ("main", "v1", repository.commit):
            self._refuse(404, "RevisionNotFound")
            return None
        return repository

    def _model(self, name: str, rest: list[str]) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        if (repository := self._repository(name, revision)) is None:
            return
        siblings = []
        for file, content in repository.files.items():
            entry: dict[str, Any] = {
                "rfilename": file,
                "size": len(content),
                "blobId": _git(content),
            }
            if file.endswith(".safetensors"):
                digest = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        body = {"_id": name, "id": name, "sha": repository.commit, "siblings": siblings}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _token(self, name: str) -> None:
        headers = {
            "X-Xet-Cas-Url": self.owner.models[name].cas,
            "X-Xet-Access-Token": "read",
            "X-Xet-Token-Expiration": str(FAR),
        }
        self._send(200, b"{}", headers)

    def _file(self, name: str, revision: str, file: str) -> None:
        if (repository := self._repository(name, revision)) is None:
            return
        if repository.gated:
            self._refuse(repository.gated, "GatedRepo")
            return
        if (content := repository.files.get(file)) is None:
            self._refuse(404, "EntryNotFound")
            return
        is_lfs = file.endswith(".safetensors")
        etag = hashlib.sha256(content).hexdigest() if is_lfs else _git(content)
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": repository.commit,
            "Accept-Ranges": "bytes",
        }
        headers["X-Linked-Size"] = str(len(content))
        if (xet := repository.xet.get(file)) is not None:
            route = f"{self.owner.url}/api/models/{name}/xet-read-token/{revision}"
            headers |= {"X-Xet-Hash": xet, "X-Xet-Refresh-Route": route}
        if file in self.owner.wrong:
            content = content[:-1] + bytes([content[-1] ^ 1])
        if file in self.owner.short:
            content = content[:-1]
        status, begin = 200, 0
        if (asked := self.headers.get("Range")) is not None:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            status = 206
        self._send(status, content[begin:], headers, file)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(body) // 2 if file.endswith(".safetensors") else 0
        self._write(body[:half], file)
        if file in self.owner.held and not self.owner.gate.is_set():
            self.owner.waiting.set()
            self.owner.gate.wait()
        if half and self.owner.cuts[file] > 0:
            self.owner.cuts[file] -= 1
            self.close_connection = True
            return
        self._write(body[half:], file)

    def _write(self, data: bytes, file: str) -> None:
        try:
            self.wfile.write(data)
        except OSError:  # the client has gone
            self.close_connection = True
            return
        if file:
            self.owner.sent[file] += len(data)


def _git(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
