"""What the scripts of this folder have in common: their options, and the loop over their cases."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.report import Case, Report

CASE_SECONDS = 120.0
"""That a case may take, compiling included. Python cannot interrupt a kernel that hangs."""

Parts = dict[str, Callable[[Any, int], "Iterator[Case]"]]
"""By name: (scale, repetitions) -> cases."""

Loaded = tuple[Parts, Callable[[], Any]]
"""The parts, and what makes the scale that they take."""


def main(name: str, description: str, load: Callable[[bool], Loaded]) -> int:
    """Read the command line and run what it says; returns the exit status.

    Args:
        name: of the script, and of the files that it writes.
        description: its docstring, the first line of which is the report's heading.
        load: by whether it is tiny; imports torch and Triton.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", metavar="A,B", help="some of them (all)")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in the interpreter")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"for {name}.{{json,md}}")
    parser.add_argument("--seconds", type=float, default=420.0, help="to begin cases in (420)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each measurement (7)")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; it must be at least 1")
    # Both are read once, by Triton and by the driver, when they are loaded.
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

    import torch

    from harness.report import Report

    parts, scale_of = load(options.tiny)
    chosen = options.parts.split(",") if options.parts is not None else list(parts)
    if unknown := sorted(set(chosen) - set(parts)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(parts)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs the same without one")
    heading = description.splitlines()[0].rstrip(".")
    report = Report(name, heading, options.output, sys.argv[1:], tiny=options.tiny)
    begin = time.monotonic()
    scale = scale_of()
    for part in chosen:
        for case in parts[part](scale, options.repetitions):
            left = options.seconds - (time.monotonic() - begin)
            if left <= 0:
                report.leave_out(part, case.name, f"{options.seconds:g} s are over")
            else:
                watch = watchdog(report, CASE_SECONDS)
                report.begin(part, case.name)
                report.add(part, case)
                watch.cancel()
    report.finish()
    return 0 if report.good else 1


def watchdog(report: Report, seconds: float) -> threading.Timer:
    """Writes the report and ends the process, unless it is cancelled in time."""

    def end() -> None:
        report.hung()
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer
