"""Writes docs/config-fields.md: weft's treatment of each field in config.json.

python tools/config_fields.py          # write the file
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from weft.models.spec.config_table import (
    HARMLESS,
    HARMLESS_BY,
    ONLY,
    ONLY_BY,
    READ,
    READ_BY,
    READ_FOR_TEXT,
    ROPE_HARMLESS,
    ROPE_READ,
    effect,
    only,
    rope_effect,
)
from weft.models.spec.families.registry import ALL_FAMILIES
from weft.models.spec.quantization import METHODS

PAGE = Path(__file__).parent.parent / "docs/config-fields.md"

INTRODUCTION = """# Fields of config.json

weft runs a checkpoint as `transformers` does, or refuses it. This page has a row for each field in
`config.json`. `python tools/config_fields.py` writes it from
[config_table.py](../models/spec/config_table.py). Tests compare the table with weft's own reading
and with the source code in `transformers`.

Families have the names of `model_type`, or of `text_config.model_type` in models with vision. weft
then reads the fields in `text_config`.

| word | meaning |
| --- | --- |
| read | The field has an effect. An unsupported value is refused. |
| only ... | Any other value is refused. |
| refused | The field must be absent or `null`. |
| harmless | The field has no effect on answers. |

Other fields have no effect, in `transformers` as in weft. The log names them once at load. A
misspelt name has a suggestion: `rope_thetaa (did you mean rope_theta?)`. A field with the value
`null` counts as absent.

Sampling fields such as `temperature` count only without a `generation_config.json`; `eos_token_id`
counts if that file has none. weft does not read other arguments for `generate()`.
"""

NOT_READ = "-"

ROPE = """
## Inside rope_parameters and rope_scaling

These rows hold for all families. `partial_rotary_factor` must be `1` in families that do not read
it beside these objects either.
"""

OF_ALL = """
## Fields of all families

"""

OF_SOME = """
## Fields of some families

"""

QUANTIZATION = """
## Inside quantization_config

Each method has its own fields. [models.md](models.md#quantized-checkpoints) names the formats.
"""


def page() -> str:
    """The whole page."""
    families = [family.model_type for family in ALL_FAMILIES]
    by_family = set().union(*READ_BY.values(), *HARMLESS_BY.values(), *ONLY_BY.values())
    of_all, of_some = [], []
    for name in sorted(READ | READ_FOR_TEXT | HARMLESS | set(ONLY) | by_family):
        found: dict[str, list[str]] = {}
        for family in families:
            cell = _cell(effect(name, family), only(family).get(name, ()))
            found.setdefault(cell, []).append(f"`{family}`")
        if len(found) == 1:
            of_all.append([f"`{name}`", *found])
            continue
        for cell, those in found.items():
            rest = NOT_READ not in found and len(those) > len(families) // 2
            if cell != NOT_READ:
                of_some.append([f"`{name}`", cell, "the others" if rest else ", ".join(those)])
    rope_rows = [
        [f"`{name}`", _cell(rope_effect(name), ())] for name in sorted(ROPE_READ | ROPE_HARMLESS)
    ]
    quantization_rows = [
        [f"`{method}`", f"`{name}`", cell]
        for method, fields in METHODS.items()
        for name, cell in sorted(
            {
                **dict.fromkeys(fields.fields, "read"),
                **{name: _cell("only", allowed) for name, allowed in fields.only.items()},
                **dict.fromkeys(fields.harmless, "harmless"),
            }.items()
        )
    ]
    tables = (
        OF_ALL + _table(["field", "effect"], of_all),
        OF_SOME + _table(["field", "effect", "families"], of_some),
        ROPE + "\n" + _table(["field", "effect"], rope_rows),
        QUANTIZATION + "\n" + _table(["method", "field", "effect"], quantization_rows),
    )
    return INTRODUCTION + "".join(tables)


def _cell(effect: str, allowed: Iterable[object]) -> str:
    if effect == "only":
        values = [f"`{_json(value)}`" for value in allowed if value != 1 or isinstance(value, int)]
        return f"only {', '.join(values)}" if values else "refused"
    return NOT_READ if effect == "unknown" else effect


def _json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page())
