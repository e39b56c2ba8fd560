"""Agent loops by the clients for JavaScript: OpenAI's, Anthropic's, and Vercel's `ai`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.echo_runner import THOUGHT
from support.server import Server
from support.tool_loop import ANSWER, BOTH, FUNCTIONS, PARALLEL, QUESTION

LOOPS = Path(__file__).parent / "node" / "loops.mjs"
INSTALLED = Path(__file__).parents[3] / "build" / "clients" / "node"

CLIENTS = (
    "openai chat",
    "openai runTools",
    "openai responses",
    "anthropic messages",
    "ai openai-compatible",
    "ai openai chat",
    "ai openai responses",
)
THINKS = {"ai openai-compatible"}
"""Clients that show the model's thought beside the answer."""

pytestmark = pytest.mark.skipif(
    not (INSTALLED / ".installed").exists(),
    reason="`make test` installs clients for JavaScript if npm is there and finds its registry",
)


@pytest.mark.parametrize(("question", "answer"), [(QUESTION, ANSWER), (PARALLEL, BOTH)])
def test_loops(scripted: Server, key: str, question: str, answer: str) -> None:
    given = {"url": scripted.url, "key": key, "question": question, "functions": FUNCTIONS}
    # The script comes by stdin, so that node finds the packages in the current folder.
    done = subprocess.run(
        ["node", "--input-type=module", "-", json.dumps(given)],
        input=LOOPS.read_text(),
        cwd=INSTALLED,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    expected = {
        name + ending: f"{THOUGHT} {answer}" if name in THINKS else answer
        for name in CLIENTS
        for ending in ("", ", streamed")
    }
    assert json.loads(done.stdout) == expected
