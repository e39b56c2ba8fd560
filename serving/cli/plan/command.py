"""The flags of `weft plan`, and a plan from beginning to end."""

from __future__ import annotations

import asyncio
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
    "prefix cache; TOKENS is 128, 64-256 (uniform) or ~200 (exponential); or log=FILE",
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
@click.option(
    "--plot", metavar="FILE", type=FILE, help="draw latency, price and a step's time (.svg, .png)"
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
    plot: Path | None,
    calibrate: str,
) -> int:
    """Plan how to serve MODEL: layouts, speed, price.

    Reads only config.json, and needs no accelerator. A row is a layout that no other row beats in
    latency, throughput and price. Figures are predictions: docs/plan.md has their measured error.

    \b
    weft plan Qwen/Qwen3-32B --for h100:8 --load in=1000,out=200,rate=8
    weft plan Qwen/Qwen3-8B --for v5e:2x4,l40s:4 --load in=500,out=~200,users=64 --slo itl=0.05
    weft plan ./CHECKPOINT --for h100:8 --load in=1000,out=200,rate=8 --values > values.yaml
    weft plan ./CHECKPOINT --for cpu:1 --calibrate steps.jsonl > mine.toml
    """
    from weft.serving.cli.plan import report

    if sum((as_json, values, explain)) > 1:
        raise ConfigError("give one of --json, --values and --explain")
    if plot is not None:
        check_file(plot, "--plot")
        check_plot(plot)
    known = DEVICES if devices is None else read_devices(devices)
    slices = [read_slice(each.strip(), known) for each in places.split(",")]
    if calibrate:
        return _calibrate(settings.build(EngineConfig), slices, load, calibrate)
    if load is None:
        raise ConfigError("--load is missing; give one such as in=1000,out=200,rate=8")
    wanted, objective = Load.parse(load), Objective.parse(slo) if slo else Objective()
    config, spec = _read_model(settings.build(EngineConfig))
    limits = Limits(
        max_model_len=_context(config, spec.max_model_len),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=config.block_size,
        memory_fraction=config.memory_fraction,
    )
    found: list[Choice] = []
    misfits: list[tuple[Slice, ConfigError]] = []
    for place in slices:
        try:
            found += choices(spec, place, limits, dtype=config.dtype)
        except ConfigError as error:
            misfits.append((place, error))
    if not found:
        raise ConfigError("; ".join(str(error) for _, error in misfits))
    rows = plan(found, wanted, objective, limits)
    asked = report.Asked(config.model, load, slo, limits, [str(error) for _, error in misfits])
    if plot is not None:
        from weft.serving.cli.plan.plot import draw

        write_whole(plot, lambda path: draw(rows, asked, path))
    form = report.document if as_json else report.helm if values else report.table
    print(report.formulas(rows[0], wanted) if explain else form(rows, asked, objective))
    return 0


def _read_model(config: EngineConfig) -> tuple[EngineConfig, ModelSpec]:
    """Return the settings with the model's place, and its specification."""
    from weft.serving.executor.fetch import fetch

    config = asyncio.run(fetch(config, weights=False))
    return config, read_spec(locate(config.model, config.revision))


def _calibrate(config: EngineConfig, slices: list[Slice], load: str | None, logs: str) -> int:
    """Print constants from logs."""
    from weft.serving.cli.plan.calibrate import calibrate

    if load is not None:
        raise ConfigError("give one of --load and --calibrate")
    if len(slices) > 1:
        raise ConfigError(f"--for has {len(slices)} slices; with --calibrate it must have one")
    paths = [Path(log.strip()) for log in logs.split(",")]
    _, spec = _read_model(config)
    print(calibrate(paths, config.model, spec, slices[0]))
    return 0


def _context(config: EngineConfig, longest: int) -> int:
    """Return the maximum number of tokens in a request; ConfigError if the model has fewer."""
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len is {config.max_model_len}; "
            f"{config.model} has a context of {longest} tokens"
        )
    return config.max_model_len or longest
