"""A disk that is soon full: a file system of a few kilobytes, mounted where that is allowed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest


@contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """A tmpfs of so many bytes; the test is skipped where mounting is not allowed."""
    with TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
            pytest.skip("only root can mount a file system")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)
