"""Files and folders that commands write: checked before a long run, and never half-written."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from weft.errors import ConfigError, DiskError, WeftError

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


def check_folder(path: Path, flag: str) -> None:
    """Raise ConfigError if `whole_folder` cannot make a folder; call this before a long run."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{flag} is {path}, which is a file; name a new directory")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"{flag} is {path}, which is not empty; name a new directory")
    check_file(path.absolute() / "file" if path.is_dir() else path.absolute(), flag)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`, and then rename it to `path`.

    After an error, an interrupt or SIGTERM, nothing is left. After SIGKILL a hidden folder is left;
    the next call for the same path removes it. A lock tells it from the folder of a process that
    still runs.

    Raises:
        DiskError: the folder cannot be made or renamed.
    """
    whole = path.absolute()
    for left in whole.parent.glob(f".{whole.name}.*.partial"):
        _remove_unlocked(left)
    partial = whole.with_name(f".{whole.name}.{os.getpid()}.partial")
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        partial.mkdir()
        lock = os.open(partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield partial
            partial.rename(whole)
        finally:
            os.close(lock)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise DiskError(f"cannot write {path}: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGTERM, previous)


def _remove_unlocked(folder: Path) -> None:
    """Remove a folder of `whole_folder`, unless its process still runs."""
    try:
        lock = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # locked
    finally:
        os.close(lock)
