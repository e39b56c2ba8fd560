"""Child processes import the same weft as their parent."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.server import ENVIRONMENT, start_server

import weft
from weft.serving.executor.child_process import python_module

ROOT = Path(weft.__file__).parent.parent
CHILDREN = [
    "weft.serving.engine.core",
    "weft.serving.engine.grammar.worker",
    "weft.serving.executor.rank_process",
    "weft.serving.executor.rank_process",
]


def copy_checkout(folder: Path) -> None:
    """Make a checkout of another version, in which each process that imports it adds a line."""
    package = folder / "weft"
    package.mkdir(parents=True)
    for path in (ROOT / "weft").iterdir():
        if path.is_dir() and path.name != "__pycache__":
            (package / path.name).symlink_to(path.resolve())
        elif path.suffix == ".py":
            shutil.copy(path, package)
    (package / "version.py").write_text(
        "import sys\n"
        "from pathlib import Path\n"
        '__version__ = "0.0.0.copy"\n'
        'with Path(__file__).with_name("imports").open("a") as imports:\n'
        '    imports.write(" ".join(sys.orig_argv) + "\\n")\n'
    )


def test_children_of_a_second_checkout_import_that_checkout(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy_checkout(copy)
    model = make_checkpoint(tmp_path / "model", "qwen3")
    # The first checkout stays importable, as if it were installed.
    path = os.pathsep.join([ENVIRONMENT["PYTHONPATH"], str(ROOT)])
    sizes = {"kv_cache_memory": 2**22, "max_num_seqs": 2, "max_num_batched_tokens": 24}
    with start_server(
        model, copy, environment={**ENVIRONMENT, "PYTHONPATH": path}, tp=2, **sizes
    ) as server:
        body = {"model": server.model, "prompt": "a", "max_tokens": 3, "regex": "[ab]+"}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert server.http.get("/version").json()["version"] == "0.0.0.copy"
        started = [line.split() for line in (copy / "weft" / "imports").read_text().splitlines()]
    modules = [words[words.index("-m") + 1] for words in started]
    assert sorted(modules) == sorted(["weft", *CHILDREN])


def test_a_child_imports_what_its_parent_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_checkout(tmp_path)
    monkeypatch.setattr(weft, "__file__", str(tmp_path / "weft" / "__init__.py"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command, environment = python_module("weft")
    shown = subprocess.run([*command, "--version"], capture_output=True, env=environment)
    assert b"0.0.0.copy" in shown.stdout
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), str(ROOT)]


def test_site_packages_do_not_come_before_the_standard_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = Path(site.getsitepackages()[0]) / "weft" / "__init__.py"
    monkeypatch.setattr(weft, "__file__", str(installed))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command, environment = python_module("weft")
    assert command == [sys.executable, "-P", "-m", "weft"]
    assert "PYTHONPATH" not in environment
