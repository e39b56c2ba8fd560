"""The page about pairs of features is up to date, and has no empty cell."""

from __future__ import annotations

import ast

import feature_table
import pytest


@pytest.fixture(scope="module")
def cells() -> feature_table.Cells:
    return feature_table.cells()


def test_each_pair_works_or_is_refused(cells: feature_table.Cells) -> None:
    assert [pair for pair, cell in cells.of_pair.items() if not cell] == [], "see docs/features.md"


def test_the_page_is_up_to_date(cells: feature_table.Cells) -> None:
    written = feature_table.PAGE.read_text()
    assert written == feature_table.page(cells), "run tools/feature_table.py"


def test_a_new_feature_has_empty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    features = feature_table.FEATURES
    monkeypatch.setattr(feature_table, "FEATURES", features | {"drafts": "drafts"})
    empty = [pair for pair, cell in feature_table.cells().of_pair.items() if not cell]
    assert empty == [(name, "drafts") for name in features]


def test_a_refusal_that_is_gone_is_noticed() -> None:
    accepted = feature_table.Refusal((("cpu", "tp"),), lambda: None)
    with pytest.raises(AssertionError, match="are not refused"):
        _ = accepted.message


SOURCE = """
WORDS = ("seed", "n")

@pytest.mark.features("tp", *WORDS)
@pytest.mark.parametrize(
    "x",
    [
        pytest.param(1, id="one", marks=pytest.mark.features("ep", "pp")),
        pytest.param(2, id="two", marks=[pytest.mark.features("cp", "pp"), pytest.mark.slow]),
    ],
)
def test_a(x): ...
"""


def test_marks_are_read_from_decorators_and_cases() -> None:
    assert list(feature_table.marks(ast.parse(SOURCE))) == [
        ("test_a", ["tp", "seed", "n"]),
        ("test_a[one]", ["ep", "pp"]),
        ("test_a[two] (slow)", ["cp", "pp"]),
    ]
    with pytest.raises(AssertionError, match="no features: \\['tpp'\\]"):
        feature_table.pairs_of(["tpp", "tp"])


def test_a_fast_test_with_few_other_features_is_named() -> None:
    found = {
        "slow (slow)": [["tp", "seed"]],
        "wide": [["tp", "seed", "n"]],
        "narrow": [["tp", "n"]],
    }
    assert feature_table.shown_by(found) == {
        ("tp", "n"): "narrow",
        ("tp", "seed"): "wide",
        ("n", "seed"): "wide",
    }
