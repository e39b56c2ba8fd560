"""Every fault planted in a kernel is found: a check that cannot fail proves nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft.kernels.check.tpu.process import Workers, start

WORKER = Path(__file__).parents[2] / "support" / "tpu_worker.py"
TPU = "weft.kernels.tpu."

TAKE = "pl.when(full)(lambda: pl.semaphore_wait(self.credit, 1))"
GIVE = "pl.when(free)(lambda: signal(self.credit, self.previous, self.core))"
WAIT = "    pl.semaphore_wait(semaphore, len(writers))\n"

FAULTS = {
    "dropped wait": (
        "reduce_scatter x=4",
        [("collectives.sums",
          "message(lane, hop - 1).wait()", "message(lane, hop - 1).wait_send()")],
        "race: |wrong: ",
    ),
    "dropped credit": (
        "reduce_scatter x=4",
        [("collectives.ring", TAKE, "pass"), ("collectives.ring", GIVE, "pass")],
        "race: ",
    ),
    "credit that nobody takes": (
        "reduce_scatter x=4",
        [("collectives.ring", TAKE, "pass")],
        "leftover",
    ),
    "double write": (
        "all_to_all x=4",
        [("collectives.all_to_all", "            out.at[me],\n", "            out.at[0],\n")],
        "race: ",
    ),
    "out of bounds": (
        "permute x=2",
        [("collectives.permute", "x.at[i],", "x.at[i + 1],")],
        "Out-of-bounds",
    ),
    "dropped barrier": ("all_gather x=2", [("runtime.topology", WAIT, "")], "missing barrier"),
    "barrier with the wrong neighbour": (
        "permute x=4",
        [("collectives.permute", "barrier([{axis: along(axis, -direction)}])",
          "barrier([{axis: along(axis, direction)}])")],
        "missing barrier",
    ),
    "early exit": (
        "moe_dispatch x=4 idle",
        [("experts.dispatch",
          "            signal(passed, device(axes, peer))\n", "            pass\n"),
         ("experts.dispatch",
          "        pl.semaphore_wait(passed, devices - 1)\n", "        pass\n")],
        "early exit",
    ),
    "pages that are multiplied before they are here": (
        "ragged_paged_attention x=1 window",
        [("attention.kernel", "self._copy_pages(tile, block, buffer, _WAIT)", "pass")],
        "race: |wrong: ",
    ),
    "pages over those that are multiplied": (
        "ragged_paged_attention x=1 window",
        [("attention.kernel", "scratch.kv_buffers.at[buffer, :, rows]",
          "scratch.kv_buffers.at[0, :, rows]")],
        "race: |wrong: ",
    ),
    "stale pages": (
        "ragged_paged_attention x=1 window",
        [("attention.kernel", "jnp.where(stale, jnp.zeros_like(pages), pages[...])", "pages[...]")],
        "wrong: ",
    ),
    "a part that is refilled before it has left": (
        "distributed_decode_attention x=2",
        [("attention.distributed_decode",
          "pl.when(i >= SLOTS)(lambda: wait_sent(slot))", "pass")],
        "race: |leftover",
    ),
    "parts that are not waited for": (
        "distributed_decode_attention x=2",
        [("attention.distributed_decode", "send.wait_recv()", "pass")],
        "race: |wrong: |leftover",
    ),
    "rows that are not waited for": (
        "moe_dispatch x=2",
        [("experts.dispatch", "row(step, 0).wait_recv()", "None")],
        "race: |wrong: |leftover",
    ),
    "deadlock": ("reduce_scatter x=4", [("collectives.ring", GIVE, "pass")], "deadlock"),
}  # fmt: skip


DEFAULT = (
    "dropped wait",
    "dropped credit",
    "credit that nobody takes",
    "double write",
    "out of bounds",
    "dropped barrier",
    "early exit",
    "stale pages",
    "deadlock",
)
"""One fault of each kind, planted in the default run; the rest are slow."""

LATE = ("out of bounds", "deadlock")
"""Faults that the default run plants with DMAs that happen as late as their first wait."""

Plant = Callable[..., list[str]]


@pytest.fixture(scope="module")
def plant() -> Iterator[Plant]:
    """Run a case with planted faults, and return its findings."""
    with start([sys.executable, str(WORKER)]) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def plant(case: str, faults: list[tuple[str, str, str]], **how: str) -> list[str]:
            planted = [(TPU + module, old, new) for module, old, new in faults]
            job = {"faults": planted, "case": case} | how
            print(json.dumps(job), file=process.stdin, flush=True)
            findings = json.loads(process.stdout.readline())["findings"]
            assert isinstance(findings, list)
            return findings

        try:
            yield plant
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if quick else pytest.mark.slow)
        for name in FAULTS
        for mode in ("eager", "on_wait")
        for quick in [name in DEFAULT and (mode == "on_wait") == (name in LATE)]
    ],
)
def test_a_fault_is_found(plant: Plant, name: str, mode: str) -> None:
    case, faults, kind = FAULTS[name]
    findings = plant(case, faults, mode=mode)
    assert any(re.search(kind, text) for text in findings), findings


def test_a_dropped_barrier_is_seen_without_running(plant: Plant) -> None:
    findings = plant("all_gather x=8", [("runtime.topology", WAIT, "")], topology="v5e:2x4")
    assert findings == ["missing barrier: all_gather writes to another device first"]


def test_what_mosaic_cannot_take_is_found(plant: Plant) -> None:
    half = ("runtime.pipeline", ").astype(o.dtype)", ").astype(jnp.float16).astype(o.dtype)")
    (finding,) = plant("reduce_scatter x=8", [half], topology="v5e:2x4")
    assert "refused" in finding
    assert "cast: float16" in finding


@pytest.mark.slow
def test_what_does_not_fit_vmem_is_found(plant: Plant) -> None:
    big = ("runtime.pipeline", "1024, LANES", "8192, LANES")
    (finding,) = plant("all_gather_matmul x=8", [big], topology="v5e:2x4")
    assert "refused" in finding
    assert "vmem" in finding.lower()


def test_a_worker_that_dies_or_says_nothing_is_a_finding() -> None:
    job = {"case": "permute x=2", "mode": "eager"}
    with Workers([sys.executable, "-c", "raise SystemExit('no TPU')"]) as workers:
        assert workers.ask(job)["findings"] == ["crash: exit status 1: no TPU"]
    with Workers([sys.executable, "-c", "import time; time.sleep(600)"], 0.1) as workers:
        assert workers.ask(job)["findings"] == ["hang: no answer in 0.1 s"]
