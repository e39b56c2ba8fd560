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
    """Show the value of each setting, and where it was set; also MODEL's sampling defaults.

    Use the same flags and variables as for `weft serve`.

    \b
    weft config Qwen/Qwen3-0.6B
    WEFT_PORT=9000 weft config --config weft.toml --json
    """
    engine = settings.build(EngineConfig)
    settings.build(ServerConfig)
    shown = {name: asdict(value) for name, value in settings.without_secrets().items()}
    sampling = _sampling_defaults(engine)
    if as_json:
        print(json.dumps(shown | {"sampling_defaults": sampling}, indent=2))
        return 0
    _print(shown)
    if sampling is None:
        print(f"\nSampling defaults: {engine.model} is not on this machine yet")
    else:
        print("\nSampling defaults, for requests that leave them out")
        _print(sampling)
    return 0


def _sampling_defaults(engine: EngineConfig) -> dict[str, Any] | None:
    """Return value and source of each; None if the model has not been downloaded."""
    from weft.serving.engine.generation_config import load_generation_config
    from weft.serving.executor.fetch import is_here

    if not is_here(engine, weights=False):
        return None
    return load_generation_config(engine).described()


def _print(values: dict[str, dict[str, Any]]) -> None:
    for name, each in values.items():
        print(f"{name:<28} {_shown(each['value']):<24} {each['source']}")


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)
