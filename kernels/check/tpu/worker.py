"""The process in which kernels are interpreted or compiled: a job a line in, an outcome a line out.

    {"case": "all_gather x=4", "mode": "eager"}            interpret it, against its oracle
    {"case": "all_gather x=4", "topology": "v5e:2x4"}      compile it for that

process.py starts it with the environment that both need.
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
    os.dup2(2, 1)  # whatever else is printed does not go between the answers
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
    interpreter.be(case.cores)
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
