"""`weft check`: the checkers in kernels/check, with results as tables or JSON.

Progress goes to stderr. The exit status is 1 if a check finds a problem.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.kernels.check.aot import Compiled, Extent
    from weft.kernels.check.suite import Outcome

Item = TypeVar("Item")

BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")

_ONLY = click.option("--only", multiple=True, metavar="OP", help="only this op; repeatable")
_TARGET = click.option("--target", multiple=True, metavar="NAME", help="only this; repeatable")


@click.group(invoke_without_command=True)
@click.pass_context
def check(context: click.Context) -> int:
    """Check the overlapped kernels, without a GPU or a TPU.

    Needs Triton; `tpu` needs JAX instead. Exits with 1 if a check finds a problem. docs/kernels.md
    explains the checks.

    \b
    weft check kernels --world-size 2,3
    weft check aot --target sm_90
    weft check timeline all_gather_matmul -o overlap.svg
    weft check tpu --only all_reduce
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    return 0


@check.command("kernels")
@_ONLY
@click.option("--world-size", default="1,2,3,4", metavar="N,...", help="ranks  [default: 1,2,3,4]")
@click.option(
    "--seeds", default="3", metavar="N|A-B", help="number of seeds, or first-last  [default: 3]"
)
@click.option("--json", "as_json", is_flag=True, help="write JSON, with every check's shapes")
def check_kernels(only: tuple[str, ...], world_size: str, seeds: str, as_json: bool) -> int:
    """Run every op on several ranks, compare it with its oracle, look for races and hangs.

    The ranks take turns in Triton's interpreter. The seed chooses the order, the shapes, the dtype
    and the slow ranks, so a seed reproduces what it found.

    \b
    weft check kernels
    weft check kernels --only all_gather_matmul --world-size 8 --seeds 100
    weft check kernels --only all_gather_matmul --world-size 8 --seeds 41-41
    """
    return kernels(only, world_size, seeds, as_json=as_json)


@check.command("aot")
@_TARGET
@_ONLY
@click.option("--quick", is_flag=True, help="one call of each op: a minute")
@click.option("--all", "every", is_flag=True, help="every tile that tuning may choose: hours")
@click.option("--json", "as_json", is_flag=True, help="write JSON, with each kernel's constants")
def check_aot(
    target: tuple[str, ...], only: tuple[str, ...], quick: bool, every: bool, as_json: bool
) -> int:
    """Compile every kernel for its GPUs: sm_80, sm_90, sm_100 and gfx942.

    Problems are spilled registers, products without tensor cores, and signals that can arrive
    before their data.

    \b
    weft check aot
    weft check aot --target sm_90 --only matmul_reduce_scatter --json
    """
    if quick and every:
        raise ConfigError("--quick and --all were both given; give one of them")
    return aot(target, only, "quick" if quick else "all" if every else "some", as_json=as_json)


@check.command("timeline")
@click.argument("op", metavar="OP")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="a picture (.svg), or a trace for https://ui.perfetto.dev (.json)",
)
@click.option(
    "--world-size", default=4, type=click.IntRange(1, 16), metavar="N", help="ranks  [default: 4]"
)
def check_timeline(op: str, output: Path, world_size: int) -> int:
    """Draw how OP hides communication: what each rank does, and when it waits.

    Time is virtual: order and waits are real, but each length only counts the numbers moved.

    \b
    weft check timeline all_gather_matmul -o overlap.svg
    weft check timeline matmul_reduce_scatter --world-size 8 -o overlap.json
    """
    return timeline(op, output, world_size)


@check.command("tpu")
@_ONLY
@_TARGET
@click.option("--json", "as_json", is_flag=True, help="write JSON")
def check_tpu(only: tuple[str, ...], target: tuple[str, ...], as_json: bool) -> int:
    """Run every TPU op on 1 to 8 interpreted devices, and compile it for real TPUs.

    The interpreter finds wrong numbers, races, deadlocks, signals without a wait, and access to
    devices that are not ready. The compilers for v5e:2x4, v5p:2x2x1, v6e:2x4 and tpu7x:2x2x1 find
    code that they refuse. See docs/tpu.md.

    \b
    weft check tpu
    weft check tpu --only all_gather_matmul --target v5e:2x4
    """
    return tpu(only, target, as_json=as_json)


