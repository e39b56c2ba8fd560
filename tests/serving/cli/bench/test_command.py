"""`weft bench` as its users run it, against weft and against servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.checkpoints import make_checkpoint
from support.commands import run_each
from support.server import Server, start_server
from support.sse_server import MODEL, answer, sse_server

from weft.models.plan.lengths import Lengths
from weft.serving.cli.bench.run import Benchmark, measure
from weft.serving.cli.bench.workload import Workload

Run = Callable[..., subprocess.CompletedProcess[str]]
SERVE = Path(__file__).parents[4] / "benchmarks" / "serve.py"
_DISK_FULL = """
import pathlib
def write_text(*_, **__):
    raise OSError(28, "No space left on device")
pathlib.Path.write_text = write_text
"""
QUICK = ("--quiet", "--count", 3, "--prompt", 8, "--output-tokens", 4)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    """`weft serve` of a tiny random model: its text is noise, with half characters."""
    with start_server(checkpoint, checkpoint.parent) as server:
        yield server


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run `weft bench` to its end; `before` is Python that runs ahead of it."""

    def run(
        *arguments: object, before: str = "", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        code = f"import sys\n{before}\nfrom weft.serving.cli.main import main\nmain()"
        return subprocess.run(
            [sys.executable, "-c", code, "bench", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=os.environ | environment,
            timeout=400,
        )

    return run


def error_of(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    """The one line that says what is wrong."""
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith("weft: error: ")
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("weft: error: ").rstrip("\n")


def figures(done: subprocess.CompletedProcess[str], status: int = 0) -> dict[str, Any]:
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout, parse_constant=pytest.fail)
    return found


def test_help_has_examples_and_every_flag_is_explained(run: Run) -> None:
    text = run("--help").stdout
    assert "weft bench --rate 1,2,4,8 --plot latency.png" in text
    assert "OPENAI_API_KEY" in text


def test_closed_loop_against_weft(run: Run, server: Server, checkpoint: Path) -> None:
    arguments = ("--url", f"{server.url}/v1", "--users", "1,3", "--count", 6, "--prompt", "8-20")
    more = ("--output-tokens", 12, "--tokenizer", checkpoint, "--target", "ttft=60", "--seed", 5)
    found = figures(run(*arguments, *more, "--json"))
    assert found["model"] == server.model
    assert (found["prompt"], found["output_tokens"], found["seed"]) == ("8-20", "12", 5)
    one, three = found["runs"]
    assert (one["load"], three["load"]) == ("1 user", "3 users")
    for report in found["runs"]:
        assert (report["requests"], report["failed"], report["short"]) == (6, 0, 0)
        assert report["output_tokens"] == 6 * 12
        assert 6 * 8 <= report["prompt_tokens"] <= 6 * 20
        assert report["goodput"] == report["request_rate"]
        for name in ("ttft", "itl", "tpot", "latency"):
            assert 0 < report[name]["p50"] <= report[name]["p90"] <= report[name]["p99"]
    again = figures(run(*arguments, *more, "--json"))
    assert [r["prompt_tokens"] for r in again["runs"]] == [
        r["prompt_tokens"] for r in found["runs"]
    ]


def test_open_loop_of_chats_with_a_shared_prefix_against_weft(
    run: Run, server: Server, tmp_path: Path
) -> None:
    arguments = ("--url", f"{server.url}/v1/", "--rate", "50,100", "--count", 4, "--chat")
    more = ("--turns", 2, "--prompt", 8, "--output-tokens", 5, "--shared-prefix", 40, "--quiet")
    done = run(*arguments, *more, "--output", "f.json", "--plot", "f.svg")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    head = done.stdout.splitlines()
    assert "TTFT" in head[0]
    assert [line.split()[:2] for line in head[2::2]] == [["50/s", "8"], ["100/s", "8"]]
    assert "prefix cache" in head[3]
    assert len(json.loads((tmp_path / "f.json").read_text())["runs"]) == 2
    assert "<svg" in (tmp_path / "f.svg").read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["f.json", "f.svg"]


@pytest.mark.parametrize("chat", [False, True])
async def test_measuring_from_python(server: Server, chat: bool) -> None:
    benchmark = Benchmark(
        base_url=f"{server.url}/v1",
        workload=Workload(Lengths(9, 9), Lengths(40, 40)),
        users=(2,),
        rates=(100.0,),
        count=3,
        chat=chat,
        extra={"ignore_eos": True},
        api_key="secret",
        quiet=True,
    )
    assert "secret" not in repr(benchmark)
    reports = await measure(benchmark)
    assert [(r.load, r.failed, r.output_tokens) for r in reports] == [
        ("2 users", 0, 120),
        ("100/s", 0, 120),
    ]
    assert reports[0].steady_rate is not None
    assert reports[1].steady_rate is None


def test_serve_py_is_the_same_command(server: Server) -> None:
    command = [sys.executable, str(SERVE), "--url", f"{server.url}/v1", "--users", 1, *QUICK]
    done = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    assert figures(done)["runs"][0]["failed"] == 0


CANNOT_WORK = [
    (["--prompt", "9-3"], "--prompt is '9-3'; it must be a length (128), a range (64-256)"),
    (["--output-tokens", "0"], "--output-tokens is '0'"),
    (["--users", "1,x"], "--users is '1,x'; it must be numbers above 0, such as 1,16,64"),
    (["--users", "0"], "--users is '0'"),
    (["--rate", "1,-2"], "--rate is '-2'; it must be a number above 0"),
    (["--rate", "nan"], "--rate is 'nan'"),
    (["--timeout", "0"], "--timeout is '0'"),
    (["--temperature", "nan"], "--temperature is nan; it must be in [0, 2]"),
    (["--target", "p99=1"], "--target has 'p99'"),
    (["--turns", "2"], "--turns needs --chat"),
    (["--chat", "--tokenizer", "weft-demo"], "--tokenizer does not work with --chat"),
    (["--tokenizer", "nowhere"], "--tokenizer is nowhere; there is no tokenizer.json"),
    (["--url", "localhost:8000"], "--url is 'localhost:8000'; it must be like http://"),
    (["--plot", "a.bmp"], "--plot is a.bmp; its name must end in .png, .svg, .pdf"),
    (["--plot", "no/a.png"], "--plot is no/a.png; there is no directory no"),
    (["--output", "no/a.json"], "--output is no/a.json; there is no directory no"),
    (["--output", "/"], "--output is /, which is a directory; name a file"),
    (["--url", "http://127.0.0.1:9/v1"], "no server at http://127.0.0.1:9/v1 (Cannot connect"),
]


def test_what_cannot_work_is_one_line_and_exits_2(tmp_path: Path) -> None:
    lines = [["bench", *arguments] for arguments, _ in CANNOT_WORK]
    for done, (_, message) in zip(run_each(lines, tmp_path), CANNOT_WORK, strict=True):
        assert message in error_of(done)


def test_a_missing_library_is_named_with_the_remedy(run: Run) -> None:
    done = run("--plot", "a.png", before="sys.modules['matplotlib'] = None")
    assert error_of(done) == "--plot needs matplotlib: pip install matplotlib"


def test_models_that_the_server_does_not_have(run: Run, server: Server) -> None:
    message = error_of(run("--url", f"{server.url}/v1", "--model", "gpt-9"))
    assert message == f"--model is 'gpt-9'; the server at {server.url}/v1 has {server.model}"
    assert "--url must end in /v1" in error_of(run("--url", server.url))


def test_the_key_comes_from_the_flag_or_the_environment_and_is_kept_out_of_the_figures(
    run: Run,
) -> None:
    async def models(request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != "Bearer secret":
            return web.json_response({}, status=401)
        return web.json_response({"data": [{"id": MODEL}]})

    async def guarded(request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        return await answer(request)

    with sse_server(guarded, models) as url:
        arguments = ("--url", url, "--users", 1, *QUICK, "--json")
        assert "needs an API key; set --api-key" in error_of(run(*arguments))
        for done in (
            run(*arguments, "--api-key", "secret"),
            run(*arguments, OPENAI_API_KEY="secret"),
        ):
            assert figures(done)["runs"][0]["failed"] == 0
            assert "secret" not in done.stdout


def test_a_server_that_refuses_unknown_fields(run: Run) -> None:
    async def strict(request: web.Request) -> web.StreamResponse:
        if "ignore_eos" in await request.json():
            return web.json_response({"error": "unknown field ignore_eos"}, status=400)
        return await answer(request)

    with sse_server(strict) as url:
        arguments = ("--url", url, "--users", 1, *QUICK)
        message = error_of(run(*arguments), status=1)
        assert "the warm-up request failed: HTTP 400" in message
        assert "--no-ignore-eos leaves out ignore_eos" in message
        assert run(*arguments, "--no-ignore-eos").returncode == 0


def test_failed_requests_are_told_with_their_reasons(run: Run) -> None:
    asked = []

    async def sometimes(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) % 2 == 0:
            return web.json_response({"error": "busy"}, status=429)
        return await answer(request)

    with sse_server(sometimes) as url:
        done = run("--url", url, "--users", 1, "--count", 4, "--quiet")
    assert done.returncode == 1
    assert '2 failed: HTTP 429: {"error": "busy"}' in done.stdout


def test_a_server_that_dies_in_the_middle(checkpoint: Path, tmp_path: Path) -> None:
    with start_server(checkpoint, tmp_path) as server:
        arguments = ["--url", f"{server.url}/v1", "--users", "2", "--count", "200", "--prompt", "8"]
        with subprocess.Popen(
            [sys.executable, "-m", "weft", "bench", *arguments, "--quiet", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            server.wait_until("requests_running", 2)
            server.process.kill()
            stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (1, "")
    (report,) = json.loads(stdout)["runs"]
    assert report["requests"] == 200
    assert report["failed"] > 0
    assert sum(report["errors"].values()) == report["failed"]


def test_requests_that_are_never_answered_fail_after_the_timeout(run: Run) -> None:
    async def hangs(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        return web.Response()

    with sse_server(hangs) as url:
        arguments = ("--url", url, "--rate", 100, *QUICK, "--timeout", 0.2)
        done = run(*arguments, "--warm-up", 0, "--json", "--plot", "a.png")
        assert "timed out after 0.2 s" in error_of(run(*arguments), status=1)
    (report,) = figures(done, status=1)["runs"]
    assert report["errors"] == {"timed out after 0.2 s": 3}
    assert report["ttft"] == {"p50": None, "p90": None, "p99": None}


def test_an_interrupt_reports_what_has_finished_and_exits_130(tmp_path: Path) -> None:
    stuck = threading.Event()
    asked = []

    async def three_answers(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if len(asked) <= 3:
            return await answer(request)
        if len(asked) == 5:  # both users wait
            stuck.set()
        await asyncio.sleep(3600)
        return web.Response()

    with sse_server(three_answers) as url:
        arguments = ["--url", url, "--users", "2", "--warm-up", "0", "--output", "f.json"]
        with subprocess.Popen(
            [sys.executable, "-m", "weft", "bench", *arguments, "--quiet"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert stuck.wait(60)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, "")
    assert "interrupted: only finished requests count" in stdout
    (report,) = json.loads((tmp_path / "f.json").read_text())["runs"]
    assert (report["interrupted"], report["requests"], report["failed"]) == (True, 3, 0)


def test_files_are_replaced_whole_or_not_at_all(run: Run, tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text("before")
    with sse_server(answer) as url:
        arguments = ("--url", url, "--users", 1, *QUICK, "--output", "f.json")
        done = run(*arguments, before=_DISK_FULL)
        assert done.returncode == 1
        assert "weft: error: cannot write f.json: No space left on device" in done.stderr
        assert "TTFT" in done.stdout  # the figures are not lost
        assert (tmp_path / "f.json").read_text() == "before"
        assert run(*arguments).returncode == 0
    assert len(json.loads((tmp_path / "f.json").read_text())["runs"]) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["f.json"]
