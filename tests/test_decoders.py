"""msgspec describes a type when it is first used, and crashes if two threads do so at once.

Each module therefore makes the decoders of its types when it is imported.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import pytest
from test_layout import MODULES

ONE_THREAD = {"weft.serving.cli.doctor", "weft.serving.engine.grammar.worker"}
"""Modules of processes that have no other thread when they first read a message."""

CHECKS = """
import os, sys, threading
sys.setswitchinterval(1e-6)
from weft.serving.engine.checks import _check_types
from weft.serving.engine.sampling_params import SamplingParams

def first_requests():
    start = threading.Barrier(8)
    def check():
        start.wait()
        for _ in range(3):
            _check_types(SamplingParams())
    threads = [threading.Thread(target=check) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

ends = []
for _ in range(40):
    child = os.fork()
    if not child:
        first_requests()
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
sys.exit(str(ends) if any(ends) else 0)
"""


def late_types(source: str) -> Iterator[str]:
    """What names a class as the type to decode, in a function; parameters have small letters."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            kinds = [given.value for given in call.keywords if given.arg == "type"]
            if call.func.attr == "Decoder":
                kinds += call.args[:1]
            elif call.func.attr != "decode":
                continue
            names = [each.id for kind in kinds for each in ast.walk(kind) if type(each) is ast.Name]
            if any(name.lstrip("_")[0].isupper() for name in names if name != "Any"):
                yield ast.unparse(call)


def test_types_are_described_at_import() -> None:
    for name in MODULES.keys() - ONE_THREAD:
        assert list(late_types(MODULES[name].read_text())) == [], name


@pytest.mark.parametrize(
    "call",
    [
        "msgspec.json.decode(body, type=_Line)",
        "msgspec.msgpack.decode(data, type=Start | Stop)",
        "msgspec.json.Decoder(list[Entry])",
    ],
)
def test_a_late_type_is_found(call: str) -> None:
    assert list(late_types(f"def read(body):\n    return {call}")) == [call]
    assert list(late_types(f"read = {call}")) == []


def test_a_servers_first_requests_may_come_together() -> None:
    """They crashed the server: several threads described the same type."""
    done = subprocess.run([sys.executable, "-c", CHECKS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
