"""A stage's process: it runs the cases and tells the parent (stages.py) about each."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from typing import Any

from harness.report import Case, LeftOut, Row
from harness.stages import Stage


def run_child(about: str, *, tiny: bool, repetitions: int) -> int:
    """Run a stage's cases; return the exit status.

    Args:
        about: JSON of the stage, with the number of the first case and the pipe's descriptor.
        tiny: tiny shapes, in the interpreter.
        repetitions: of each measurement.
    """
    told = json.loads(about)
    first, pipe = told.pop("first"), told.pop("pipe")
    stage = Stage(**told)
    from parts import BESIDE_EACH_OTHER, load

    if BESIDE_EACH_OTHER.intersection(stage.parts):
        os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # before the driver is loaded
    import torch

    def tell(**message: Any) -> None:
        os.write(pipe, json.dumps(message).encode() + b"\n")

    if not tiny and not torch.cuda.is_available():
        print("there is no GPU; --tiny runs the same without one", file=sys.stderr)
        return 2
    tell(about=environment(tiny=tiny))
    cases: list[tuple[str, Case]] = []
    for part in stage.parts:
        make, scale = load(part, tiny=tiny)
        cases += [
            (part, case) for case in make(scale, repetitions) if stage.has(case.name, tiny=tiny)
        ]
    tell(cases=[(part, case.name) for part, case in cases])
    for number, (part, case) in enumerate(cases[first:], first):
        tell(begin=number)
        begin = time.monotonic()
        row, sound = run_case(part, case), True
        if not tiny:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # of a kernel: this process can do nothing more
                sound = False
                if row.state == "done":
                    row = Row(part, case.name, "failed", reason=str(error)[:2000])
        tell(row=asdict(row) | {"seconds": round(time.monotonic() - begin, 2)})
        if not sound:
            return 3
    return 0


def run_case(part: str, case: Case) -> Row:
    """Run a case; an exception is its row."""
    try:
        return Row(part, case.name, "done", case.run())
    except LeftOut as reason:
        return Row(part, case.name, "left out", reason=str(reason))
    except Exception as error:  # noqa: BLE001 - the other cases are still worth running
        message = f"{type(error).__name__}: {error}"
        return Row(part, case.name, "failed", reason=message[:2000])


def environment(*, tiny: bool) -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch
    import triton

    from weft.version import __version__

    if tiny:
        device = "Triton's interpreter on a CPU: the times mean nothing"
    else:
        properties = torch.cuda.get_device_properties(0)
        device = f"{properties.name}, {properties.multi_processor_count} processors"
    return {
        "device": device,
        "versions": {
            "weft": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
