"""benchmarks/hostile.py: its bodies match their names, and a short run works on a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from hostile import Figures, Row, measure
from hostile_bodies import CONTEXT, KINDS, Body, bodies, easy_schema, hard_schema
from support.checkpoints import make_checkpoint

from weft.errors import RequestError
from weft.serving.api.json_counts import count, limits

KIB = 1024
_COUNTED = ("text of escapes", "text of Chinese", "text of emoji")


@pytest.mark.parametrize("body", bodies("m", 100 * KIB), ids=lambda body: body.kind)
def test_each_body_is_json_of_the_size_that_is_asked_for(body: Body) -> None:
    content = json.loads(body.data)
    assert content["model"] == "m"
    assert len(content) > 1
    few = KINDS[body.kind].most * len(KINDS[body.kind].element) < 100 * KIB
    assert (20 * KIB if few else 90 * KIB) < len(body.data) <= 100 * KIB


@pytest.mark.parametrize("name", KINDS)
def test_bodies_of_a_few_elements_are_read(name: str) -> None:
    """The server counts the other bodies' values, and refuses them at once; a text is one value."""
    data = KINDS[name].body(16 * KIB * KIB, "m")
    if name.endswith(", few") or (name.startswith("text") and name not in _COUNTED):
        count(data, limits(CONTEXT))
    else:
        with pytest.raises(RequestError):
            count(data, limits(CONTEXT))


def test_hard_schemas_differ() -> None:
    assert hard_schema("m", 1).data != hard_schema("m", 2).data


def test_a_row_shows_the_median_and_the_worst() -> None:
    figures = [Figures(400, s, s / 10, s / 100, 2**20, 2**21) for s in (0.1, 0.5, 0.2)]
    row = Row("k", [*figures, Figures(0, 9.0, 0.0, 0.0, 2**20, 2**22)])
    assert row.cells() == [
        *("k", "1.0", "4", "3 x 400, 1 x 0", "0.35, 9.00", "15, 50", "2, 5", "4", "4.0")
    ]
    assert Row("nothing", [Figures(None, 0.0, 0.02, 0.01)]).cells() == [
        *("nothing", "", "", "", "", "20, 20", "10, 10", "", "")
    ]


async def test_a_short_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures mean nothing on a machine with other work."""
    monkeypatch.setattr("hostile.hard_schema", lambda model, i: easy_schema(model, "hard", f"{i}"))
    model = make_checkpoint(tmp_path / "tiny", "llama")
    arguments = [str(model), "--threads=1", "--kv-cache-memory=4M"]
    kinds = {"wrong: stop", "messages, few", "schemas"}
    async with asyncio.timeout(600):
        rows = measure(arguments, kinds.__contains__, mib=0.3, count=1, hard=2)
        found = {row.kind: row.figures async for row in rows}
    assert list(found) == [
        *("undisturbed", "a small request", "wrong: stop", "messages, few", "all kinds at once"),
        *("an easy schema", "an easy schema behind 2 hard ones"),
    ]
    assert [each.status for each in found["all kinds at once"]] == [400, 400]
    assert found["a small request"][0].status == 200
    for figures in found.values():
        assert all(each.gap > 0 and each.health > 0 for each in figures)
        assert all(each.status in (None, 200, 400) for each in figures)
