"""Coding agents mend a file in a repository: Codex, opencode and aider.

A scripted model drives each agent for some turns. `make test-clients` installs the agents.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support import echo_runner
from support.server import Server, start_server
from support.tool_loop import call

BUILT = Path(__file__).parents[3] / "build" / "clients"
TASK = "Mend the sum."
RIGHT = "def add(a, b):\n    return a + b\n"
WRONG = RIGHT.replace("+", "-")
TEST = "import calc\n\nassert calc.add(40, 2) == 42\nprint('PASSED')\n"
RUN_TEST = f"{sys.executable} test_calc.py"
PATCH = """*** Begin Patch
*** Update File: calc.py
@@
-    return a - b
+    return a + b
*** End Patch
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all((BUILT / name / ".installed").exists() for name in ("agents", "aider")),
        reason="`make test-clients` installs the agents",
    ),
]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a wrong function and its test."""
    path = tmp_path / "repository"
    path.mkdir()
    (path / "calc.py").write_text(WRONG)
    (path / "test_calc.py").write_text(TEST)
    author = ("-c", "user.name=A", "-c", "user.email=a@localhost")
    for command in (("init", "--quiet"), ("add", "."), (*author, "commit", "--quiet", "-m", "a")):
        subprocess.run(["git", *command], cwd=path, check=True)
    return path


@contextmanager
def served(path: Path, key: str, script: list[tuple[str, str]], route: str) -> Iterator[Server]:
    """Serve a script; at the end, all requests must have gone to one route, with status 200."""
    model = echo_runner.write_script(path / "scripted", script)
    settings = {"api_key": key, "log_requests": True, "max_model_len": 200_000}
    with start_server(model, path, loader=echo_runner.LOADER, **settings) as server:
        yield server
    log = server.log.read_text()
    requests = re.findall(r"weft\.requests: (\S+ \S+ status=\d+)", log)
    assert set(requests) == {f"POST '{route}' status=200"}, log
    assert len(requests) >= len(script), log


@pytest.fixture
def run(repository: Path, tmp_path: Path) -> Callable[..., str]:
    """A function to run an agent in the repository, without a network."""
    home = tmp_path / "home"
    home.mkdir()

    def run(*command: str | Path, **environment: str) -> str:
        nowhere = "http://127.0.0.1:9"
        offline = {"HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            list(map(str, command)),
            cwd=repository,
            env={"PATH": os.environ["PATH"], "HOME": str(home)} | offline | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def assert_mended(repository: Path) -> None:
    """The function is right; all other files are as before."""
    assert (repository / "calc.py").read_text() == RIGHT
    assert (repository / "test_calc.py").read_text() == TEST


CODEX_MODEL: dict[str, Any] = {
    "slug": "scripted",
    "display_name": "scripted",
    "base_instructions": "You are a coding agent.",
    "apply_patch_tool_type": "freeform",
    "context_window": 200_000,
    "default_reasoning_level": "low",
    "experimental_supported_tools": [],
    "priority": 1,
    "shell_type": "unified_exec",
    "support_verbosity": False,
    "supported_in_api": True,
    "supported_reasoning_levels": [{"effort": "low", "description": "a little"}],
    "supports_search_tool": True,
    "truncation_policy": {"mode": "tokens", "limit": 10_000},
    "visibility": "list",
}
"""An entry for Codex's catalog of models, which turns on its patch tool."""

SHELL_PATCH = f"apply_patch <<'EOF'\n{PATCH}EOF"


