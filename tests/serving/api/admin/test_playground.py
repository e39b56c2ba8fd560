"""The page at / as HTTP sees it; what browsers see is tested in test_playground_in_chromium.py."""

from __future__ import annotations

import re
from pathlib import Path

import httpx

from weft.serving.api.admin import playground
from weft.serving.api.app import build_app
from weft.serving.api.state import ServerState

MAX_SIZE = 80_000  # bytes in all files but marked's


def test_the_headers_allow_nothing_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    files = set(re.findall(r'(?:src|href)="(static/[^"]+)"', page.text))
    assert {f"/{file}" for file in files} < playground.PATHS
    for path in playground.PATHS:
        answer = http.get(path)
        assert answer.status_code == 200
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        etag = {"if-none-match": answer.headers["etag"]}
        assert http.get(path, headers=etag).status_code == 304
    assert http.get("/static/none.js").json()["error"]["code"] == "not_found"


def test_the_page_is_small() -> None:
    folder = Path(playground.__file__).parent / "static"
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    assert sizes.pop("marked.js") < 60_000
    assert sum(sizes.values()) < MAX_SIZE


def test_no_script_of_the_page_parses_html() -> None:
    folder = Path(playground.__file__).parent / "static"
    for file in set(folder.glob("*.js")) - {folder / "marked.js"}:
        source = file.read_text()
        for sink in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "DOMParser",
            "eval(",
            "srcdoc",
        ):
            assert sink not in source, file.name


async def test_there_can_be_none() -> None:
    transport = httpx.ASGITransport(build_app(ServerState("m", page=False)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for path in playground.PATHS:
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/health")).status_code == 200
