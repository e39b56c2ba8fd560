"""Files that commands write: checked before a long run, and never half-written."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from weft.errors import ConfigError, WeftError

PICTURES = (".png", ".svg", ".pdf")


def check_file(path: Path, flag: str) -> None:
    """Raise ConfigError if a file cannot be written; call this before a long run."""
    if path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a directory; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} is {path}; there is no directory {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} is {path}; {path.parent} is not writable")


def check_plot(path: Path) -> None:
    """Raise ConfigError if a plot cannot be drawn or written."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"--plot is {path}; its name must end in {', '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    check_file(path, "--plot")


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path, and then rename the file to `path`.

    Raises:
        WeftError: the file cannot be written; an existing file stays as it was.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        write(partial)
        partial.replace(path)
    except OSError as error:
        raise WeftError(f"cannot write {path}: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)
