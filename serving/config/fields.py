"""What one setting is: the name, type, default, help and range that a field of config.py says.

Its flag, its file key and its environment variable are made of the field's name; its value is
read from text and checked here, whoever has set it.
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
    """One line about a field, and the values that it may have.

    Attributes:
        ge, gt, le: the value is at least, above, at most this.
        unit: "bytes" lets a value be written as 512M or 4GiB (powers of 1024).
        secret: the value is never shown.
    """

    text: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    unit: Literal["bytes"] | None = None
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a configuration dataclass; `type` is without the annotation."""

    name: str
    type: Any
    default: Any
    help: Help

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def kind(self) -> str:
        """What a value looks like, in words."""
        if self.help.unit == "bytes":
            return "a number of bytes, such as 512M or 4GiB"
        if get_origin(self.type) is Literal:
            return "one of " + ", ".join(get_args(self.type))
        plain = next(t for t in get_args(self.type) or (self.type,) if t is not NoneType)
        return {int: "an integer", float: "a number", bool: "true or false", str: "text"}[plain]

    def parse(self, text: str, source: str) -> Any:
        """The value that a text stands for; ConfigError as in `check`."""
        try:
            if self.kind == "an integer" and re.fullmatch(r"-?\d+|null", text) is None:
                raise ValueError(f"{text!r} is none")  # msgspec would take 2.0
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
        """Raise ConfigError, naming who set it, when a value has the wrong type or range."""
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
    """The settings of a dataclass, in its fields' order: those that are annotated with a Help."""
    hints = get_type_hints(config, include_extras=True)
    settings = []
    for each in fields(config):
        if get_origin(hints[each.name]) is Annotated:
            plain, help = get_args(hints[each.name])
            settings.append(Setting(each.name, plain, each.default, help))
    return settings


def check(config: Any) -> None:
    """Raise ConfigError, naming the flag, for the first value that cannot be."""
    for setting in settings_of(type(config)):
        setting.check(getattr(config, setting.name), setting.flag)


def parse_bytes(text: str) -> int:
    """`4G`, `512MiB` or `1073741824` as bytes; K, M, G, T are powers of 1024.

    Raises ValueError when the text is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(?:iB)?)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number of bytes")
    number, unit = match.groups()
    return int(float(number) * 1024 ** (" KMGT".index(unit) if unit else 0))
