"""The `weft` command, with several command lines one after the other in one process.

It imports once what they all need; each of them may still end with a status of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_EACH = """
import contextlib, io, json, sys
{before}
from weft.serving.cli.main import main
for arguments in json.load(sys.stdin):
    sys.argv, out, err, status = ["weft", *arguments], io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            status = end.code
    print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def run_each(
    command_lines: Sequence[Sequence[object]], folder: Path, before: str = ""
) -> list[subprocess.CompletedProcess[str]]:
    """Run `weft ARGUMENTS` for each, in that folder; `before` is Python that runs ahead of them."""
    lines = [[str(argument) for argument in line] for line in command_lines]
    done = subprocess.run(
        [sys.executable, "-c", _EACH.format(before=before)],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=800,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    return [
        subprocess.CompletedProcess(line, *each) for line, each in zip(lines, told, strict=True)
    ]