def kernels(ops: Sequence[str], world_sizes: str, seeds: str, *, as_json: bool) -> int:
    """Run every op under the race detector, and compare it with its oracle.

    Args:
        ops: names of ops; none means all.
        world_sizes: numbers of ranks, such as "1,2,4".
        seeds: "3" for seeds 0 to 2, "5-9" for seeds 5 to 9.

    Raises:
        ConfigError: a value is invalid, or Triton is not installed.
    """
    _interpret()
    from weft.kernels.check import suite

    sizes = [_number("--world-size", size) for size in world_sizes.split(",")]
    to_do = suite.checks(ops, sizes, _seeds(seeds))
    outcomes = [suite.perform(check) for check in _progress("checks", to_do, len(to_do))]
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=2))
    else:
        _print_outcomes(outcomes)
    return int(any(outcome.findings for outcome in outcomes))


def aot(targets: Sequence[str], ops: Sequence[str], extent: Extent, *, as_json: bool) -> int:
    """Compile every kernel for the targets; none means all targets of the installed Triton.

    Args:
        extent: number of calls for each op: see `aot.cases`.

    Raises:
        ConfigError: a target or an op does not exist, or Triton is not installed.
        WeftError: the compiler crashed.
    """
    _interpret()  # only in this process; other processes compile
    from weft.kernels.check.aot import compile_all, supported_targets
    from weft.kernels.check.ops.table import named
    from weft.kernels.gpu import lacks_triton_for_amd

    named(ops)
    if not targets:
        targets = supported_targets()
        if lack := lacks_triton_for_amd():
            print(f"weft: leaving out gfx942: {lack}", file=sys.stderr)
    rows = list(_progress("kernels", compile_all(targets, ops, extent=extent)))
    rows.sort(key=lambda row: targets.index(row.target))
    if as_json:
        print(json.dumps([asdict(row) | {"problems": row.problems} for row in rows], indent=2))
    else:
        _print_compiled(rows)
    return int(any(row.problems for row in rows))


def timeline(op: str, output: Path, world_size: int) -> int:
    """Draw the work and the waits of each rank during one call of an op.

    Raises:
        ConfigError: the op does not exist, the output's suffix is unknown, its directory does not
            exist, or Triton is not installed.
    """
    if not output.parent.is_dir():
        raise ConfigError(f"--output is {output}; there is no directory {output.parent}")
    _interpret()
    import torch

    from weft.kernels.check.ops.op import Sizes
    from weft.kernels.check.ops.table import named
    from weft.kernels.check.timeline import hidden, record, write

    (one,) = named([op])
    sizes = Sizes(world_size, m=48, n=64, k=64, dtype=torch.float32, tile=(16, 16, 16), programs=1)
    spans = record(one, sizes)
    title = f"{op} on {world_size} ranks: {hidden(spans):.0%} of the communication is hidden"
    write(spans, title, output)
    print(f"{title}; written to {output}")
    return 0


def tpu(ops: Sequence[str], topologies: Sequence[str], *, as_json: bool) -> int:
    """Interpret every TPU kernel, and compile it for TPUs.

    Args:
        ops: names of ops; none means all.
        topologies: TPU slices to compile for; none means all.

    Raises:
        ConfigError: an op or a topology does not exist, or jax is not installed.
    """
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("libtpu") is None:
        raise ConfigError("weft check tpu needs jax and libtpu: pip install 'jax[tpu]>=0.10.2'")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from weft.kernels.check.tpu.cases import INTERPRETED, TOPOLOGIES, compiled
    from weft.kernels.check.tpu.process import Workers

    known = dict.fromkeys(case.op for case in INTERPRETED)
    for name in ops:
        if name not in known:
            raise ConfigError(f"op is {name!r}; it must be one of {', '.join(known)}")
    for name in topologies:
        if name not in TOPOLOGIES:
            raise ConfigError(f"target is {name!r}; it must be one of {', '.join(TOPOLOGIES)}")
    wanted = [case for case in INTERPRETED if not ops or case.op in ops]
    jobs = [{"case": case.name, "mode": mode} for case in wanted for mode in ("eager", "on_wait")]
    jobs += [
        {"case": case.name, "topology": topology}
        for topology in topologies or TOPOLOGIES
        for case in compiled(topology)
        if not ops or case.op in ops
    ]
    wide = max(len(job["case"]) for job in jobs) + 2
    with Workers() as workers:
        answers = (workers.ask(job) for job in _progress("checks", jobs, len(jobs)))
        outcomes = list(answers) if as_json else _print_tpu(answers, wide)
    if as_json:
        print(json.dumps(outcomes, indent=2))
    return int(any(outcome["findings"] for outcome in outcomes))


def _interpret() -> None:
    """Make Triton interpret kernels; call this before a module in weft.kernels.gpu is imported."""
    if importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "weft check needs triton, which runs and compiles the kernels: "
            "pip install 'triton>=3.6'"
        )
    os.environ["TRITON_INTERPRET"] = "1"


