"""deploy/Dockerfile and compose.yaml, as far as they can be looked at without Docker."""

from __future__ import annotations

import re
import subprocess
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from torch.version import cuda

from weft.serving.cli.main import weft
from weft.version import __version__

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
COMPOSE = ROOT / "deploy" / "compose.yaml"
TRITON_OF_CUDA = {"2.13.0": "3.7.1"}
"""By torch's release: the one that its build with CUDA asks for. From the wheel's metadata:

    uv pip compile --constraint constraints.txt --extra cuda pyproject.toml
"""

ENVIRONMENT = {"MODEL": "weft-demo", "GPUS": "2", "PORT": "8000", "MODELS": "/srv"}


def stages() -> dict[str, list[str]]:
    """Instructions of each stage, by its name, with those of what it is made from before them."""
    found: dict[str, list[str]] = {}
    text = re.sub(
        r"\\\n", " ", re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE)
    )
    for line in filter(str.strip, text.splitlines()):
        if match := re.fullmatch(r"FROM (\S+) AS (\S+)", line):
            before, name = match.groups()
            found[name] = [*found.get(before, [line])]
        else:
            found[name].append(line)
    return found


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("target", ["cpu", "cuda", "tpu"])
def test_an_image_runs_weft_as_a_user_that_is_not_root(target: str) -> None:
    lines = stages()[target]
    assert re.fullmatch(r"FROM python:3\.\d+\.\d+-slim-\w+ AS base", lines[0]), "a pinned base"
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 10001:0"
    assert 'ENTRYPOINT ["weft"]' in lines
    assert any(line.startswith("HEALTHCHECK") for line in lines)
    assert f"COPY --from={target}-environment /opt/weft /opt/weft" in lines
    compilers = [line for line in lines if re.search("gcc|g\\+\\+|clang", line)]
    assert len(compilers) == (target == "cuda"), "Triton alone needs one"


def test_a_build_without_a_target_is_for_cpus() -> None:
    assert list(stages())[-1] == "cpu"


def test_what_is_copied_is_not_ignored_and_is_there() -> None:
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    copied = [
        word
        for line in DOCKERFILE.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for word in line.split()[1:-1]
    ]
    assert set(copied) == set(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_every_package_of_the_wheel_is_copied() -> None:
    linked = {path.name for path in (ROOT / "weft").iterdir() if path.is_symlink()}
    copied = re.findall(r"^COPY (\w+) \1$", DOCKERFILE.read_text(), re.MULTILINE)
    assert set(copied) == {"weft", *linked} >= {"weft", "serving"}


def test_constraints_suit_torch_for_cpus_and_torch_with_cuda() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    specifiers = {each.name: each.specifier for each in found}
    triton = specifiers.pop("triton")
    for name, specifier in specifiers.items():
        assert str(specifier).startswith("=="), f"{name} is to have one version"
    torch = str(specifiers["torch"]).removeprefix("==")
    assert triton.contains(TRITON_OF_CUDA[torch])
    if cuda is None:
        assert str(triton) == f"<={version('triton')}", (
            "pip takes the newest, where torch has no wish"
        )


def test_compose_runs_what_weft_takes_and_lets_it_drain() -> None:
    compose = yaml.safe_load(expanded(COMPOSE.read_text()))
    for target, service in compose["services"].items():
        assert service["image"] == f"weft:{__version__}-{target}"
        assert service["build"]["target"] in stages()
        assert service["profiles"] == [target]
        command, *words = service["command"]
        weft.commands[command].make_context(command, list(words))
        flags = dict(word.split("=") for word in words if "=" in word)
        grace = int(service["stop_grace_period"].removesuffix("s"))
        assert grace >= int(flags["--drain-timeout"]) + 20
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert set(service["tmpfs"]) == {"/tmp"}


def expanded(text: str) -> str:
    """Compose's ${NAME:-default}, each with a value."""
    return re.sub(r"\$\{(\w+):-[^}]*\}", lambda match: ENVIRONMENT[match[1]], text)
