"""Each part of the serving engine alone, on a mock runner: how long its own work takes.

    python benchmarks/engine.py                                    all parts
    python benchmarks/engine.py scheduler api --flame build/flame.svg

A part is a list of cases. All cases of a part are measured once, then all of
them again, and so on: a machine that slows down for a while touches every
case alike. The table shows each case's median, and the lowest and highest.

`--flame` runs the same under py-spy, which samples the stacks of this process
and its children (for `api`: server and engine). Figures of such a run are
disturbed by the sampling and not to be quoted.

Not handled: the model itself (see vs_peers.py), and parts of other machines.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from engine_parts.measure import measure, render

PARTS = ("scheduler", "kv_cache", "grammars", "executor", "sampler", "detokenizer", "api")
FLAME_RATE = 250  # samples per second
SHORTEST = 0.1  # seconds; the kernel brings CPU times up to date every few milliseconds


def main() -> int:
    """Read the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repetitions", type=int, default=7, help="of every case (7)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each repetition (0.5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--flame", type=Path, metavar="FILE.svg", help="write a flame graph")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {min(unknown)!r}; there are {', '.join(PARTS)}")
    if options.repetitions < 1:
        parser.error(f"--repetitions is {options.repetitions}; it must be at least 1")
    if options.seconds < SHORTEST:
        parser.error(f"--seconds is {options.seconds:g}; it must be at least {SHORTEST}")
    if options.flame is not None:
        return flame(options)
    rows = []
    for name in options.parts or PARTS:
        print(f"measuring {name}", file=sys.stderr)
        with import_module(f"engine_parts.{name}").cases() as cases:
            rows += measure(name, cases, options.repetitions, options.seconds)
    print(json.dumps([asdict(row) for row in rows], indent=2) if options.json else render(rows))
    return 0


def flame(options: argparse.Namespace) -> int:
    """Run the same without `--flame` under py-spy; returns its exit status."""
    py_spy = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if py_spy is None:
        sys.exit("--flame needs py-spy: pip install py-spy")
    options.flame.parent.mkdir(parents=True, exist_ok=True)
    again = [sys.executable, __file__, *options.parts]
    again += ["--repetitions", str(options.repetitions), "--seconds", str(options.seconds)]
    again += ["--json"] if options.json else []
    command = [py_spy, "record", "--subprocesses", "--rate", str(FLAME_RATE)]
    command += ["--format", "flamegraph", "--output", str(options.flame), "--", *again]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
