"""A plan as a table, JSON, Helm values, or formulas with their numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.models.memory.ledger import human_bytes
from weft.models.plan.load import Objective
from weft.models.plan.plan import Row

TYPES = {"A100": "a100-80gb", "cpu-amx": "cpu"}
"""The chart's accelerator types, for devices whose name in lower case is another type."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The question that a plan answers.

    Attributes:
        model, revision, dtype, load, slo: as given.
        misfits: for slices on which the model does not fit, the reason.
    """

    model: str
    revision: str | None
    dtype: str
    load: str
    slo: str
    misfits: Sequence[str]


def table(rows: Sequence[Row], asked: Asked, objective: Objective) -> str:
    """Return the rows as a table, with notes on the first one."""
    limits = [f"{name.replace('_', ' ')} {most:g} s" for name, most in objective.limits]
    slo = f", within {', '.join(limits)}" if limits else ""
    head = (
        "slice",
        "engines",
        "flags",
        "TTFT ms",
        "ITL ms",
        "req/s",
        "tokens/s",
        "$/h",
        "$/Mtok",
        "limit",
    )
    cells = [head, *(_cells(row, objective) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [f"{asked.model} for {asked.load}{slo}", ""]
    for line in cells:
        aligned = (
            cell.ljust(width) if i in (0, 2, 9) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join(aligned).rstrip())
    lines += [
        "",
        "TTFT, ITL: p50/p99 of the time to the first token and between tokens under this load",
        f"req/s, tokens/s, $/Mtok: at the highest rate{' within the limits' if slo else ''}",
    ]
    if any(row.choice.quantization != "none" for row in rows):
        lines.append("--quantization rounds the weights: answers are faster and less accurate")
    if not all(row.keeps(objective) for row in rows):
        lines.append("! beyond the limits, or too slow for the load")
    if not any(row.keeps(objective) for row in rows):
        lines.append(f"no row serves this load{slo}: {_most(rows)}")
    first = rows[0]
    load = f"{first.rate:.3g} requests/s under this load" if first.rate else _most(rows[:1])
    lines += [
        "",
        f"{first.choice.place} {first.choice.flags}: {_advice(first)}",
        f"  {load}",
        *(f"  {line}" for line in first.choice.ledger.render().splitlines()),
        *("", *asked.misfits)[: len(asked.misfits) + 1 if asked.misfits else 0],
    ]
    return "\n".join(lines)


def _most(rows: Sequence[Row]) -> str:
    most = max(row.capacity for row in rows)
    return f"the most is {most:.3g} requests/s" if most else "no rate is within the limits"


def _cells(row: Row, objective: Objective) -> tuple[str, ...]:
    ttft = itl = "-"
    if row.steady is not None:
        at = row.steady.latency
        ttft, itl = _pair(at.ttft_p50, at.ttft_p99), _pair(at.itl_p50, at.itl_p99)
    return (
        ("" if row.keeps(objective) else "!") + str(row.choice.place),
        str(row.choice.replicas),
        row.choice.flags,
        ttft,
        itl,
        f"{row.capacity:.3g}",
        f"{row.tokens_per_second:,.0f}",
        f"{row.hourly:.2f}",
        "-" if math.isinf(row.price) else f"{row.price:.2f}",
        f"{row.limit} {row.shares[row.limit]:.0%}",
    )


def _pair(median: float, worst: float) -> str:
    return f"{1000 * median:.3g}/{1000 * worst:.3g}"


def _advice(row: Row) -> str:
    return f"{row.shares[row.limit]:.0%} of a step is {row.limit}; less with {row.remedy}"


def document(rows: Sequence[Row], asked: Asked, objective: Objective) -> str:
    """Return the rows as JSON; seconds, bytes and US dollars."""
    content = {
        "model": asked.model,
        "load": asked.load,
        "slo": asked.slo,
        "rows": [_entry(row, objective) for row in rows],
        "does_not_fit": list(asked.misfits),
    }
    return json.dumps(content, indent=2)


def _entry(row: Row, objective: Objective) -> dict[str, object]:
    layout, ledger, steady = row.choice.layout, row.choice.ledger, row.steady
    return {
        "slice": str(row.choice.place),
        "engines": row.choice.replicas,
        "layout": {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "pp": layout.pp},
        "quantization": row.choice.quantization,
        "flags": row.choice.flags,
        "within_slo": row.keeps(objective),
        "latency": None
        if steady is None
        else {name: getattr(steady.latency, name) for name in steady.latency.__slots__},
        "utilisation": None if steady is None else steady.utilisation,
        "rate": row.rate,
        "largest_rate": row.capacity,
        "tokens_per_second": row.tokens_per_second,
        "dollars_per_hour": row.hourly,
        "dollars_per_million_tokens": None if math.isinf(row.price) else row.price,
        "shares": row.shares,
        "memory": {
            "weights": ledger.weights,
            "activations": ledger.activations,
            "kv_cache": ledger.kv_cache,
            "kv_tokens": ledger.tokens,
        },
    }


def helm(rows: Sequence[Row], asked: Asked, objective: Objective) -> str:
    """Return Helm values for the first row, as YAML.

    Raises:
        ConfigError: no row serves the load within the limits.
    """
    if not rows[0].keeps(objective):
        raise ConfigError(
            f"--load is {asked.load}; no row serves it within the limits, and {_most(rows)}: "
            "choose a larger slice, a lower load or other limits"
        )
    choice, limits = rows[0].choice, rows[0].choice.limits
    device = choice.place.device
    known = device.like or device.name
    path = asked.model if asked.revision is None else f"{asked.model}@{asked.revision}"
    kind = TYPES.get(known, known.lower())
    lines = [
        f"# {choice.place} {choice.flags}, for {asked.load}",
        "model:",
        f"  path: {json.dumps(path)}",
        "accelerator:",
    ]
    if device.like:
        lines += [f"  type: {json.dumps(device.name)}", "  types:"]
        lines += [f"    {json.dumps(device.name)}:", f"      like: {kind}"]
    else:
        lines.append(f"  type: {kind}")
    shape = "x".join(map(str, choice.place.shape))
    if device.shapes:
        lines.append(f"  topology: {shape}")
    elif not device.cpu:
        lines.append(f"  perHost: {choice.place.shape[1]}")
    if not device.shapes and choice.place.shape[0] > 1:
        lines.append(f"hosts: {choice.place.shape[0]}")
    layout = choice.layout
    sizes = {"tp": layout.tp, "ep": layout.ep, "cp": layout.cp, "pp": layout.pp}
    sizes["dp"] = choice.replicas
    lines.append("parallelism:")
    lines += [f"  {name}: {size}" for name, size in sizes.items() if size > 1 or name == "tp"]
    lines += [
        "settings:",
        "  log_format: json",
        f"  max_model_len: {limits.max_model_len}",
        f"  max_num_seqs: {limits.max_num_seqs}",
        f"  max_num_batched_tokens: {limits.max_num_batched_tokens}",
        f"  memory_fraction: {limits.memory_fraction}",
        f"  dtype: {asked.dtype}",
    ]
    if limits.block_size is not None:
        lines.append(f"  block_size: {limits.block_size}")
    if choice.quantization != "none":
        lines.append(f"  quantization: {choice.quantization}")
    return "\n".join(lines)


def formulas(row: Row) -> str:
    """Return a decode step under the load: each operator's formula, with its numbers."""
    choice, engine, batch = row.choice, row.choice.engine, row.batch
    both = ("FLOP / F", "bytes / B")
    roof = f"max({', '.join(both)})" if choice.place.device.overlaps else " + ".join(both)
    lines = [
        f"{choice.place} {choice.flags}: a step with {batch.decodes} decodes at a context of "
        f"{batch.decode_context:,.0f} tokens, on the first rank of each stage",
        "",
        f"seconds of an operator  {roof} + exchange + launches x L",
        f"F = {engine.flops:.4g} FLOP/s, B = {engine.bandwidth:.4g} bytes/s, "
        f"L = {engine.launch * 1e6:.3g} us; exchanges: docs/plan.md, Collectives",
        f"seconds of the step     {choice.layout.pp} x the slowest stage + host = "
        f"{engine.seconds(batch) * 1e3:.4g} ms, with {engine.host * 1e3:.3g} ms on the host",
    ]
    columns = ("FLOP", "read", "sent", "FLOP / F", "bytes / B", "exchange", "hidden", "launches")
    for number, parts in enumerate(engine.parts(batch), 1):
        lines += ["", f"stage {number}".ljust(12) + "".join(f"{name:>12}" for name in columns)]
        for part in parts:
            times = (part.arithmetic, part.memory, part.exchange, part.hidden, part.launch)
            cells = [f"{part.flops:.3g}", human_bytes(int(part.read)), human_bytes(int(part.sent))]
            cells += [f"{1e6 * each:.2f} us" for each in times]
            lines.append(part.what.ljust(12) + "".join(f"{cell:>12}" for cell in cells))
    return "\n".join(lines)
