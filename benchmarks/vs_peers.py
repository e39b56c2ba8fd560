"""weft and its peers raced in one run, on the same cores, with the machine's limits beside.

    make bench-peers                                 installs what is missing, and runs it all
    python benchmarks/vs_peers.py --quick            one repetition of the dense shape
    python benchmarks/vs_peers.py --render RUN.json  the page and picture of an earlier run

For each shape all contestants are started, and the starts timed. Then, in each
repetition and for each load, they take turns with the same fresh prompts,
in an order that rotates; whoever waits is stopped. The table on stdout, the
document, the page and the picture come from the samples alone. What is known
is saved after each repetition.

Not handled: GPUs, several machines, other processes on the cores (look at the
spread, and run again).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from make_checkpoint import make_checkpoint
from peers import contestants, limits, report, table
from peers.checkpoint import Checkpoint
from peers.contestants import Contestant, Missing
from peers.gguf_file import GgufKind
from peers.loads import Driver, HttpDriver, PipeDriver, Sizes
from peers.process import Contender, PeerError, free_port, start

from weft.errors import ConfigError
from weft.serving.cli.bench.report import Target
from weft.serving.cli.bench.workload import plain_token_ids

ROOT = Path(__file__).parent.parent
LOADS = {
    "dense": ("one", "many", "crowd", "prompt"),
    "moe": ("one", "many"),
    "int4": ("one", "many", "prompt"),
}
SHAPES = {"dense": "qwen2.5-0.5b", "moe": "moe-1b", "int4": "qwen2.5-0.5b"}
ROUNDED: dict[str, GgufKind] = {
    "int4": "Q4_0"
}  # weft rounds the weights to the shape's format; llama.cpp has this one
SLACK = 600_000_000  # bytes that weft may take besides weights and cache
START_BOUND = 3.0  # seconds
ROUNDS = {"one": 4, "prompt": 4}  # in a repetition: short turns, for the machine's speed changes


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant that is running; stopped when it is not its turn."""

    racer: Contestant
    contender: Contender
    driver: Driver


