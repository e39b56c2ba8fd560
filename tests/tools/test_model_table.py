"""The page about families and formats is up to date, and has no empty cell."""

from __future__ import annotations

import model_table
import pytest
from support.checkpoints import FAMILIES


@pytest.fixture(scope="module")
def cells() -> model_table.Cells:
    return model_table.cells()


def test_each_family_and_format_is_tested_or_refused(cells: model_table.Cells) -> None:
    every = cells.families | cells.formats
    assert [place for place, cell in every.items() if not cell] == [], "see docs/model-table.md"


def test_the_page_is_up_to_date(cells: model_table.Cells) -> None:
    assert model_table.PAGE.read_text() == model_table.page(cells), "run tools/model_table.py"


def test_each_family_has_checkpoints_to_test() -> None:
    assert model_table.families().keys() == FAMILIES.keys()


def test_a_new_family_has_empty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    families = model_table.families() | {"new": "LlamaForCausalLM"}
    monkeypatch.setattr(model_table, "families", lambda: families)
    empty = [place for place, cell in model_table.cells().families.items() if not cell]
    filled = {"CPU ep", "GPU ep", "TPU ep", "TPU cp", "TPU pp"}
    columns = [each for each in model_table.FAMILY_COLUMNS if each not in filled]
    assert empty == [("new", column) for column in columns]


@pytest.mark.parametrize("backend", model_table.BACKENDS)
def test_a_family_without_a_case_on_a_backend_has_empty_cells(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [case for case in model_table.family_cases() if case[:2] != ("qwen2", backend)]
    monkeypatch.setattr(model_table, "family_cases", lambda: cases)
    empty = {place for place, cell in model_table.cells().families.items() if not cell}
    assert ("qwen2", backend) in empty
    assert {family for family, _ in empty} == {"qwen2"}


def test_a_format_without_a_case_has_empty_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [case for case in model_table.format_cases() if case.what != "awq: awq"]
    monkeypatch.setattr(model_table, "format_cases", lambda: cases)
    empty = {row for (row, _), cell in model_table.cells().formats.items() if not cell}
    assert empty == {"awq: awq"}


def test_a_method_without_a_form_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.models.spec import quantization

    methods = quantization.METHODS | {"new": quantization.METHODS["fp8"]}
    monkeypatch.setattr(quantization, "METHODS", methods)
    model_table.format_rows.cache_clear()
    with pytest.raises(AssertionError, match=r"no form has \['new'\]"):
        model_table.format_rows()


def test_what_is_shown_cannot_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = model_table.Case("llama", "TPU", frozenset({"cp"}), "a")
    cases = [*model_table.family_cases(), case]
    monkeypatch.setattr(model_table, "family_cases", lambda: cases)
    with pytest.raises(AssertionError, match=r"shown and refused: \[\('llama', 'TPU cp'\)\]"):
        model_table.cells()


def test_a_refusal_that_is_gone_is_noticed() -> None:
    with pytest.raises(AssertionError, match="refuses nothing"):
        model_table.message_of(lambda: None)


@pytest.fixture
def decorated(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = pytest.mark.slow

    class Module:
        @pytest.mark.parametrize("a", [1, pytest.param(2, marks=slow, id="two")])
        @pytest.mark.parametrize(("b", "c"), [(3, 4), (5, 6)], ids=["x", "y"])
        def test() -> None:  # type: ignore[misc]
            pass

    monkeypatch.setattr(model_table, "module", lambda path: Module)


@pytest.mark.usefixtures("decorated")
def test_parameters_of_all_decorators_are_combined() -> None:
    assert list(model_table.parameters("", "test")) == [
        ({"b": 3, "c": 4, "a": 1}, "x", False),
        ({"b": 3, "c": 4, "a": 2}, "x-two", True),
        ({"b": 5, "c": 6, "a": 1}, "y", False),
        ({"b": 5, "c": 6, "a": 2}, "y-two", True),
    ]


def test_a_fast_test_in_few_layouts_is_named() -> None:
    one, two = frozenset({"tp"}), frozenset({"tp", "ep"})
    cases = [
        model_table.Case("m", "CPU", one, "alone", slow=True),
        model_table.Case("m", "CPU", two, "wide"),
    ]
    expected = dict.fromkeys([("m", "CPU"), ("m", "CPU tp"), ("m", "CPU ep")], "wide")
    assert model_table.shown_by(cases) == expected
    assert model_table.shown_by(cases[:1])["m", "CPU tp"] == "alone (slow)"
