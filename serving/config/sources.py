"""Sources for settings, in rising precedence: default, configuration file, environment, flag.

A setting is a dataclass field in settings.py. All its names derive from the field's name: key
`max_queue`, variable `WEFT_MAX_QUEUE`, flag `--max-queue`. An unknown name is an error that names
the nearest known name. Only cli/ reads argv and the environment; it passes them in.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from weft.errors import ConfigError
from weft.serving.config.fields import Setting, settings_of
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.config.vllm_names import ADVICE, VALUES, weft_arguments

Config = TypeVar("Config", EngineConfig, ServerConfig)

PREFIX = "WEFT_"
FILE_VARIABLE = "WEFT_CONFIG"
SETTINGS: dict[str, Setting] = {
    setting.name: setting
    for config in (EngineConfig, ServerConfig)
    for setting in settings_of(config)
}


@dataclass(frozen=True, slots=True)
class Value:
    """One setting's effective value, with its source (a flag, variable, file key or default)."""

    value: Any
    source: str


class Settings(dict[str, Value]):
    """Effective values by setting name."""

    def build(self, config: type[Config]) -> Config:
        """Build the configuration dataclass for the engine or the server."""
        return config(**{setting.name: self[setting.name].value for setting in settings_of(config)})

    def without_secrets(self) -> Settings:
        """Return a copy to show, with secrets replaced by "(set)"."""
        return Settings(
            {
                name: Value("(set)", each.source)
                if SETTINGS[name].help.secret and each.value is not None
                else each
                for name, each in self.items()
            }
        )


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Settings:
    """Combine the sources.

    Args:
        flags: field name -> text or value, for the given flags.
        environment: all environment variables. Only names with the prefix WEFT_ are used.
        file: a TOML file; by default the one named by WEFT_CONFIG.

    Raises:
        ConfigError: a name is unknown, a value is invalid, or the file cannot be read.
    """
    if file is None and FILE_VARIABLE in environment:
        file = Path(environment[FILE_VARIABLE])
    settings = Settings({name: Value(s.default, "default") for name, s in SETTINGS.items()})
    for layer in (_from_file(file), _from_environment(environment), _from_flags(flags)):
        for name, (raw, source) in layer.items():
            settings[name] = Value(_parse(SETTINGS[name], raw, source), source)
    return settings


def from_arguments(arguments: Mapping[str, Any]) -> EngineConfig:
    """Build the engine's settings from Python keyword arguments.

    Raises:
        ConfigError: a name is unknown, or a value is invalid.
    """
    known = {setting.name: setting for setting in settings_of(EngineConfig)}
    arguments = weft_arguments(arguments)
    for name in arguments:
        if name not in known:
            flag = "--" + name.replace("_", "-")
            advice = f": {ADVICE[flag]}" if flag in ADVICE else _nearest(name, known)
            raise ConfigError(f"there is no setting {name!r}{advice}")
    return EngineConfig(**{name: _parse(known[name], raw, name) for name, raw in arguments.items()})


def _parse(setting: Setting, raw: Any, source: str) -> Any:
    if isinstance(raw, str):
        return setting.parse(VALUES.get(setting.name, {}).get(raw, raw), source)
    setting.check(raw, source)
    return raw


Layer = dict[str, tuple[Any, str]]  # field name -> raw value, source


def _from_file(file: Path | None) -> Layer:
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file} is not TOML: {error}") from None
    for key in table:
        if key not in SETTINGS:
            raise ConfigError(f"{file}: unknown key {key!r}{_nearest(key, SETTINGS)}")
    return {key: (raw, f"{key} in {file}") for key, raw in table.items()}


def _from_environment(environment: Mapping[str, str]) -> Layer:
    variables = {PREFIX + name.upper(): name for name in SETTINGS}
    layer: Layer = {}
    if PREFIX + "SERVICE_HOST" in environment:
        raise ConfigError(
            "Kubernetes has set variables for a Service named weft (WEFT_SERVICE_HOST, WEFT_PORT), "
            "which weft would take for settings: set enableServiceLinks: false in the pod"
        )
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == FILE_VARIABLE:
            continue
        if variable not in variables:
            known = [each.removeprefix(PREFIX) for each in (*variables, FILE_VARIABLE)]
            near = _nearest(variable.removeprefix(PREFIX), known, PREFIX)
            raise ConfigError(f"unknown environment variable {variable}{near}")
        layer[variables[variable]] = (text, variable)
    return layer


def _from_flags(flags: Mapping[str, Any]) -> Layer:
    return {name: (raw, SETTINGS[name].flag) for name, raw in flags.items()}


def _nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Suggest the nearest known name, if there is one, with a prefix that all have."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {prefix}{near[0]}?" if near else "; see `weft config` for all"