def main() -> int:
    """Read the command line; returns the exit status."""
    options = parse()
    if options.render:
        publish(report.Run.load(options.render), options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants are ended
    os.sched_setaffinity(0, options.cores)
    run = report.Run(shlex.join(["python", *sys.argv]), machine(options.cores), options.target)
    try:
        for shape in options.shapes:
            race(shape, field(shape, options, run), options, run)
    except (PeerError, ConfigError) as error:
        print(f"vs_peers: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    publish(run, options)
    return 0


def parse() -> argparse.Namespace:
    """The command line; see the help of each option."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="DIR", help="write cpu.md and cpu.png there")
    add("--json", type=Path, metavar="FILE", default=ROOT / "build/peers/run.json",
        help="every sample; logs go beside it (build/peers/run.json)")  # fmt: skip
    add("--render", type=Path, metavar="FILE", help="measure nothing: read this document")
    add("--quick", action="store_true", help="one repetition, fewer requests, dense shape only")
    add("--repetitions", type=int, metavar="N", help="of every load (3)")
    add("--only", metavar="NAMES", help="contestants besides weft: vllm,llama.cpp,transformers")
    add("--shapes", metavar="NAMES", help="dense,moe,int4 (all)")
    for shape, name in SHAPES.items():
        add(f"--{shape}", type=Path, metavar="DIR", help=f"its checkpoint; else a made-up {name}")
    add("--vllm-python", type=Path, default=ROOT / "build/peers/vllm/bin/python", metavar="FILE",
        help="of an environment with vLLM (build/peers/vllm/bin/python)")  # fmt: skip
    add("--llama-server", default="llama-server", metavar="FILE", help="llama.cpp's (on PATH)")
    add("--cores", default="", metavar="LIST", help="such as 0,1 (all that this process may use)")
    add(
        "--cache",
        type=int,
        default=1 << 30,
        metavar="BYTES",
        help="KV cache of weft and vLLM (1 GiB)",
    )
    add("--target", default="ttft=10,tpot=0.25", help="what goodput counts (ttft=10,tpot=0.25)")
    options = parser.parse_args()
    quick = options.quick
    options.repetitions = options.repetitions or (1 if quick else 3)
    options.shapes = (options.shapes or ("dense" if quick else ",".join(SHAPES))).split(",")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes names {min(unknown)!r}; it knows {', '.join(SHAPES)}")
    known = {"vllm", "llama.cpp", "transformers"}
    options.only = known if options.only is None else set(filter(None, options.only.split(",")))
    if unknown := options.only - known:
        parser.error(f"--only names {min(unknown)!r}; it knows {', '.join(sorted(known))}")
    options.cores = sorted(map(int, options.cores.split(","))) if options.cores else sorted(
        os.sched_getaffinity(0)
    )  # fmt: skip
    options.sizes = Sizes().quick() if quick else Sizes()
    return options


def field(shape: str, options: argparse.Namespace, run: report.Run) -> list[Contestant]:
    """Who races: weft and those of the wanted that are here; the others are noted in `run`."""
    cores, cache = options.cores, options.cache
    found: dict[str, Contestant | Missing] = {
        "weft": contestants.weft(cache, shape if shape in ROUNDED else "none")
    }
    if "vllm" in options.only and shape not in ROUNDED:
        found["vllm"] = contestants.vllm(options.vllm_python, cache, cores)
    if "llama.cpp" in options.only:
        files = options.json.parent
        found["llama.cpp"] = contestants.llama_cpp(
            options.llama_server, cores, files, ROUNDED.get(shape, "BF16")
        )
    if "transformers" in options.only and shape not in ROUNDED:
        found["transformers"] = contestants.transformers(cores)
    for one in found.values():
        if isinstance(one, Missing):
            run.missing[one.name] = f"not found: {one.remedy}"
            say(f"{one.name} not found: {one.remedy}")
    return [one for one in found.values() if isinstance(one, Contestant)]


def race(
    shape: str, racers: list[Contestant], options: argparse.Namespace, run: report.Run
) -> None:
    """All loads of one shape; adds samples to `run`, and saves it after each repetition."""
    checkpoint = Checkpoint.read(getattr(options, shape) or made(SHAPES[shape]))
    sizes: Sizes = options.sizes
    with contextlib.ExitStack() as stack:
        entries = [
            stack.enter_context(entered(racer, shape, checkpoint, options, run)) for racer in racers
        ]
        bytes_read = checkpoint.bytes_read(sizes.prompt + sizes.output / 2)
        seed = 0
        for repetition in range(options.repetitions):
            loads = [load for load in LOADS[shape] for _ in range(ROUNDS.get(load, 1))]
            for number, load in enumerate(loads):
                if load == "one" and shape not in ROUNDED:
                    found = measured_limits(len(options.cores))
                    run.bandwidth.append(found.bandwidth)
                    run.gemm.append(found.gemm)
                    limit = found.bandwidth / bytes_read
                    run.add(shape, table.MEMORY_LIMIT, {"decode_rate": limit})
                seed += 1
                turn = (repetition + number) % len(entries)
                for entry in entries[turn:] + entries[:turn]:
                    if load not in entry.racer.skips:
                        take_turn(entry, shape, load, seed, run)
            run.repetitions = repetition + 1
            run.save(options.json)
        for entry in entries:
            entry.contender.thaw()
            run.add(shape, entry.racer.name, {"resident": float(entry.contender.resident())})
            entry.contender.freeze()
    bound = float(checkpoint.weights + options.cache + SLACK)
    run.add(shape, table.RESIDENT_BOUND, {"resident": bound})
    run.add(shape, table.START_BOUND, {"ready": START_BOUND})
    first = run.samples[shape]["weft"].get("first_ttft", [])
    run.samples[shape][table.FIRST] = {"again_ttft": first}
    if shape in ROUNDED and "dense" in run.samples:
        plain = run.samples["dense"]["weft"].get("first_ttft", [])
        run.samples[shape][table.BFLOAT16] = {"first_ttft": plain}
    run.save(options.json)


@contextlib.contextmanager
def entered(
    racer: Contestant,
    shape: str,
    checkpoint: Checkpoint,
    options: argparse.Namespace,
    run: report.Run,
) -> Iterator[Entry]:
    """Start a contestant as often as its start is timed; the last start stays, stopped."""
    for _ in range(racer.starts - 1):
        with started(racer, shape, checkpoint, options, run):
            pass
    with started(racer, shape, checkpoint, options, run) as entry:
        command = shlex.join(map(str, entry.contender.process.args))  # type: ignore[arg-type]
        environment = " ".join(f"{k}={v}" for k, v in racer.environment.items())
        run.contestants.append(
            {
                "name": racer.name,
                "version": racer.version,
                "shape": shape,
                "command": f"{environment} {command}".strip(),
                "remark": racer.remark,
            }
        )
        take_turn(entry, shape, "one", 0, None)  # warm up
        yield entry


@contextlib.contextmanager
def started(
    racer: Contestant,
    shape: str,
    checkpoint: Checkpoint,
    options: argparse.Namespace,
    run: report.Run,
) -> Iterator[Entry]:
    """Start a contestant, and time it; yields when it answers, stopped."""
    port = free_port()
    command = racer.command(checkpoint, port)
    log = options.json.parent / f"logs/{racer.name}-{shape}.log"
    ids = plain_token_ids(str(checkpoint.path))
    begin = time.perf_counter()
    with start(
        racer.name, command, environment=racer.environment, log=log, pipes=not racer.serves_http
    ) as contender:
        driver: Driver
        if racer.serves_http:
            url = f"http://127.0.0.1:{port}/v1"
            body = {"model": contestants.MODEL, "prompt": ids[:8], "max_tokens": 1}
            contender.wait_ready(f"{url}/completions", body, racer.timeout)
            target = Target.parse(options.target)
            driver = HttpDriver(url, ids, target, options.sizes)
        else:
            driver = PipeDriver(contender, ids, options.sizes)
            driver.wait_ready()
        seconds = time.perf_counter() - begin
        say(f"{shape}: {racer.name} ready after {seconds:.1f} s")
        run.add(shape, racer.name, {"ready": seconds})
        contender.freeze()
        yield Entry(racer, contender, driver)


def take_turn(entry: Entry, shape: str, load: str, seed: int, run: report.Run | None) -> None:
    """One load on one contestant; its figures go to `run`, if there is one."""
    entry.contender.thaw()
    begin = time.perf_counter()
    try:
        figures = entry.driver.run(load, seed)
    except PeerError as error:
        raise entry.contender.fail(f"failed at load {load!r}: {error}") from error
    finally:
        entry.contender.freeze()
    if run is not None:
        run.add(shape, entry.racer.name, figures)
        values = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
        say(f"{shape}: {load} {entry.racer.name}: {values} ({time.perf_counter() - begin:.0f} s)")


def measured_limits(threads: int) -> limits.Limits:
    """The machine's limits, from a process of its own: its memory is given back."""
    command = [sys.executable, "-m", "peers.limits", str(threads)]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, check=True)
    found = limits.parse(done.stdout)
    say(f"limits: {found.bandwidth / 1e9:.1f} GB/s, {found.gemm / 1e9:.0f} GFLOP/s")
    return found


def made(shape: str) -> Path:
    """The checkpoint of a listed shape; kept for the next run."""
    path = ROOT / "build/checkpoints" / shape
    if not (path / "model.safetensors").exists():
        make_checkpoint(shape, path)
    return path


def machine(cores: list[int]) -> dict[str, str]:
    """What the figures depend on."""
    import torch

    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    flags = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    text = Path("/proc/cpuinfo").read_text()
    has = ", ".join(flag for flag in flags if f" {flag} " in text)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1024**3
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": f"{models[0] if models else platform.machine()}, {has}",
        "cores": f"{len(cores)} ({','.join(map(str, cores))})",
        "memory": f"{memory:.0f} GiB",
        "software": f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}",
    }


def publish(run: report.Run, options: argparse.Namespace) -> None:
    """Print the tables, and write the page and the picture if a place is given."""
    print(report.goals_table(run), report.figures_table(run), sep="\n\n")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        report.plot(run, options.output / "cpu.png")
        (options.output / "cpu.md").write_text(report.markdown(run, "cpu.png"))


def say(text: str) -> None:
    """Progress, on stderr."""
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
