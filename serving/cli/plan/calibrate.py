"""`weft plan MODEL --for SLICE --calibrate LOG,...`: constants from a server's log of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import ConfigError
from weft.models.plan.calibration import Constants, Errors, Server, fit
from weft.models.plan.hardware import Slice
from weft.models.plan.step import Precision
from weft.models.plan.step_log import LoggedModel, read_step_log
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

FEWEST = 20
"""Steps below which a log says nothing."""
MOST = 200
"""Steps in the fit, from all parts of the logs."""


def calibrated(logs: Sequence[Path], model: str, spec: ModelSpec, slices: Sequence[Slice]) -> str:
    """Return the constants as TOML for `--devices`, with the error on every second step.

    Args:
        logs: files of `weft serve --step-log`.
        model: the servers' model, as given to them.
        spec: the model.
        slices: one slice, with the devices of each server.

    Raises:
        ConfigError: a log cannot be used, or there are several slices.
    """
    if len(slices) > 1:
        raise ConfigError(f"--for has {len(slices)} slices; with --calibrate it must have one")
    (place,) = slices
    servers = [_server(log, model, spec, place) for log in logs]
    count = sum(len(server.steps) for server in servers)
    if count < FEWEST:
        names = ", ".join(map(str, logs))
        raise ConfigError(f"{names}: {count} steps; --calibrate needs {FEWEST} or more")
    every = 2 * max(1, -(-count // (2 * MOST)))
    constants = fit(
        [replace(server, steps=server.steps[::every]) for server in servers],
        Constants.of(place.device),
    )
    held_out = [replace(server, steps=server.steps[1::2]) for server in servers]
    errors = Errors.of([ratio for server in held_out for ratio in server.ratios(constants)])
    reached = constants.reached
    links = f", links = {reached.links:.3g}" if place.devices > 1 else ""
    return "\n".join(
        [
            f"# {model} on {place}: {errors}",
            f"[{place.device.name}]",
            f"reached = {{ flops = {reached.flops:.3g}, bandwidth = {reached.bandwidth:.3g}"
            f"{links} }}",
            f"launch = {constants.launch:.3g}",
            f"host = {constants.host:.3g}",
        ]
    )


def _server(log: Path, model: str, spec: ModelSpec, place: Slice) -> Server:
    logged, steps = read_step_log(log)
    if logged.model != model:
        raise ConfigError(f"{log} is a log of the model {logged.model}, not of {model}")
    if logged.pp > 1:
        raise ConfigError(f"{log} is a log of --pp {logged.pp}; --calibrate needs --pp 1")
    layout = _layout(logged)
    if layout.world_size != place.devices:
        raise ConfigError(
            f"{log} is a log of {layout.world_size} ranks, but {place} has {place.devices}"
        )
    return Server(
        spec=spec,
        layout=layout,
        place=place,
        precision=Precision(
            spec.compute_dtype(logged.dtype), logged.quantization, logged.kv_cache_dtype
        ),
        steps=[(step.batch, step.seconds) for step in steps if step.batch.tokens],
    )


def _layout(logged: LoggedModel) -> Layout:
    return Layout(logged.tp, logged.ep, cp=logged.cp, pp=logged.pp)
