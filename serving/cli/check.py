"""`weft check`: what the checkers of kernels/check find, as tables or JSON.

Progress goes to stderr. The exit status is 1 if something is found.
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

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.kernels.check.aot import Compiled
    from weft.kernels.check.suite import Outcome

Item = TypeVar("Item")

BLOCKS = ("BLOCK_M", "BLOCK_N", "BLOCK_K")


def kernels(ops: Sequence[str], world_sizes: str, seeds: str, *, as_json: bool) -> int:
    """Run every op against its oracle under the race detector.

    Args:
        ops: names; all for none.
        world_sizes: "1,2,4".
        seeds: "3" for the first three, "5-9" for those.

    Raises:
        ConfigError: one of these cannot be, or Triton is not installed.
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


def aot(targets: Sequence[str], ops: Sequence[str], *, everything: bool, as_json: bool) -> int:
    """Compile every kernel for the targets (all, if none is given).

    Args:
        everything: every tile that tuning may choose, too.

    Raises:
        ConfigError: there is no such target or op, or Triton is not installed.
        WeftError: the compiler died.
    """
    _interpret()  # here; what compiles is in other processes
    from weft.kernels.check.aot import TENSOR_CORES, compile_all
    from weft.kernels.check.ops.table import named

    named(ops)
    targets = targets or tuple(TENSOR_CORES)
    rows = list(_progress("kernels", compile_all(targets, ops, everything=everything)))
    rows.sort(key=lambda row: targets.index(row.target))
    if as_json:
        print(json.dumps([asdict(row) | {"problems": row.problems} for row in rows], indent=2))
    else:
        _print_compiled(rows)
    return int(any(row.problems for row in rows))


def timeline(op: str, output: Path, world_size: int) -> int:
    """Draw what each rank does in one call of an op.

    Raises:
        ConfigError: there is no such op, the output's suffix is unknown, its directory is not
            there, or there is no Triton.
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
        ops: names; all for none.
        topologies: to compile for; all for none.

    Raises:
        ConfigError: there is no such op or topology, or jax is not installed.
    """
    if importlib.util.find_spec("jax") is None or importlib.util.find_spec("libtpu") is None:
        raise ConfigError("weft check tpu needs jax and libtpu: pip install 'weft[tpu]'")
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
    """Triton reads this when a kernel's module is imported: nothing of weft.kernels.gpu yet is."""
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
        raise ConfigError(f"--seeds is {text!r}; it must be a count, as 3, or a range, as 5-9")
    return seeds


def _progress(title: str, items: Iterable[Item], total: int | None = None) -> Iterator[Item]:
    """The items, with a bar on stderr if that is a terminal."""
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
    """Each as it comes; all of them."""
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
    # Compilations that differ in other constants alone may look the same here.
    print(*dict.fromkeys(lines), f"{len(rows)} compilations, {problems} problems", sep="\n")
    for row in rows:
        for problem in row.problems:
            constants = " ".join(f"{name}={value}" for name, value in row.constants.items())
            print(f"\n{row.kernel} of {row.op} on {row.target} ({constants}): {problem}")
            if row.case:
                print(f"    when called by {row.case}")
