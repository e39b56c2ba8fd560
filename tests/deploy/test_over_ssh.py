"""deploy/over-ssh.sh, with an `ssh` that runs what it is told on this machine, in a plain shell."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from support.checkpoints import make_checkpoint
from support.clients import complete
from support.nodes import TOKEN
from support.processes import wait_until_gone
from support.server import ENVIRONMENT, TIMEOUT, Server, free_port

SCRIPT = Path(__file__).parents[2] / "deploy" / "over-ssh.sh"
WEFT = f"{sys.executable} -P -m weft"

# As of sshd, nothing of the caller's environment is there, and the shell need not be bash.
SSH = """#!/bin/sh
[ "$1 $2" = "-o BatchMode=yes" ] || exit 9
echo "$3" >> {log}
exec env -i PATH=/usr/bin:/bin sh -c "$4"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(log=tmp_path / "hosts"))
    ssh.chmod(0o755)
    return ENVIRONMENT | {
        "PATH": f"{ssh.parent}:{ENVIRONMENT['PATH']}",
        "WEFT": WEFT,
        "WEFT_NODE_TOKEN": TOKEN,
        "WEFT_NODE_ADDRESS": "127.0.0.1",
        "WEFT_NODE_PORT": str(free_port()),
    }


@contextmanager
def started(
    environment: dict[str, str], log: Path, *arguments: str
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        command = ["bash", str(SCRIPT), *arguments]
        process = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=out, stderr=out)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_model_is_served_with_another_host_and_nothing_is_left(
    environment: dict[str, str], tmp_path: Path
) -> None:
    model, log = make_checkpoint(tmp_path / "model", "qwen3"), tmp_path / "log"
    flags = ["--tp=2", "--port=0", "--threads=1", "--kv-cache-memory=4M", "--max-num-seqs=4"]
    with started(environment, log, "other", str(model), *flags) as process:
        deadline = time.monotonic() + TIMEOUT
        while (url := re.search(r" at (http://\S+)", log.read_text())) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        with httpx.Client(base_url=url[1], timeout=TIMEOUT) as http:
            assert complete(Server(url[1], model.name, process, log, http))
        everyone = psutil.Process(process.pid).children(recursive=True)
        joined = [each for each in everyone if "join" in each.cmdline()]
        assert len(joined[0].children()) == 1, "it has a rank"
        assert TOKEN not in " ".join(word for each in everyone for word in each.cmdline())
        process.terminate()
        assert process.wait(TIMEOUT) == 0
        wait_until_gone([each.pid for each in everyone])
    assert (tmp_path / "hosts").read_text() == "other\n"
    assert "does not take part any more" not in log.read_text()


def test_a_host_without_weft_ends_all(environment: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment["WEFT"] = f"{tmp_path}/weft"
    (tmp_path / "weft").write_text(f'#!/bin/sh\n[ "$1" = join ] && exit 127\nexec {WEFT} "$@"\n')
    (tmp_path / "weft").chmod(0o755)
    with started(environment, log, "one", "weft-demo", "--tp=2", "--port=0") as process:
        assert process.wait(TIMEOUT) in (0, -signal.SIGTERM), "it is told to end"
    assert f"{SCRIPT}: one does not take part any more (status 127)" in log.read_text()


def test_what_to_give_is_said(environment: dict[str, str], tmp_path: Path) -> None:
    with started(environment, tmp_path / "log", "one") as process:
        assert process.wait(TIMEOUT) == 2
    assert 'deploy/over-ssh.sh "10.0.0.2 10.0.0.3" MODEL --tp 3' in (tmp_path / "log").read_text()
