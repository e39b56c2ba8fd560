"""A download's progress: a bar on a terminal, else lines."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

import pytest

from weft.serving.config import progress
from weft.serving.config.progress import ByteProgress

MIB = 2**20


def test_lines_have_bytes_rate_and_remaining_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ByteProgress("download owner/name") as shown:
        now += 50  # waiting for the hub does not count
        shown.set(2 * MIB, 12 * MIB)  # 2 MiB were here before
        now += progress.LINE_EVERY / 2
        shown.set(3 * MIB, 12 * MIB)
        now += progress.LINE_EVERY / 2
        shown.set(7 * MIB, 12 * MIB)
    assert capsys.readouterr().err.splitlines() == [
        "download owner/name: 12.0 MiB",
        "download owner/name: 7.0 MiB of 12.0 MiB, 512.0 KiB/s, 10 s left",
    ]


def test_a_terminal_shows_a_bar_with_bytes_and_remaining_time() -> None:
    code = (
        "from weft.serving.config.progress import ByteProgress\n"
        "with ByteProgress('download owner/name') as shown:\n"
        "    shown.set(0, 4_000_000)\n"
        "    shown.set(4_000_000, 4_000_000)\n"
    )
    ours, theirs = os.openpty()
    terminal = {"TERM": "xterm", "COLUMNS": "120"}
    with os.fdopen(ours, "rb", buffering=0) as screen:
        with os.fdopen(theirs, "wb") as end:
            done = subprocess.run(
                [sys.executable, "-c", code], stderr=end, env=os.environ | terminal
            )
        assert done.returncode == 0
        shown = bytearray()
        with suppress(OSError):  # at the end, for the other side is closed
            while piece := screen.read(100_000):  # some of what is there
                shown += piece
    text = shown.decode()
    assert "download owner/name" in text
    assert "4.0/4.0 MB" in text
    assert "0:00:00" in text
