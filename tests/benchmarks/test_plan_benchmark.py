"""benchmarks/plan.py times real steps, and its page comes from the samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "plan.py"


def run(*arguments: str | Path) -> str:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_steps_are_timed_and_the_page_is_made_from_them(tmp_path: Path) -> None:
    samples = tmp_path / "run.json"
    page = run("--quick", "--json", samples)
    found = json.loads(samples.read_text())
    (server,) = found["servers"]
    for step in server["steps"]:
        case, batch = step["case"], step["batch"]
        assert (batch["decodes"], batch["prefills"]) == (case["decodes"], case["prompts"])
        assert batch["prefill_tokens"] == case["prompts"] * case["tokens"]
        assert batch["decode_context"] == (case["context"] if case["decodes"] else 0)
        assert step["seconds"] > 0
    assert found["limits"]["gemm"] > 0
    held_out = len(server["steps"]) // 2
    assert f"| weft-demo, tp 1 | {held_out} |" in page
    assert page.count("| weft-demo, tp 1 |") == 1 + held_out
    assert run("--render", samples) == page
