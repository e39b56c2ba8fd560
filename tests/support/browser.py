"""Debian's Chromium, for tests of pages; playwright's own browsers need a download."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None or find_spec("playwright") is None,
    reason="no Chromium or playwright here: apt-get install chromium; pip install playwright",
)


@contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    """A running Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(arguments))
        yield browser
        browser.close()
