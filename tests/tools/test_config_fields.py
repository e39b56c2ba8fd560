"""The page about config.json's fields has a row for each field, from the table in the code."""

from __future__ import annotations

import config_fields


def test_the_page_is_up_to_date() -> None:
    assert config_fields.PAGE.read_text() == config_fields.page(), "run tools/config_fields.py"


def test_cells_say_what_happens() -> None:
    rows = {line.split(" | ")[0]: line for line in config_fields.page().splitlines()}
    assert rows["| `mlp_bias`"] == "| `mlp_bias` | read | - | - | - | - | - |"
    assert rows["| `is_causal`"] == f"| `is_causal` |{' only `true` |' * 6}"
    assert rows["| `sliding_window`"] == f"| `sliding_window` | refused |{' read |' * 5}"
    assert rows["| `partial_rotary_factor`"].startswith("| `partial_rotary_factor` | only `1` |")
