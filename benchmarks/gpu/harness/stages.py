"""Stages: processes with a deadline that run cases, one after the other.

    parent                              child (child.py)
    starts it                      ──►  lists its cases
    notes the case                 ◄──  begins a case
    adds the row to the report     ◄──  ends the case
    ends it after a deadline,
    starts another for the rest

Messages are lines of JSON in a pipe. A kernel that hangs cannot be interrupted in its process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from harness.report import Report, Row, State

CASE_SECONDS = 120.0
"""Maximum time for a case, with compilation."""


@dataclass(frozen=True)
class Stage:
    """Cases that share a process.

    Attributes:
        name: in the report's log.
        parts: names of parts.py.
        seconds: time for the stage; what it leaves goes to the next ones.
        cases: a regular expression; other cases are left out. Not with tiny shapes.
    """

    name: str
    parts: tuple[str, ...]
    seconds: float
    cases: str = ""

    def has(self, case: str, *, tiny: bool) -> bool:
        """Return whether a case belongs to the stage."""
        return tiny or re.search(self.cases, case) is not None


@dataclass
class Child:
    """What a child has told.

    Attributes:
        cases: part and name of each case.
        begun: number of begun cases.
        done: number of cases with a row.
        started: when the last message came, on the monotonic clock.
    """

    cases: list[tuple[str, str]] = field(default_factory=list)
    begun: int = 0
    done: int = 0
    started: float = field(default_factory=time.monotonic)


def run_stages(
    report: Report,
    stages: Sequence[Stage],
    command: Sequence[str],
    seconds: float,
    case_seconds: float = CASE_SECONDS,
) -> None:
    """Run all stages, each in its processes, and add their rows.

    Args:
        report: gets the rows.
        stages: in their order.
        command: of a child, without the stage.
        seconds: for all stages.
        case_seconds: maximum time without a message from a child.
    """
    end = time.monotonic() + seconds
    spare = 0.0
    for stage in stages:
        begin = time.monotonic()
        deadline = min(end, begin + stage.seconds + spare)
        print(f"{stage.name}: {deadline - begin:.0f} s", file=sys.stderr, flush=True)
        _run_stage(report, stage, command, deadline, case_seconds)
        spare = max(0.0, deadline - time.monotonic())


def compile_beforehand(stages: Sequence[Stage], command: Sequence[str], seconds: float) -> None:
    """Run all stages side by side, and drop what they say: their kernels are compiled then.

    Triton compiles on one core for each process, and a GPU would wait for it case by case.

    Args:
        stages: all of the day.
        command: of a child, without the stage.
        seconds: when those that still run are ended.
    """
    end = time.monotonic() + seconds
    print(f"compiling beforehand: at most {seconds:.0f} s", file=sys.stderr, flush=True)
    with open(os.devnull, "wb") as nowhere, contextlib.ExitStack() as stack:
        processes = []
        for stage in stages:
            about = json.dumps({**asdict(stage), "first": 0, "pipe": nowhere.fileno()})
            process = subprocess.Popen(
                [*command, "--child", about],
                stdout=nowhere,
                stderr=nowhere,
                pass_fds=[nowhere.fileno()],
                start_new_session=True,
            )
            stack.callback(process.wait)
            stack.callback(_kill, process)
            processes.append(process)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))


def _run_stage(
    report: Report, stage: Stage, command: Sequence[str], deadline: float, case_seconds: float
) -> None:
    first, known = 0, None
    while known is None or first < len(known):
        child, why = _run_child(report, stage, command, first, deadline, case_seconds)
        if not child.cases:  # it could not even be started
            report.add(Row(stage.name, "its process", "failed", reason=why or "it had no cases"))
            return
        known = child.cases
        if why and child.begun > child.done:
            part, case = known[child.begun - 1]
            seconds = round(time.monotonic() - child.started, 2)
            state: State = "failed" if why.startswith("its process") else "hung"
            report.add(Row(part, case, state, reason=why, seconds=seconds))
        elif why and child.done == first and time.monotonic() < deadline:
            report.add(Row(*known[first], "failed", reason=why))  # else it might never go on
            child.begun += 1
        first = max(child.begun, child.done)
        if time.monotonic() >= deadline:
            for part, case in known[first:]:
                report.add(Row(part, case, "left out", reason="the stage's time is over"))
            return


def _run_child(
    report: Report,
    stage: Stage,
    command: Sequence[str],
    first: int,
    deadline: float,
    case_seconds: float,
) -> tuple[Child, str]:
    """Run the cases from the one with number `first`; return what was told, and a failure."""
    child = Child(begun=first, done=first)
    read, write = os.pipe()
    about = json.dumps({**asdict(stage), "first": first, "pipe": write})
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, read)
        process = subprocess.Popen(
            [*command, "--child", about],
            stdout=sys.stderr,
            pass_fds=[write],
            start_new_session=True,  # its own processes end with it
        )
        stack.callback(process.wait)
        stack.callback(_kill, process)
        os.close(write)
        for message in _messages(read, child, deadline, case_seconds):
            _note(report, child, message)
        if child.done == len(child.cases) > 0:
            return child, ""
        if time.monotonic() >= deadline:
            return child, "the stage's time is over"
        if time.monotonic() - child.started >= case_seconds:
            return child, f"no result after {case_seconds:g} s"
        status = process.wait()
    return child, f"its process ended with status {status}"


def _messages(
    read: int, child: Child, deadline: float, case_seconds: float
) -> Iterator[dict[str, Any]]:
    """Yield messages until the child has closed its end, or a deadline is over."""
    buffer = b""
    while True:
        now = time.monotonic()
        left = min(deadline, child.started + case_seconds) - now
        if left <= 0 or not select.select([read], [], [], left)[0]:
            return
        data = os.read(read, 1 << 16)
        if not data:
            return
        child.started = time.monotonic()
        *lines, buffer = (buffer + data).split(b"\n")
        yield from map(json.loads, lines)


def _note(report: Report, child: Child, message: dict[str, Any]) -> None:
    match message:
        case {"about": about}:
            report.describe(about)
        case {"cases": cases}:
            child.cases = [(part, case) for part, case in cases]
        case {"begin": number}:
            child.begun = number + 1
            print("{}: {}".format(*child.cases[number]), file=sys.stderr, flush=True)
        case {"row": row}:
            child.done = child.begun
            report.add(Row.of(row))


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
