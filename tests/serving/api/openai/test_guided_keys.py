"""A key has a bounded share of the waiting grammars, and cannot keep other keys out."""

from __future__ import annotations

import os
import signal
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import httpx
from support.checkpoints import make_checkpoint
from support.server import start_server

ALICE, BOB = "alice's secret", "sk-bob-0123456789"
GRAMMAR_WORKER = "weft.serving.engine.grammar.worker"


def test_a_key_has_a_share_of_the_grammars(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", "llama")
    keys = {"api_key": f"{ALICE}, {BOB}", "max_queue": 4}
    with (
        start_server(model, tmp_path, max_num_seqs=8, **keys) as server,
        ThreadPoolExecutor(4) as threads,
    ):

        def ask(key: str, regex: str) -> httpx.Response:
            body = {"model": server.model, "prompt": "a", "max_tokens": 3, "regex": regex}
            headers = {"authorization": f"Bearer {key}"}
            return server.http.post("/v1/completions", json=body, headers=headers, timeout=600)

        assert ask(ALICE, "a*").status_code == 200
        (worker,) = (each for each in server.processes() if GRAMMAR_WORKER in each.cmdline())
        os.kill(worker.pid, signal.SIGSTOP)  # as if a grammar took for ever
        sent: list[Future[httpx.Response]] = [
            threads.submit(ask, ALICE, regex) for regex in ("b*", "c*")
        ]
        done, waiting = wait(sent, return_when=FIRST_COMPLETED)
        refused = done.pop().result()
        assert refused.status_code == 429
        assert "this API key has 1 grammars" in refused.text
        waiting.add(threads.submit(ask, BOB, "d*"))
        os.kill(worker.pid, signal.SIGCONT)
        assert [each.result().status_code for each in waiting] == [200, 200]