def _number(flag: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{flag} is {text!r}; it must be whole numbers with commas") from None


def _seeds(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        seeds = range(int(first), int(last) + 1) if dash else range(int(first))
    except ValueError:
        seeds = range(0)
    if not seeds:
        raise ConfigError(
            f"--seeds is {text!r}; it must be a count, such as 3, or a range, such as 5-9"
        )
    return seeds


def _progress(title: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a progress bar if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        items, title, total=total, console=console, transient=True, disable=not sys.stderr.isatty()
    )


def _print_outcomes(outcomes: Sequence[Outcome]) -> None:
    wide = max([len(outcome.op) for outcome in outcomes], default=0) + 2
    print(f"{'op':<{wide}}{'ranks':>6}{'checks':>8}{'findings':>10}")
    for (op, size), group in groupby(outcomes, lambda o: (o.op, o.world_size)):
        found = [len(outcome.findings) for outcome in group]
        print(f"{op:<{wide}}{size:>6}{len(found):>8}{sum(found):>10}")
    findings = sum(len(outcome.findings) for outcome in outcomes)
    print(f"{len(outcomes)} checks, {findings} findings")
    for outcome in outcomes:
        if outcome.findings:
            slow = f", slow ranks {list(outcome.slow_ranks)}" if outcome.slow_ranks else ""
            print(
                f"\n{outcome.op}, {outcome.world_size} ranks, seed {outcome.seed}: "
                f"m {list(outcome.m)}, n {outcome.n}, k {outcome.k}, {outcome.dtype}{slow}"
            )
            for finding in outcome.findings:
                print(f"- {finding}")


def _print_tpu(answers: Iterable[dict[str, Any]], wide: int) -> list[dict[str, Any]]:
    """Print each outcome when it arrives, and return all."""
    print(
        f"{'op, mesh':<{wide}}{'where':<22}{'bad':>4}{'seconds':>9}{'kernels':>9}"
        f"{'VMEM':>11}{'temporary':>13}{'GFLOP':>9}{'MB moved':>10}"
    )
    outcomes = []
    for outcome in answers:
        outcomes.append(outcome)
        where = outcome.get("topology") or f"interpreter, {outcome['mode']}"
        line = f"{outcome['case']:<{wide}}{where:<22}{len(outcome['findings']):>4}"
        line = f"{line}{outcome['seconds']:>9.1f}"
        if "kernels" in outcome:
            line += (
                f"{outcome['kernels']:>9}{outcome['vmem_bytes'] / 1e6:>8.2f} MB"
                f"{outcome['temporary_bytes'] / 1e6:>10.1f} MB"
                f"{outcome['flops'] / 1e9:>9.2f}{outcome['bytes_accessed'] / 1e6:>10.1f}"
            )
        print(line, flush=True)
    found = sum(len(outcome["findings"]) for outcome in outcomes)
    print(f"{len(outcomes)} checks, {found} findings")
    for outcome in outcomes:
        for finding in outcome["findings"]:
            where = outcome.get("topology") or outcome["mode"]
            print(f"- {outcome['case']}, {where}: {finding}")
    return outcomes


def _print_compiled(rows: Sequence[Compiled]) -> None:
    wide = max([len(row.op) for row in rows], default=0) + 2
    lines = [
        f"{'target':<8}{'op':<{wide}}{'kernel':<20}{'dtype':<7}{'tile':<12}{'warps':>5}{'stages':>7}"
        f"{'registers':>10}{'stack':>6}{'spilled':>8}{'shared':>8}{'mma':>5}{'releases':>9}"
    ]
    for row in rows:
        mma = str(row.tensor_core_instructions) if row.multiplies else "-"
        dtype = row.constants.get("dtype", "-")
        sides = [row.constants[name] for name in BLOCKS if name in row.constants]
        tile = "x".join(sides) or "-"
        lines.append(
            f"{row.target:<8}{row.op:<{wide}}{row.kernel:<20}{dtype:<7}{tile:<12}{row.warps:>5}"
            f"{row.stages:>7}{row.registers:>10}{row.stack:>6}{row.spills:>8}{row.shared:>8}"
            f"{mma:>5}{row.releases:>9}"
        )
    problems = sum(len(row.problems) for row in rows)
    # Rows look the same if compilations differ only in constants that the table does not show.
    print(*dict.fromkeys(lines), f"{len(rows)} compilations, {problems} problems", sep="\n")
    for row in rows:
        for problem in row.problems:
            constants = " ".join(f"{name}={value}" for name, value in row.constants.items())
            print(f"\n{row.kernel} of {row.op} on {row.target} ({constants}): {problem}")
            if row.case:
                print(f"    when called by {row.case}")
