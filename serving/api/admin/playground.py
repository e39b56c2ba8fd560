"""GET / and /docs: a page to try the server, and one with its routes.

Both make requests only to this server.

The pages (static/) are plain HTML, CSS and JavaScript modules; the files are read once and served
from memory. The headers allow a page only its own files and this server's API: no inline script or
style, no other host, no frame around it. static/markdown.js turns the answers' Markdown into DOM
nodes; the headers refuse any HTML text instead of nodes. static/marked.js is marked from npm (MIT).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import APIRouter, Request, Response

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers ask each time, and get a 304
}
_PAGES = {"index.html": "/", "docs.html": "/docs"}
_FILES = {_PAGES.get(file.name, f"/static/{file.name}"): file for file in sorted(_FOLDER.iterdir())}

PATHS = frozenset(_FILES)
"""The paths of the page's files; nothing in them is secret."""

router = APIRouter()


def _add(path: str, file: Path) -> None:
    body = file.read_bytes()
    etag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    headers = _HEADERS | {"etag": etag}
    media_type = _TYPES[file.suffix]

    @router.head(path, include_in_schema=False)
    @router.get(path, include_in_schema=False)
    async def answer(request: Request) -> Response:
        if request.headers.get("if-none-match") == etag:
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=media_type)


for _path, _file in _FILES.items():
    _add(_path, _file)
