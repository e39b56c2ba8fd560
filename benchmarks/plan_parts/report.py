"""A page: the planner's constants from half of the measured steps, and its error on the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from peers.limits import Limits

from plan_parts.servers import Measured
from weft.kernels.devices import DEVICES, Device, Reached
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.calibration import Constants, Errors, Server, fit
from weft.models.plan.hardware import Slice
from weft.models.plan.step import Precision
from weft.models.spec.layout import Layout

GOAL = Errors(0, 0.10, 0.25)
START = Constants(Reached(), launch=10e-6, host=0.2e-3)
"""The fits' first guess; not the table's values for CPUs, which come from this page."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that was measured.

    Attributes:
        command: the command line.
        machine: the machine's properties.
        limits: read bandwidth, and bfloat16 products, with all threads.
        float32: float32 products: operations per second with all threads.
        servers: the steps.
    """

    command: str
    machine: dict[str, str]
    limits: Limits
    float32: float
    servers: list[Measured]


def page(run: Run) -> str:
    """Return the page."""
    servers = [_server(run, each) for each in run.servers]
    own = [fit([_half(server, 0)], START) for server in servers]
    by_ranks = {
        tp: fit([_half(server, 0) for server in servers if server.layout.tp == tp], START)
        for tp in sorted({server.layout.tp for server in servers})
    }
    held_out = [_half(server, 1) for server in servers]
    return "\n".join(
        [
            *_head(run, by_ranks),
            *_summary(run, held_out, own, by_ranks),
            *_steps(run, held_out, own),
        ]
    )


def _device(run: Run, ranks: int) -> Device:
    """Return what one of several ranks has of the machine."""
    cpu = DEVICES["cpu-amx" if "amx" in run.machine["processor"] else "cpu"]
    flops = {
        "float32": run.float32,
        "bfloat16": run.limits.gemm,
        "int8": run.limits.gemm,
        "float8": run.float32,
    }
    return replace(
        cpu,
        flops={name: rate / ranks for name, rate in flops.items()},
        bandwidth=run.limits.bandwidth / ranks,
    )


def _server(run: Run, measured: Measured) -> Server:
    spec = read_spec(locate(measured.model))
    return Server(
        spec=spec,
        layout=Layout(tp=measured.tp),
        place=Slice(_device(run, measured.tp), (1, measured.tp)),
        precision=Precision(spec.compute_dtype("auto"), measured.quantization),
        steps=[(step.batch, step.seconds) for step in measured.steps],
    )


def _half(server: Server, first: int) -> Server:
    return replace(server, steps=server.steps[first::2])


def _head(run: Run, by_ranks: Mapping[int, Constants]) -> Iterator[str]:
    yield f"""# The planner's error

`benchmarks/plan.py` wrote this page. It times steps of real executors, fits five constants of
[`weft plan`](../plan.md) to every second step, and predicts the other steps.

    {run.command}

| | |
| --- | --- |"""
    yield from (f"| {name} | {value} |" for name, value in run.machine.items())
    yield f"""| bfloat16 products | {run.limits.gemm / 1e9:,.0f} GFLOP/s |
| float32 products | {run.float32 / 1e9:,.0f} GFLOP/s |
| memory | {run.limits.bandwidth / 1e9:.1f} GB/s |

A server has all cores: `--tp 2` gives each rank half of them. A step ran until its four fastest
runs agreed within 5%, for at most 3 s, and their median counts. Time begins when the executor gets
the step, and ends when it has the result.

| fitted to all servers with | FLOP/s | memory | links | launch, us | host, ms |
| --- | --- | --- | --- | --- | --- |"""
    for tp, found in by_ranks.items():
        reached = found.reached
        links = f"{reached.links:.2f}" if tp > 1 else "-"
        yield (
            f"| tp {tp} | {reached.flops:.2f} | {reached.bandwidth:.2f} | {links} "
            f"| {found.launch * 1e6:.0f} | {found.host * 1e3:.2f} |"
        )
    yield """
The first three are shares: measured peaks, and the assumed peak for gloo's links.
"""


def _summary(
    run: Run,
    held_out: Sequence[Server],
    own_fits: Sequence[Constants],
    by_ranks: Mapping[int, Constants],
) -> Iterator[str]:
    yield f"""## Error

Errors are |predicted / measured - 1| over the steps that no fit saw. The goal: median
{GOAL.median:.0%}, 90th percentile (p90) {GOAL.p90:.0%}. "Own fit" fits the constants to the
server's own steps, as `weft plan --calibrate` does. "Common fit" has the same constants for all
servers with as many ranks.

| server | steps | own fit: median | p90 | common fit: median | p90 |
| --- | --- | --- | --- | --- | --- |"""
    own_ratios: list[float] = []
    common_ratios: list[float] = []
    for measured, server, constants in zip(run.servers, held_out, own_fits, strict=True):
        own, common = server.ratios(constants), server.ratios(by_ranks[measured.tp])
        own_ratios += own
        common_ratios += common
        yield _row(_name(measured), Errors.of(own), Errors.of(common))
    all_own, all_common = Errors.of(own_ratios), Errors.of(common_ratios)
    yield _row("all", all_own, all_common)
    yield ""
    yield f"{_verdict('Own fits', all_own)} {_verdict('The common fit', all_common)}"
    yield ""


def _row(name: str, own: Errors, common: Errors) -> str:
    cells = (f"{share:.1%}" for share in (own.median, own.p90, common.median, common.p90))
    return f"| {name} | {own.count} | {' | '.join(cells)} |"


def _verdict(what: str, errors: Errors) -> str:
    met = errors.median <= GOAL.median and errors.p90 <= GOAL.p90
    return f"{what}: goal {'reached' if met else '**not reached**'}."


def _steps(run: Run, held_out: Sequence[Server], own: Sequence[Constants]) -> Iterator[str]:
    yield """## Steps

The steps that no fit saw, in milliseconds, with the server's own fit. Numbers after "at" are mean
contexts in tokens.

| server | step | predicted | measured | ratio |
| --- | --- | --- | --- | --- |"""
    for measured, server, constants in zip(run.servers, held_out, own, strict=True):
        for (batch, seconds), ratio in zip(server.steps, server.ratios(constants), strict=True):
            yield (
                f"| {_name(measured)} | {_work(batch)} | {1e3 * seconds * ratio:.3g} "
                f"| {1e3 * seconds:.3g} | {ratio:.2f} |"
            )
    yield ""


def _name(measured: Measured) -> str:
    quantization = "" if measured.quantization == "none" else f", {measured.quantization}"
    return f"{Path(measured.model).name}, tp {measured.tp}{quantization}"


def _work(batch: Batch) -> str:
    found = []
    if batch.decodes:
        what = "decode" if batch.decodes == 1 else "decodes"
        found.append(f"{batch.decodes} {what} at {batch.decode_context:.0f}")
    if batch.prefills:
        what = "prompt" if batch.prefills == 1 else "prompts"
        found.append(
            f"{batch.prefills} {what}, {batch.prefill_tokens} tokens at {batch.prefill_context:.0f}"
        )
    return " + ".join(found)
