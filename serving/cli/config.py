"""`weft config`: the value and the source of each setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import Settings


@click.command(cls=TopicCommand)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, ServerConfig, model=True)
def config(settings: Settings, as_json: bool) -> int:
    """Show the value of each setting, and where it was set.

    Use the same flags and variables as for `weft serve`.

    \b
    weft config
    WEFT_PORT=9000 weft config --config weft.toml --json
    """
    settings.build(EngineConfig)
    settings.build(ServerConfig)
    shown = settings.without_secrets()
    if as_json:
        print(json.dumps({name: asdict(value) for name, value in shown.items()}, indent=2))
    else:
        for name, value in shown.items():
            print(f"{name:<24} {_shown(value.value):<24} {value.source}")
    return 0


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
