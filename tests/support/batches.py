"""`weft batch` in a process of its own, on a mock model with steps of 5 ms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.mock_runner import VOCAB_SIZE, expected
from support.server import ENVIRONMENT

SLOW = "support.mock_runner:load_slowly"

# argv is JSON: how `run` is called. It ends as the command line does.
_SCRIPT = """
import json, sys
from pathlib import Path
from weft.errors import WeftError
from weft.serving.cli.batch import run
from weft.serving.config.settings import EngineConfig, ServerConfig

call = json.loads(sys.argv[1])
engine = EngineConfig(**call.pop("engine"))
for name in ("output", "errors", "state"):
    if name in call:
        call[name] = Path(call[name])
sources = [Path(source) for source in call.pop("sources")]
try:
    sys.exit(run(engine, ServerConfig(), sources, call.pop("output"), **call))
except WeftError as error:
    sys.exit(f"weft: error: {error}")
"""


def start(
    model: Path, sources: list[Path | str], output: Path, **options: Any
) -> subprocess.Popen[str]:
    """Start it; its stderr is a pipe."""
    engine = {"model": str(model), "threads": 1, "max_num_seqs": 8, "prefix_caching": False}
    call = {
        "engine": engine,
        "sources": [str(source) for source in sources],
        "output": str(output),
        "runner_factory": SLOW,
    } | options
    return subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, json.dumps(call)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def write_rows(path: Path, count: int, tokens: int = 20) -> Path:
    """Simple rows, whose prompts are token ids that all differ."""
    with path.open("w") as file:
        for row in range(count):
            body = {"prompt": prompt(row), "max_tokens": 1 + row % tokens, "ignore_eos": True}
            file.write(json.dumps(body | {"id": row}) + "\n")
    return path


def prompt(row: int) -> list[int]:
    """Of the row: none of the tokens that the mock fails with."""
    digits = VOCAB_SIZE - 4
    return [1 + row % digits, 1 + row // digits % digits, 1 + row // digits**2]


def answer(row: int, tokens: int = 20) -> str:
    """What the mock writes for it."""
    output = expected(prompt(row), 1 + row % tokens, seed=row, ends=())
    return "".join(chr(33 + token) for token in output)


def check_output(output: Path, count: int) -> list[int]:
    """Each row is there once, with its answer; the rows in their order."""
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    rows = [line["id"] for line in lines]
    assert sorted(rows) == list(range(count))
    for line in lines:
        assert line["index"] == line["id"]
        assert line["text"] == answer(line["id"]), line
    return rows
