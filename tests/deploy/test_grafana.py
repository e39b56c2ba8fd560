"""The dashboard: each of its queries is PromQL, of metrics and labels that a server has."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.server import Server, start_server
from support.tokenizers import write_byte_level

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "weft.json"
VARIABLES = {"$__rate_interval": "1m", "$model": ".*"}


def queries() -> list[str]:
    """Of all panels."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample in /metrics, once a server has had some requests."""
    path = tmp_path_factory.mktemp("metrics")
    model = write_byte_level(path / "mock")
    with start_server(model, path, loader="support.mock_runner:load") as server:
        ask(server)
        families = list(text_string_to_metric_families(server.http.get("/metrics").text))
    labels: dict[str, set[str]] = defaultdict(set)
    for family in families:
        names = {sample.name for sample in family.samples}
        assert family.type != "histogram" or f"{family.name}_bucket" in names
        for sample in family.samples:
            labels[sample.name] |= sample.labels.keys()
    return labels


def ask(server: Server) -> None:
    """Answers, and a refusal."""
    body = {"model": "mock", "prompt": [1, 2], "max_tokens": 4}
    for prompt, status in (([1, 2], 200), ([3, 4], 200), ([], 400)):
        response = server.http.post("/v1/completions", json=body | {"prompt": prompt})
        assert response.status_code == status


def parts(node: Any) -> Iterator[Any]:
    """A parsed expression, and what it is made of."""
    yield node
    for name in ("expr", "lhs", "rhs", "vector_selector", "vs", "param"):
        if (child := getattr(node, name, None)) is not None:
            yield from parts(child)
    for child in getattr(node, "args", None) or ():
        yield from parts(child)


@pytest.mark.parametrize("query", queries())
def test_a_query_is_answered(exposed: dict[str, set[str]], query: str) -> None:
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    selected: set[str] = set()
    grouped: set[str] = set()
    for part in parts(promql_parser.parse(query)):
        if isinstance(part, promql_parser.VectorSelector):
            selected.add(part.name)
            assert part.name in exposed
            assert {each.name for each in part.matchers.matchers} <= exposed[part.name]
        if isinstance(part, promql_parser.AggregateExpr) and part.modifier is not None:
            grouped |= set(part.modifier.labels)
    assert selected
    assert all(grouped <= exposed[name] for name in selected)


def test_legends_and_variables_name_labels(exposed: dict[str, set[str]]) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            names = [name for name in exposed if name in target["expr"]]
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert any(label in exposed[name] for name in names)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            assert label in exposed[name]


def test_every_metric_is_shown(exposed: dict[str, set[str]]) -> None:
    """But for what says the same in another way."""
    shown = " ".join(queries())
    for name in exposed:
        family = re.sub(r"_(bucket|count|sum|created)$", "", name)
        assert family in shown, name
