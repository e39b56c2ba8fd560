"""Settings, declared as dataclass fields in settings.py: name, type, default, help and range.

A setting's flag, file key and environment variable derive from the field's name. Its value is
parsed and checked here, whatever its source.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, fields
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from weft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Help:
    """Help text and valid range for a field.

    Attributes:
        text: one line of help.
        ge, gt, le: lower bound, exclusive lower bound, upper bound.
        unit: "bytes" allows values such as 512M or 4GiB (powers of 1024).
        secret: never show the value.
    """

    text: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    unit: Literal["bytes"] | None = None
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One field in a configuration dataclass. `type` excludes the `Help` annotation."""

    name: str
    type: Any
    default: Any
    help: Help

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> str:
        """Description of valid values, in words."""
        if self.help.unit == "bytes":
            return "a number of bytes, such as 512M or 4GiB"
        if get_origin(self.type) is Literal:
            return "one of " + ", ".join(get_args(self.type))
        plain = next(t for t in get_args(self.type) or (self.type,) if t is not NoneType)
        return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[plain]

    def parse(self, text: str, source: str) -> Any:
        """Parse a value from text.

        Args:
            text: the value as written by the user.
            source: flag, file key or environment variable, for error messages.

        Raises:
            ConfigError: see `check`.
        """
        try:
            if self.kind == "an integer" and re.fullmatch(r"-?\d+|null", text) is None:
                raise ValueError(f"{text!r} is not an integer")  # msgspec would take 2.0
            value = (
                parse_bytes(text)
                if self.help.unit == "bytes"
                else msgspec.convert(text, self.type, strict=False)
            )
        except ValueError:
            raise ConfigError(f"{source} is {text!r}; it must be {self.kind}") from None
        self.check(value, source)
        return value

    def check(self, value: Any, source: str) -> None:
        """Check a value's type and range.

        Raises:
            ConfigError: they are wrong. The message names the source.
        """
        try:
            msgspec.convert(value, self.type)
        except msgspec.ValidationError:
            raise ConfigError(f"{source} is {value!r}; it must be {self.kind}") from None
        if value is None:
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{source} is {value}; it must be a finite number")
        for word, limit, holds in (
            ("at least", self.help.ge, operator.ge),
            ("above", self.help.gt, operator.gt),
            ("at most", self.help.le, operator.le),
        ):
            if limit is not None and not holds(value, limit):
                raise ConfigError(f"{source} is {value}; it must be {word} {limit}")


def settings_of(config: type[Any]) -> list[Setting]:
    """List the settings in a dataclass: its fields with a `Help` annotation, in their order."""
    hints = get_type_hints(config, include_extras=True)
    settings = []
    for each in fields(config):
        if get_origin(hints[each.name]) is Annotated:
            plain, help = get_args(hints[each.name])
            settings.append(Setting(each.name, plain, each.default, help))
    return settings


def check(config: Any) -> None:
    """Check all settings in a dataclass instance.

    Raises:
        ConfigError: a value is invalid. The message names the flag.
    """
    for setting in settings_of(type(config)):
        setting.check(getattr(config, setting.name), setting.flag)


def parse_bytes(text: str) -> int:
    """Parse a byte count such as `4G`, `512MiB` or `1073741824`.

    K, M, G and T are powers of 1024.

    Raises:
        ValueError: the text is not such a number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:iB)?)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a number of bytes")
    number, unit = match.groups()
    return int(float(number) * 1024 ** (" KMGT".index(unit) if unit else 0))
