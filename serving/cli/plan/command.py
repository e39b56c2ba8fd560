"""The flags of `weft plan`, and a plan from beginning to end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import click

from weft.errors import ConfigError
from weft.kernels.devices import DEVICES
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.choices import Choice, Limits, choices
from weft.models.plan.hardware import Slice, read_devices, read_slice
from weft.models.plan.load import Load, Objective
from weft.models.plan.plan import plan
from weft.models.spec.spec import ModelSpec
from weft.serving.cli.files import check_file, check_plot, write_whole
from weft.serving.cli.options import TopicCommand, takes
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import Kind
from weft.serving.config.sources import Settings

SETTINGS = {
    *("model", "revision", "dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"),
    *("block_size", "memory_fraction"),
}
FILE = click.Path(path_type=Path)


@click.command("plan", cls=TopicCommand)
@click.option(
    "--for",
    "places",
    required=True,
    metavar="SLICE,...",
    help="such as h100:8, h100:2x8 or v5e:2x4",
)
@click.option(
    "--load",
    metavar="LOAD",
    help="in=TOKENS,out=TOKENS,rate=R (requests/s) or users=N; hit=SHARE of prompt tokens in the "
    "prefix cache; groups=N different beginnings; TOKENS is 128, 64-256 (uniform) or ~200 "
    "(exponential); or log=FILE",
)
@click.option(
    "--slo",
    metavar="LIMITS",
    default="",
    help="ttft=SECONDS,itl=SECONDS at p99, ttft.p50=... at p50",
)
@click.option(
    "--devices", metavar="FILE", type=FILE, help="TOML file with your own devices, links and prices"
)
@click.option("--json", "as_json", is_flag=True, help="write JSON")
@click.option("--values", is_flag=True, help="write Helm values for the first row")
@click.option("--explain", is_flag=True, help="write the first row's formulas with their numbers")
@click.option("--tp", type=click.IntRange(1), metavar="N", help="only layouts with this --tp")
@click.option(
    "--why", is_flag=True, help="write the decisions that weft makes for --tp, with their costs"
)
@click.option(
    "--plot",
    metavar="FILE",
    type=FILE,
    help="draw price, latency, a step's time, load curves (.svg, .png)",
)
@click.option(
    "--simulate",
    metavar="N",
    type=click.IntRange(min=1),
    help="take latencies from a simulation of N requests with the real scheduler",
)
@click.option(
    "--routing",
    metavar="random|least-loaded|prefix",
    help="between the engines of a row, in a simulation; else least-loaded",
)
@click.option(
    "--calibrate",
    metavar="LOG,...",
    default="",
    help="fit the slice's constants to logs of weft serve --step-log; writes TOML for --devices",
)
@takes(EngineConfig, model=True, only=SETTINGS)
def make_plan(
    settings: Settings,
    places: str,
    load: str | None,
    slo: str,
    devices: Path | None,
    as_json: bool,
    values: bool,
    explain: bool,
    tp: int | None,
    why: bool,
    plot: Path | None,
    simulate: int | None,
    routing: str | None,
    calibrate: str,
) -> int:
    """Plan how to serve MODEL: layouts, speed, price.

    Reads only config.json, and needs no accelerator. A row is a layout that no other row beats in
    latency, throughput and price. Figures are predictions: docs/plan.md has their measured error.

    \b
    weft plan Qwen/Qwen3-32B --for h100:8 --load in=1000,out=200,rate=8
    weft plan Qwen/Qwen3-8B --for v5e:2x4,l40s:4 --load in=500,out=~200,users=64 --slo itl=0.05
    weft plan ./CHECKPOINT --for h100:8 --load in=1000,out=200,rate=8 --values > values.yaml
    weft plan Qwen/Qwen3-8B --for v5e:2x4 --tp 8 --why
    weft plan ./CHECKPOINT --for cpu:1 --calibrate steps.jsonl > mine.toml
    """
    from weft.serving.cli.plan import report
    from weft.serving.cli.plan.calibrate import calibrated
    from weft.serving.cli.plan.why import decisions
    from weft.serving.executor.fetch import fetch
    from weft.serving.executor.sizing import limits_of

    if sum((as_json, values, explain, why, bool(calibrate))) > 1:
        raise ConfigError("give one of --json, --values, --explain, --why and --calibrate")
    if (why or calibrate) and (load, slo, plot, simulate) != (None, "", None, None):
        flag = "--why" if why else "--calibrate"
        raise ConfigError(f"{flag} is without --load, --slo, --plot and --simulate")
    if load is None and not (why or calibrate):
        raise ConfigError(
            "--load is missing; give one such as in=1000,out=200,rate=8, or --why or --calibrate"
        )
    if routing is not None and simulate is None:
        raise ConfigError(f"--routing is {routing}; it needs --simulate N")
    if plot is not None:
        check_file(plot, "--plot")
        check_plot(plot)
    known = DEVICES if devices is None else read_devices(devices)
    slices = list(dict.fromkeys(read_slice(each.strip(), known) for each in places.split(",")))
    given = settings.build(EngineConfig)
    config = asyncio.run(fetch(given, weights=False))
    spec = read_spec(locate(config.model, config.revision))
    if calibrate:
        logs = [Path(log.strip()) for log in calibrate.split(",")]
        print(calibrated(logs, given.model, spec, slices))
        return 0
    limits = {place: limits_of(_on(config, place), spec) for place in slices}
    if load is None:
        dtype = spec.compute_dtype(config.dtype)
        print("\n".join(decisions(spec, place, tp, dtype, limits[place]) for place in slices))
        return 0
    wanted, objective = Load.parse(load), Objective.parse(slo) if slo else Objective()
    found, misfits = _choices(limits, spec, config.dtype)
    if tp is not None:
        fitting = ", ".join(map(str, sorted({choice.layout.tp for choice in found})))
        found = [choice for choice in found if choice.layout.tp == tp]
        if not found:
            raise ConfigError(f"--tp is {tp}; on {places} it must be one of {fitting}")
    rows = plan(found, wanted, objective)
    if simulate is not None:
        from weft.serving.cli.plan.simulated import simulated

        rows = list(simulated(rows, wanted, simulate, routing or "least-loaded"))
    asked = report.Asked(config.model, config.revision, config.dtype, load, slo, misfits)
    if plot is not None:
        from weft.serving.cli.plan.plot import draw

        write_whole(plot, lambda path: draw(rows, asked, wanted, path))
    form = report.document if as_json else report.helm if values else report.table
    print(report.formulas(rows[0]) if explain else form(rows, asked, objective))
    return 0


def _choices(
    limits: Mapping[Slice, Limits], spec: ModelSpec, dtype: str
) -> tuple[list[Choice], list[str]]:
    """Return all choices that fit, and the reason for each slice on which none does.

    Raises:
        ConfigError: none fits on any slice.
    """
    found: list[Choice] = []
    misfits: list[str] = []
    for place, each in limits.items():
        try:
            found += choices(spec, place, each, dtype=dtype)
        except ConfigError as error:
            misfits.append(str(error))
    if not found:
        raise ConfigError("; ".join(misfits))
    return found, misfits


def _on(config: EngineConfig, place: Slice) -> EngineConfig:
    """Return the settings with the slice's kind of device, which decides their defaults."""
    kind: Kind = "tpu" if place.device.shapes else "cpu" if place.device.cpu else "cuda"
    return replace(config, device=kind)
