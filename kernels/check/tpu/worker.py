"""The worker process for interpreting or compiling kernels.

Each line on stdin is a job, and each line on stdout is its outcome:

    {"case": "all_gather x=4", "mode": "eager"}            interpret it, against its oracle
    {"case": "all_gather x=4", "topology": "v5e:2x4"}      compile it for that topology

process.py starts it with the environment for both.
"""

from __future__ import annotations

import json
import os
import sys
import time

from jax.experimental.pallas import tpu as pltpu

from weft.kernels.check.tpu import aot
from weft.kernels.check.tpu.case import Case
from weft.kernels.check.tpu.cases import named
from weft.kernels.interpreter import tpu as interpreter


def main() -> None:
    """Answer the jobs on stdin, until it ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr, not between the answers
    findings = None
    for line in sys.stdin:
        job = json.loads(line)
        case = named(job["case"], job.get("topology"))
        began = time.monotonic()
        if "topology" in job:
            outcome = aot.compile_for(case, job["topology"])
        else:
            if findings is None:
                findings = interpreter.strict()
            outcome = {"findings": _interpret(case, job["mode"]) + findings()}
        outcome["seconds"] = time.monotonic() - began
        print(json.dumps(outcome), file=answers, flush=True)


def _interpret(case: Case, mode: interpreter.DmaMode) -> list[str]:
    interpreter.emulate_chip(case.cores)
    try:
        with pltpu.force_tpu_interpret_mode(interpreter.params(mode, case.cores)):
            return case.compare()
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises is what was found
        return [f"error: {_last_line(error)}"]


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line and "callback" not in line]
    return (named or lines or [repr(error)])[-1]


if __name__ == "__main__":
    main()
