"""Everything that one GPU can show of the overlapped ops, in one call of under 8 minutes.

    python benchmarks/gpu/overlap.py --output build/overlap        on a GPU
    python benchmarks/gpu/overlap.py --tiny                        its logic, without one

    correct    each op equals its oracle on 2, 4 and 8 virtual ranks (threads of this process on
               one GPU, each with streams of its own), some ranks slow
    product    the persistent product alone over torch.matmul; the goal is 0.95 of its speed
    waiting    the product whose signals are all set, over the same product without waits: at
               most 2% longer
    overlap    one rank's call over its parts one after the other (collective, then product, or
               the other way round), and over the decomposed op

For `waiting` and `overlap`, one rank runs and finds all signals of the others
set; what it sends goes to the same GPU's memory. That shows what overlapping
does to the product and what waiting costs. It does not show a link's bandwidth:
NVLink needs a machine with several GPUs.

Each row is printed and written as soon as it is there. When a kernel hangs, a
watchdog writes the report with what was being done, and ends the process with
status 3. Exit status 1: a result was wrong or a goal was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from pathlib import Path

CASE_SECONDS = 120.0
"""That a case may take, compiling included. Python cannot interrupt a kernel that hangs."""


def main() -> int:
    """Read the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="correct,product,waiting,overlap", metavar="A,B")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in the interpreter")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for overlap.{json,md}")
    parser.add_argument("--seconds", type=float, default=420.0, help="to begin cases in (420)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each measurement (7)")
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; it must be at least 1")
    # Both are read once, by Triton and by the driver, when they are loaded.
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"

    import torch
    from overlap_parts.parts import PARTS
    from overlap_parts.report import Report
    from overlap_parts.scale import TINY, full

    known = list(PARTS)
    parts = options.parts.split(",")
    if unknown := sorted(set(parts) - set(known)):
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(known)}")
    if not options.tiny and not torch.cuda.is_available():
        parser.error("there is no GPU; --tiny runs the same without one")
    report = Report(options.output, sys.argv[1:], tiny=options.tiny)
    begin = time.monotonic()
    scale = TINY if options.tiny else full()
    for part in parts:
        for case in PARTS[part](scale, options.repetitions):
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


def watchdog(report: object, seconds: float) -> threading.Timer:
    """Writes the report and ends the process, unless it is cancelled in time."""

    def end() -> None:
        report.hung()  # type: ignore[attr-defined]
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    return timer


if __name__ == "__main__":
    sys.exit(main())
