"""The state that a process inherits, set to the same values for every run.

A test run inherits signals, limits and variables from the shell, script or CI runner that started
it, and hands them on to each process that it starts. `settle` sets the ones that tests rely on.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import shutil
import signal
import sys
import tempfile

OPEN_FILES = 4096  # soft limit: tests hold servers, sockets and pipes in one process

# Child processes find their modules by these. All other PYTHON... variables are removed.
_PYTHON = {"PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED"}
_REMOVED = re.compile(
    "PYTHON.*|WEFT_.*|LC_.*|LANGUAGE|COLUMNS|LINES|COLORTERM|NO_COLOR|(FORCE|CLICOLOR).*"
    "|TTY_.*|(RAY|OTEL)_.*|.*_(proxy|PROXY)"
)


def settle() -> None:
    """Set this process's inherited state, and thereby its children's."""
    _restore_signals()
    _settle_variables()
    sys.dont_write_bytecode = False  # else each of some hundred processes compiles all modules anew
    os.umask(0o022)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _restore_signals() -> None:
    """Let children start with the default action of each signal.

    `nohup`, `&` in a script and some CI runners start a command with signals ignored, and children
    inherit that. This process still ignores them: its handlers do nothing. But a handler, unlike
    SIG_IGN, is not inherited through exec.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # when ignored, no exit status is left to read


def _settle_variables() -> None:
    for name in filter(_REMOVED.fullmatch, set(os.environ) - _PYTHON):
        del os.environ[name]
    os.environ |= {"LC_ALL": "C.UTF-8", "LANG": "C.UTF-8", "TERM": "xterm"}
    # There are more processes than cores. OpenMP's threads must not spin while they wait: spinning
    # doubles the time of tests that multiply.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if not os.access(os.environ.get("HOME", ""), os.W_OK | os.X_OK):
        home = os.environ["HOME"] = tempfile.mkdtemp(prefix="weft-tests-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
