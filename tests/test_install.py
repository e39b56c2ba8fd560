"""The wheel: what it holds, and that it serves from an environment of its own."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from support.server import start_server

ROOT = Path(__file__).parent.parent
MODELS = ("weft-demo", "weft-demo-moe")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what git knows, so that nothing stale gets in."""
    source = tmp_path_factory.mktemp("source")
    out = tmp_path_factory.mktemp("dist")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    known = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, known.split("\0")):
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(out), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a new environment that holds the wheel.

    Its libraries are those of the running environment, by a path (a fresh install would
    download a gigabyte). The editable weft there does not come along: the .pth file that
    makes it is only read by its own environment.
    """
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=True)
    install = [home / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True)
    site = next(home.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin/python"


def test_wheel_holds_the_package_and_the_models(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"weft"}
    for model in MODELS:
        for file in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
            assert f"weft/models/bundled/{model}/{file}" in names
    for file in (ROOT / "serving/api/admin/static").iterdir():
        assert f"weft/serving/api/admin/static/{file.name}" in names


@pytest.mark.parametrize("model", MODELS)
def test_wheel_serves_the_bundled_models(python: Path, model: str, tmp_path: Path) -> None:
    with start_server(Path(model), tmp_path, python=python) as server:
        code = "import weft; print(weft.__file__)"
        home = subprocess.run([python, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert home.stdout.startswith(str(python.parent.parent)), "not the wheel's weft"
        question = [{"role": "user", "content": "Hello!"}]
        answer = server.http.post(
            "/v1/chat/completions", json={"model": model, "messages": question}
        ).json()
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["message"]["content"]


def test_make_finds_torch_in_the_given_index(tmp_path: Path) -> None:
    for given, expected in ((["TORCH_INDEX=https://example.com/cpu"], True), ([], False)):
        command = ["make", "--dry-run", "serve", f"VENV={tmp_path / 'venv'}", *given]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert ("--extra-index-url https://example.com/cpu" in done.stdout) == expected


def test_the_commands_need_no_extra_to_start() -> None:
    """Imports at the top of a command's module only need required packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}  # type: ignore[index]
    extras = {
        re.match(r"[\w-]+", each)[0]  # type: ignore[index]
        for name in ("bench", "cuda", "tpu", "ray", "otel")
        for each in project["optional-dependencies"][name]
    }
    for file in (ROOT / "serving" / "cli").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.partition(".")[0]
                assert top in {*sys.stdlib_module_names, *required, "weft"} - extras, (file, name)
