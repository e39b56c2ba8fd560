"""The error of `weft plan` on this machine's CPU: predicted and measured steps.

    python benchmarks/plan.py --output docs/benchmarks/plan.md

Each server (a model's shape, a layout, a quantisation) runs in a process of its own and times its
steps. The fit and the page come from the samples alone; --render makes them again.

Not handled: GPUs and TPUs; several machines.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
from make_checkpoint import make_checkpoint
from peers import limits
from plan_parts.report import Run, page
from plan_parts.servers import Measured
from vs_peers import machine

HERE = Path(__file__).parent
SHAPES = ("qwen2.5-0.5b", "moe-1b")


def main() -> int:
    """Read the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FILE", help="write the page there; else to stdout")
    add("--json", type=Path, metavar="FILE", help="write the samples there")
    add("--render", type=Path, metavar="FILE", help="measure nothing: read these samples")
    add("--quick", action="store_true", help="the bundled model without ranks only")
    add("--checkpoints", type=Path, metavar="DIR", default=HERE.parent / "build/plan",
        help="where the made-up checkpoints are, or will be (build/plan)")  # fmt: skip
    options = parser.parse_args()
    run = measure(options) if options.render is None else read(options.render)
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(run))
    text = page(run)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)
    return 0


def read(path: Path) -> Run:
    """Return an earlier run's samples."""
    return msgspec.json.decode(path.read_bytes(), type=Run)


def measure(options: argparse.Namespace) -> Run:
    """Measure the machine and all servers."""
    cores = sorted(os.sched_getaffinity(0))
    command = shlex.join(["python", *sys.argv])
    most = limits.measure(len(cores))
    servers = list(map(measure_apart, wanted(options)))
    return Run(command, machine(cores), most, limits.products(len(cores), "float32"), servers)


def wanted(options: argparse.Namespace) -> list[tuple[str, int, str]]:
    """Return each server's model, ranks and quantisation; missing checkpoints are made."""
    found = [("weft-demo", 1, "none")]
    if options.quick:
        return found
    found.append(("weft-demo", 2, "none"))
    for shape in SHAPES:
        path = options.checkpoints / shape
        if not path.exists():
            make_checkpoint(shape, path)
        found += [(str(path), tp, quant) for tp in (1, 2) for quant in ("none", "int8")]
    return found


def measure_apart(server: tuple[str, int, str]) -> Measured:
    """Measure a server in a process of its own."""
    print("measuring", *server, file=sys.stderr)
    model, tp, quantization = server
    command = [sys.executable, "-m", "plan_parts.servers", model, str(tp), quantization]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, check=True)
    return msgspec.json.decode(done.stdout, type=Measured)


if __name__ == "__main__":
    sys.exit(main())
