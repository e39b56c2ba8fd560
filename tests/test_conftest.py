"""Tests run where plugins are missing, as on a machine with GPUs and without an index."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
MISSING = ("asyncio", "timeout", "randomly", "xdist")


def test_tests_run_without_plugins() -> None:
    without = [part for plugin in MISSING for part in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, "tests/models/plan/test_batch.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
