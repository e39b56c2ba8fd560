"""The checks that need a GPU: one command of nine minutes, most important figures first.

    python benchmarks/gpu/day.py --output build/day                on a GPU
    python benchmarks/gpu/day.py --part step,few_rows              only these, with all their cases
    python benchmarks/gpu/day.py --tiny                            its logic, on a CPU

First, all parts run side by side for a minute, which fills Triton's cache. Without --part, the day
then has six stages:

    machine    the rates of a copy and of a product, and the time of a launch
    right      weft-demo and weft-demo-moe sample the same tokens on the GPU as on the CPU
    step       a step of an 8B model: its time, its kernels, and its share of the bandwidth
    variants   other tiles and torch's kernels for products, attention and experts
    overlap    what waiting costs, and overlapped products over their parts
    ranks      ops on 2 and 8 virtual ranks: threads on this GPU, each with its own streams

Each stage is a process with a deadline. A case that hangs or breaks its process costs only that
case: the stage goes on with the next one. Rows are written as JSON and markdown after each case.

Exit status 1: a case failed, hung or missed its goal.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from harness.report import Report
from harness.stages import Stage, compile_beforehand, run_stages

SECONDS = 540.0
"""The day's length: a GPU is often lent for ten minutes at a time."""

BEFOREHAND = 60.0
"""Part of it in which all stages run side by side, and fill Triton's cache."""

DAY = (
    Stage("machine", ("machine",), 20),
    Stage("right", ("tokens",), 60),
    Stage("step", ("step", "mixed"), 150),
    Stage("variants", ("few_rows", "decode", "experts"), 110, cases="8B|Qwen3.* 64 x 1|512 rows"),
    Stage("overlap", ("waiting", "overlap"), 70, cases="square|Llama-70B"),
    Stage(
        "ranks",
        ("correct",),
        70,
        cases=r"^(all_gather_matmul|matmul_(reduce_scatter|all_reduce)|moe_dispatch_combine"
        r"|distributed_decode_attention), [28] ranks",
    ),
)


def main() -> int:
    """Run the day, or some of its parts; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", metavar="A,B", help="only these parts, with all their cases")
    parser.add_argument("--cases", metavar="REGEX", default="", help="with --part: only these")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, in the interpreter")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="for day.{json,md}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all stages (540)")
    parser.add_argument("--repetitions", type=int, default=7, help="of each measurement (7)")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # one stage, in its own process
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; it must be at least 1")
    if options.child is not None:
        from harness.child import run_child

        return run_child(options.child, tiny=options.tiny, repetitions=options.repetitions)
    from parts import FAMILY

    chosen = options.part.split(",") if options.part is not None else []
    if unknown := sorted(set(chosen) - set(FAMILY)):
        parser.error(f"--part names {unknown[0]!r}; the parts are {', '.join(FAMILY)}")
    if options.cases and not chosen:
        parser.error("--cases needs --part")
    stages = tuple(Stage(part, (part,), options.seconds, options.cases) for part in chosen) or DAY
    command = [sys.executable, str(Path(__file__)), "--repetitions", str(options.repetitions)]
    if options.tiny:
        command.append("--tiny")
    # Triton and the driver read these once, when they are loaded.
    os.environ["TRITON_INTERPRET"] = "1" if options.tiny else "0"
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    report = Report(options.output, sys.argv[1:])
    left = options.seconds
    if not options.tiny:
        begin = time.monotonic()
        once = [*command, "--repetitions", "1"]
        compile_beforehand(stages, once, min(BEFOREHAND, left / 4))
        left -= time.monotonic() - begin
    run_stages(report, stages, command, left)
    report.finish()
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
