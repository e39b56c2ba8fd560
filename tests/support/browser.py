"""Debian's Chromium, for tests of pages; playwright's own browsers need a download."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_CHROMIUM = next(filter(None, map(shutil.which, _NAMES)), None)

needs_chromium = pytest.mark.skipif(
    _CHROMIUM is None, reason="no Chromium here; Debian has it: apt-get install chromium"
)


@contextmanager
def chromium(*arguments: str) -> Iterator[Browser]:
    """A running Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=list(arguments))
        yield browser
        browser.close()
