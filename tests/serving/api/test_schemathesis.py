"""Requests that Schemathesis makes up of /openapi.json, with all of its checks on.

Some are as the document says, and must be accepted; in others something is wrong, which must be
refused. What a document cannot say is in support/schemathesis_hooks.py. The server has an API key,
so that every operation is asked without it, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.schemathesis_hooks import MODEL
from support.server import ENVIRONMENT, TIMEOUT, start_server

from weft.models.checkpoint.locate import locate

KEY = "a-key-for-schemathesis"


def run(folder: Path, *options: str) -> str:
    """What `schemathesis run` says of a server whose answers are short; fails with that."""
    settings = {"max_model_len": 64, "max_num_seqs": 32, "api_key": KEY}
    key = f"--header=Authorization: Bearer {KEY}"
    with start_server(locate(MODEL), folder, **settings) as server:
        document = f"{server.url}/openapi.json"
        command = (sys.executable, "-m", "schemathesis.cli", "run", document, key, *options)
        done = subprocess.run(
            [*command, "--checks=all", "--no-color", f"--request-timeout={TIMEOUT}"],
            cwd=folder,
            env=ENVIRONMENT | {"SCHEMATHESIS_HOOKS": "support.schemathesis_hooks"},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_some_of_every_operation(tmp_path: Path) -> None:
    """The same requests each time."""
    said = run(
        tmp_path, "--phases=fuzzing,stateful", "--max-examples=4", "--generation-deterministic"
    )
    assert re.search(r"Selected: (\d+)/\1\s+Tested: \1\n", said), said


@pytest.mark.slow
def test_many_of_every_operation(tmp_path: Path) -> None:
    """Others each time; the boundaries of every field, too."""
    run(tmp_path, "--max-examples=100", "--generation-database=none", "--continue-on-failure")
