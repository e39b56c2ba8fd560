"""benchmarks/engine.py measures real parts: the command as it is run, briefly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=800)


def measured(*arguments: str) -> list[dict[str, Any]]:
    done = run(*arguments, "--json", "--repetitions=2", "--seconds=0.1")
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def servers() -> set[int]:
    """Mock servers of this machine."""
    return {
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any("engine_parts.mock" in part for part in process.info["cmdline"] or ())
    }


def test_every_case_of_the_chosen_parts_has_its_row() -> None:
    rows = measured("kv_cache", "detokenizer")
    assert list(dict.fromkeys(row["part"] for row in rows)) == ["kv_cache", "detokenizer"]
    assert len({(row["part"], row["case"]) for row in rows}) == len(rows)
    for row in rows:
        assert len(row["values"]) == 2
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert (row["goal"] is None) == (row["reached"] is None)


@pytest.mark.slow
def test_the_api_is_measured_over_real_servers_that_end() -> None:
    before = servers()
    rows = measured("api")
    assert {row["unit"] for row in rows} == {"events/s", "tokens/s", "requests/s"}
    assert all(row["low"] > 0 for row in rows)
    assert servers() <= before


def test_goals_are_reached_from_their_own_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are to be low, rates high; the median counts."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from engine_parts.measure import Case, measure, render

    def rows(**goal: float) -> list[Any]:
        figures = iter([1.0, 7.0, 2.0])
        return measure("part", [Case("case", "us", lambda _: next(figures), **goal)], 3, 0.1)

    assert [rows(at_most=limit)[0].reached for limit in (1.9, 2.0)] == [False, True]
    assert [rows(at_least=limit)[0].reached for limit in (2.0, 2.1)] == [True, False]
    (row,) = rows()
    assert row.reached is None
    assert (row.low, row.median, row.high) == (1.0, 2.0, 7.0)
    assert render(rows(at_least=3.0)).endswith("2.00  1.00  7.00  us    at least 3  no")


def test_the_flame_graph_shows_what_was_measured(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "flame.svg"
    done = run("scheduler", "--repetitions=1", "--seconds=0.3", f"--flame={picture}")
    assert done.returncode == 0, done.stderr
    assert "256 decodes" in done.stdout
    assert "at most 200" in done.stdout
    text = picture.read_text()
    assert text.rstrip().endswith("</svg>")
    assert "_take_tokens" in text


def test_an_unknown_part_is_refused_by_name() -> None:
    done = run("scheduler", "kvcache")
    assert done.returncode == 2
    assert "'kvcache'" in done.stderr
    assert "kv_cache" in done.stderr
