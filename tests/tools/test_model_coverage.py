"""The coverage of published models follows from the families and formats that weft has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import model_coverage as coverage
import pytest

from weft.models.spec.families.registry import ARCHITECTURES

TABLE = """# a comment
model\tneeds\tweight
Qwen/Qwen3-8B\t-\t3
Qwen/Qwen3-30B-A3B\t-\t2
zai-org/GLM-4.6\tPR SH SIG\t2
MiniMaxAI/MiniMax-M2\tF8B FQ PR SIG\t2
openai/gpt-oss-20b\tEB LT MX4 SINK YN\t1
"""


def test_a_model_needs_its_architecture_and_its_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "READS", frozenset())
    found = list(coverage.rows(TABLE.splitlines()))
    lacks = {row.model: row.lacks for row in found if row.lacks}
    assert lacks == {
        "MiniMaxAI/MiniMax-M2": "is in fp8",
        "openai/gpt-oss-20b": "needs EB LT MX4 SINK YN",
    }
    assert coverage.report(found).splitlines()[-2:] == [
        "in scope: 3 of 4 models, 78% by weight",
        "all: 3 of 5 models, 70% by weight",
    ]
    monkeypatch.setattr(coverage, "READS", frozenset({"fp8"}))
    assert "all: 4 of 5 models, 90% by weight" in coverage.report(
        list(coverage.rows(TABLE.splitlines()))
    )
    monkeypatch.setattr(coverage, "ARCHITECTURES", ("Qwen3ForCausalLM",))
    found = list(coverage.rows(TABLE.splitlines()))
    assert [row.lacks for row in found][2] == "is Glm4MoeForCausalLM"


def test_the_script_prints_it(tmp_path: Path) -> None:
    (tmp_path / "models.tsv").write_text(TABLE)
    command = [sys.executable, coverage.__file__, str(tmp_path / "models.tsv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"\nall: \d of 5 models, \d+% by weight\n$", done.stdout)


def test_the_documentation_has_each_architecture() -> None:
    page = (Path(coverage.__file__).parent.parent / "docs/models.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", page, re.M)
    assert set(listed) >= set(ARCHITECTURES)