@pytest.mark.parametrize(
    "patch",
    [call("exec_command", cmd=SHELL_PATCH), call("apply_patch", input=PATCH)],
    ids=["function", "custom"],
)
def test_codex(
    repository: Path, run: Callable[..., str], tmp_path: Path, key: str, patch: str
) -> None:
    """The tools are functions; with a model catalog, the patch is free text in a grammar."""
    script = [
        ("PASSED", "The sum is right."),
        ("Success", call("exec_command", cmd=RUN_TEST)),
        ("return a - b", patch),
        (TASK, call("exec_command", cmd="cat calc.py")),
    ]
    catalog = tmp_path / "catalog.json"
    catalog.write_text(json.dumps({"models": [CODEX_MODEL]}))
    with served(tmp_path, key, script, "/v1/responses") as server:
        provider = {
            "name": "weft",
            "base_url": f"{server.url}/v1",
            "wire_api": "responses",
            "env_key": "WEFT_KEY",
            "request_max_retries": 0,
            "stream_max_retries": 0,
        }
        settings = {f"model_providers.weft.{name}": value for name, value in provider.items()}
        settings |= {"model": "scripted", "model_provider": "weft", "analytics.enabled": False}
        settings |= {"check_for_update_on_startup": False}
        settings |= {"features.plugins": False, "features.remote_plugin": False}
        if "exec_command" not in patch:
            settings["model_catalog_json"] = str(catalog)
        flags = [f"--config={name}={json.dumps(value)}" for name, value in settings.items()]
        flags.append("--dangerously-bypass-approvals-and-sandbox")
        codex = BUILT / "agents" / "node_modules" / ".bin" / "codex"
        said = run(codex, "exec", *flags, TASK, WEFT_KEY=key)
    assert said.strip() == "The sum is right."
    assert_mended(repository)


@pytest.mark.parametrize(
    ("package", "route"),
    [
        ("openai-compatible", "/v1/chat/completions"),
        ("openai", "/v1/responses"),
        ("anthropic", "/v1/messages"),
    ],
)
def test_opencode(
    repository: Path, run: Callable[..., str], tmp_path: Path, key: str, package: str, route: str
) -> None:
    """All routes for chats, by Vercel's packages."""
    file = str(repository / "calc.py")
    script = [
        ("Generate a title", "A sum"),
        ("PASSED", "The sum is right."),
        ("applied", call("bash", command=RUN_TEST, description="Run the test")),
        ("return a - b", call("edit", filePath=file, oldString="a - b", newString="a + b")),
        (TASK, call("read", filePath=file)),
    ]
    with served(tmp_path, key, script, route) as server:
        limit = {"context": 200_000, "output": 8_000}
        model = {"name": "scripted", "reasoning": True, "tool_call": True, "limit": limit}
        config = {
            "autoupdate": False,
            "share": "disabled",
            "model": "weft/scripted",
            "permission": {"edit": "allow", "bash": "allow"},
            "provider": {
                "weft": {
                    "npm": f"@ai-sdk/{package}",
                    "options": {"baseURL": f"{server.url}/v1", "apiKey": key},
                    "models": {"scripted": model},
                }
            },
        }
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        said = run(
            BUILT / "agents" / "node_modules" / ".bin" / "opencode",
            *("run", TASK),
            OPENCODE_CONFIG_CONTENT=json.dumps(config),
            **{f"OPENCODE_DISABLE_{name}": "1" for name in off},
        )
    assert "The sum is right." in said
    assert_mended(repository)


def test_aider(repository: Path, run: Callable[..., str], tmp_path: Path, key: str) -> None:
    """The first edit is wrong; aider runs the test and sends its output."""
    script = [("AssertionError", edit("a * b", "a + b")), (TASK, edit("a - b", "a * b"))]
    with served(tmp_path, key, script, "/v1/chat/completions") as server:
        run(
            BUILT / "aider" / "bin" / "aider",
            *("--model", "openai/scripted", "--edit-format", "diff", "--message", TASK),
            *("--auto-test", "--test-cmd", RUN_TEST, "--yes-always", "--no-gitignore"),
            *("--no-check-update", "--analytics-disable", "--no-show-model-warnings"),
            *("--no-show-release-notes", "--no-detect-urls", "--no-pretty", "calc.py"),
            OPENAI_API_BASE=f"{server.url}/v1",
            OPENAI_API_KEY=key,
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
    assert_mended(repository)


def edit(old: str, new: str) -> str:
    """Return a change to calc.py in aider's form."""
    return (
        "calc.py\n```python\n"
        f"<<<<<<< SEARCH\n    return {old}\n=======\n    return {new}\n>>>>>>> REPLACE\n```\n"
    )
