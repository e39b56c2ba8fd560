"""The code map has every module, with its first line."""

from __future__ import annotations

from pathlib import Path

import code_map


def test_the_code_map_is_up_to_date() -> None:
    assert code_map.PAGE.read_text() == code_map.page(), "run `make code-map`"


def test_every_module_says_what_it_is() -> None:
    silent = [str(path) for path in code_map.modules() if not code_map.first_line(path.read_text())]
    assert silent == []


def test_a_module_goes_to_the_folder_that_fits_best() -> None:
    assert code_map.section(Path("serving/api/app.py")) == "serving/api"
    assert code_map.section(Path("serving/llm.py")) == "serving"
