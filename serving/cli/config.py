"""`weft config`: the value and the source of each setting."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from weft.errors import ModelError
from weft.models.memory.ledger import human_bytes
from weft.serving.cli.in_force import in_force
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.sources import SETTINGS, Settings


@click.command(cls=TopicCommand)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@takes(EngineConfig, ServerConfig, model=True)
def config(settings: Settings, as_json: bool) -> int:
    """Show the value of each setting, and where it was set; also MODEL's sampling defaults.

    Defaults that depend on the model or on this machine have their effective values.
    Use the same flags and variables as for `weft serve`.

    \b
    weft config Qwen/Qwen3-0.6B
    WEFT_PORT=9000 weft config --config weft.toml --json
    """
    engine = settings.build(EngineConfig)
    settings.build(ServerConfig)
    shown = in_force(settings.without_secrets(), engine)
    sampling, missing = _sampling_defaults(engine)
    if as_json:
        found = {name: asdict(value) for name, value in shown.items()}
        print(json.dumps(found | {"sampling_defaults": sampling}, indent=2))
        return 0
    for name, value in shown.items():
        _print(name, _with_unit(name, value.value), value.source)
    if sampling is None:
        print(f"\nSampling defaults: {missing}")
    else:
        print("\nSampling defaults, for requests that leave them out")
        for name, each in sampling.items():
            _print(name, each["value"], each["source"])
    return 0


def _sampling_defaults(engine: EngineConfig) -> tuple[dict[str, Any] | None, str]:
    """Return each default's value and source, or None and the reason."""
    from weft.serving.engine.generation_config import load_generation_config
    from weft.serving.executor.fetch import is_here

    try:
        if is_here(engine, weights=False):
            return load_generation_config(engine).described(), ""
    except ModelError as error:
        return None, str(error)
    return None, f"{engine.model} is not on this machine yet"


def _print(name: str, value: Any, source: str) -> None:
    print(f"{name:<28} {'-' if value is None else value!s:<24} {source}")


def _with_unit(name: str, value: Any) -> Any:
    is_size = SETTINGS[name].help.unit == "bytes" and isinstance(value, int)
    return human_bytes(value) if is_size else value
