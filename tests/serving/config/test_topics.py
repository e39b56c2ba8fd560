"""Topics of settings: each setting has one, and docs/configuration.md describes it there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft.serving.cli.main import weft
from weft.serving.config.settings import TOPICS
from weft.serving.config.sources import SETTINGS

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def documented() -> dict[str, dict[str, str]]:
    """Heading -> setting -> the default that the table under the heading gives."""
    found: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", DOCUMENT.read_text(), flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", text, flags=re.MULTILINE)
        assert len(rows) == len(dict(rows)), f"a setting is twice under {heading}"
        if rows:
            found[heading] = dict(rows)
    return found


def test_each_setting_has_one_topic() -> None:
    names = [name for names in TOPICS.values() for name in names]
    assert sorted(names) == sorted(SETTINGS)


def test_each_setting_is_documented_under_its_topic() -> None:
    sections = documented()
    assert {topic: tuple(rows) for topic, rows in sections.items()} == TOPICS


def test_each_default_is_documented() -> None:
    for rows in documented().values():
        for name, shown in rows.items():
            default = SETTINGS[name].default
            if default is None:  # the document says in words what happens then
                assert shown not in ("None", "null", "true", "false"), name
            elif isinstance(default, bool):
                assert shown == str(default).lower(), name
            elif isinstance(default, str):
                assert shown.strip("`") == default, name
            else:
                assert float(shown) == default, name


@pytest.mark.parametrize("command", ["serve", "batch", "config", "generate", "join"])
def test_help_lists_flags_by_topic(command: str) -> None:
    context = weft.commands[command].make_context(command, [], resilient_parsing=True)
    text = weft.commands[command].get_help(context)
    headings = re.findall(r"^(\w.*):$", text, flags=re.MULTILINE)
    own = [heading for heading in headings if heading not in TOPICS]
    assert headings == [*own, *(topic for topic in TOPICS if topic in headings)]
    assert own[0] == "Options"
    for name, setting in SETTINGS.items():
        if any(param.name == name for param in weft.commands[command].params):
            shown = len(re.findall(rf"^  {setting.flag}\b(?!-)", text, flags=re.MULTILINE))
            assert shown == 1, name
