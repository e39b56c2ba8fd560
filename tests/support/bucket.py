"""Object storage over HTTP, with S3's and Google's requests for reading a bucket.

    with Storage() as storage:
        storage.objects["models/tiny/config.json"] = b"{}"
        environment = storage.environment()

Sources: Amazon S3's API reference, ListObjectsV2, HeadObject and GetObject; Google Cloud Storage's
JSON API, objects list and get.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_LIST = """<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>{bucket}</Name>
<Prefix>{prefix}</Prefix><KeyCount>{count}</KeyCount><MaxKeys>1000</MaxKeys>
<IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"""
_OBJECT = (
    "<Contents><Key>{key}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    "<ETag>&quot;{etag}&quot;</ETag><Size>{size}</Size><StorageClass>STANDARD</StorageClass>"
    "</Contents>"
)
_OF_GOOGLE = re.compile("(?:download/)?storage/v1/b/([^/]+)/o(?:/(.+))?")
_FOLDER = "<CommonPrefixes><Prefix>{prefix}</Prefix></CommonPrefixes>"


@dataclass
class Storage:
    """A server on its own port, from `with` to its end.

    Attributes:
        url: its address.
        objects: "BUCKET/KEY" -> content.
    """

    objects: dict[str, bytes] = field(default_factory=dict)

    def __enter__(self) -> Self:
        storage = self

        class Handler(_Handler):
            owner = storage

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self) -> dict[str, str]:
        """Return the environment variables to point s3fs and gcsfs to this server."""
        return {
            "STORAGE_EMULATOR_HOST": self.url,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
        }


class _Handler(BaseHTTPRequestHandler):
    owner: Storage
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        place, query = unquote(url.path).strip("/"), parse_qs(url.query)
        google = _OF_GOOGLE.fullmatch(place)
        if google is not None:
            place = "/".join(filter(None, google.groups()))
        prefix, delimiter = (query.get(name, [""])[0] for name in ("prefix", "delimiter"))
        if "list-type" in query:
            self._send(200, self._listing(place, prefix, delimiter).encode(), {})
            return
        if google is not None and google[2] is None:
            known = any(path.startswith(f"{place}/") for path in self.owner.objects)
            listing = self._google_listing(place, prefix, delimiter)
            self._send(200 if known else 404, listing.encode(), {})
            return
        if (content := self.owner.objects.get(place)) is None:
            self._send(404, b"<Error><Code>NoSuchKey</Code></Error>", {})
            return
        headers = {"ETag": f'"{_etag(content)}"', "Accept-Ranges": "bytes"}
        if (asked := self.headers.get("Range")) is None:
            self._send(200, content, headers)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or len(content)) + 1, len(content))
        headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
        self._send(206, content[begin:end], headers)

    do_HEAD = do_GET  # noqa: N815  # http.server's name for it

    def log_message(self, *_: object) -> None:
        pass

    def _listing(self, bucket: str, prefix: str, delimiter: str) -> str:
        entries: dict[str, str] = {}
        for path, content in sorted(self.owner.objects.items()):
            home, _, key = path.partition("/")
            if home != bucket or not key.startswith(prefix):
                continue
            folder, found, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if found:
                name = prefix + folder + delimiter
                entries[name] = _FOLDER.format(prefix=escape(name))
            else:
                entries[key] = _OBJECT.format(
                    key=escape(key), etag=_etag(content), size=len(content)
                )
        return _LIST.format(
            bucket=bucket, prefix=prefix, count=len(entries), entries="".join(entries.values())
        )

    def _google_listing(self, bucket: str, prefix: str, delimiter: str) -> str:
        items, folders = [], set()
        for path, content in sorted(self.owner.objects.items()):
            home, _, key = path.partition("/")
            if home != bucket or not key.startswith(prefix):
                continue
            folder, found, _ = key.removeprefix(prefix).partition(delimiter or "\0")
            if found:
                folders.add(prefix + folder + delimiter)
            else:
                items.append({"name": key, "bucket": bucket, "size": str(len(content))})
        return json.dumps({"items": items, "prefixes": sorted(folders)})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()
