"""How long a checkpoint takes to load, beside plain reads of its files.

    python benchmarks/loading.py CHECKPOINT --repeat 5

Each round reads the files as dd does, and then loads the model in a new process; both from a cold
page cache, then from a warm one. So a busy machine slows both. The cache is dropped for these files
only, with posix_fadvise. Prints medians: seconds, CPU seconds, the rate as a fraction of the plain
read's, and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

BLOCK = 16 * 2**20
"""Bytes of one read, as `dd bs=16M`."""
MIB = 2**20

LOAD = """
import json, os, sys, time
began = time.perf_counter(), time.process_time()
from pathlib import Path
import torch
from weft.models.checkpoint.locate import read_spec
from weft.models.torch.runner import TorchRunner

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

phases = {}
def phase(name):
    global began
    now = time.perf_counter(), time.process_time()
    phases[name] = [b - a for a, b in zip(began, now)]
    began = time.perf_counter(), time.process_time()

phase("imports")
path, quantization, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
spec = read_spec(path).for_context(512)
phase("config")
before = memory("VmRSS")
runner = TorchRunner.load(
    path, spec, dtype="auto", quantization=quantization, threads=threads,
    block_size=16, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512)
phase("load")
peak, rest = memory("VmHWM") - before, memory("VmRSS") - before
runner.allocate_kv_cache(64)
runner.warm_up()
phase("warm-up")
print(json.dumps({"phases": phases, "peak": peak, "rest": rest}))
"""


def files_of(path: Path) -> list[Path]:
    """Return a checkpoint's files with weights."""
    return sorted(path.glob("*.safetensors")) if path.is_dir() else [path]


def drop(files: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: Sequence[Path]) -> int:
    """Read files from front to back, into one buffer; return the bytes."""
    block, done = bytearray(BLOCK), 0
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(block):
                done += count
    return done


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return a call's seconds, and the process's CPU seconds."""
    began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began[0], time.process_time() - began[1]


def main() -> None:
    """Run the rounds, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--repeat", type=int, default=5, help="rounds (5)")
    parser.add_argument("--quantization", default="none", help="of the matrices (none)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--path", action="append", default=[], help="weft's folders to compare")
    options = parser.parse_args()
    files = files_of(options.checkpoint)
    size = sum(file.stat().st_size for file in files)
    order = [str(options.checkpoint), options.quantization, str(options.threads)]
    print(f"{options.checkpoint.name}: {size / MIB:,.0f} MiB, {options.threads} threads")
    folders = options.path or [""]
    rows: dict[tuple[str, str], list[dict[str, tuple[float, float]]]] = {}
    memory: dict[str, tuple[int, int]] = {}
    for _ in range(options.repeat):
        for how in ("cold", "warm"):
            for folder in folders:
                if how == "cold":
                    drop(files)
                plain = timed(lambda: read(files))
                if how == "cold":
                    drop(files)
                done = subprocess.run(
                    [sys.executable, "-c", LOAD, *order],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    env=os.environ | ({"PYTHONPATH": folder} if folder else {}),
                )
                result = json.loads(done.stdout)
                rows.setdefault((folder, how), []).append({"read": plain} | result["phases"])
                memory[folder] = result["peak"], result["rest"]
    print("| | read | imports | config | load | warm-up | rate / read | CPU s of load |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for (folder, how), rounds in rows.items():
        names = list(rounds[0])
        seconds = {name: median(each[name][0] for each in rounds) for name in names}
        busy = median(each["load"][1] for each in rounds)
        ratio = median(each["read"][0] / each["load"][0] for each in rounds)
        cells = " | ".join(f"{seconds[name]:.2f} s" for name in names)
        print(f"| {how} {folder} | {cells} | {ratio:.2f} | {busy:.2f} |")
    for folder, (peak, rest) in memory.items():
        print(
            f"{folder or 'memory'}: peak {peak / MIB:,.0f} MiB, model {rest / MIB:,.0f} MiB, "
            f"{peak / rest:.2f} times the model"
        )


if __name__ == "__main__":
    main()
