"""The page about config.json's fields has a row for each field, from the table in the code."""

from __future__ import annotations

import config_fields


def test_the_page_is_up_to_date() -> None:
    assert config_fields.PAGE.read_text() == config_fields.page(), "run tools/config_fields.py"


def test_cells_say_what_happens() -> None:
    rows = config_fields.page().splitlines()
    assert "| `is_causal` | only `true` |" in rows
    assert "| `mlp_bias` | read | `llama`, `granite`, `hy_v3`, `seed_oss`, `smollm3` |" in rows
    assert "| `partial_rotary_factor` | only `1` | the others |" in rows
    assert "| `text_config` | refused |" in rows
