"""A day of 1,000 replicas behind one router, simulated with the real scheduler.

    python benchmarks/simulated_day.py                    # the day: some minutes
    python benchmarks/simulated_day.py --seconds 60       # a minute of it

Each replica is one H100 with a Llama 8B. The seconds of its steps are the planner's; the policy is
the scheduler's own code.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from itertools import takewhile
from pathlib import Path

from tpu_steps import LLAMA_8B

from weft.models.plan.choices import choices
from weft.models.plan.hardware import read_slice
from weft.models.plan.load import Load
from weft.models.spec.build import build_spec
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.simulator.fleet import EngineLimits, simulate
from weft.serving.executor.sizing import limits_of

DAY = 86_400


def main() -> int:
    """Simulate, and print the figures; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seconds", type=float, default=DAY, help="of the load (a day)")
    add("--replicas", type=int, default=1000, help="number of engines (1,000)")
    add("--load", default="in=1000,out=200,rate=12", help="as for weft plan; for all replicas")
    add("--routing", default="least-loaded", help="as for weft plan")
    options = parser.parse_args()
    spec = build_spec(LLAMA_8B | {"num_hidden_layers": 32}, Path("config.json"))
    limits = limits_of(EngineConfig(device="cuda", max_model_len=4096), spec)
    (choice, *_) = choices(spec, read_slice("h100:1"), limits, dtype="auto")
    load = Load.parse(options.load)
    arrivals = takewhile(
        lambda asked: asked.time < options.seconds, load.arrivals(limits.max_model_len)
    )
    begin = time.perf_counter()
    result = simulate(
        arrivals,
        EngineLimits(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_blocks=choice.ledger.num_blocks,
            block_size=choice.ledger.block_size,
            prefix_caching=load.hit > 0,
        ),
        choice.engine.seconds,
        replicas=options.replicas,
        routing=options.routing,
    )
    wall, cpu = time.perf_counter() - begin, time.process_time()
    latency, memory = result.latency, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"requests   {len(result.requests):,}, {result.tokens:,} tokens, {result.steps:,} steps")
    print(f"simulated  {result.seconds:,.0f} s for {options.replicas:,} replicas")
    print(f"time       {wall:.0f} s, {cpu:.0f} s of CPU; memory {memory / 2**20:.2f} GiB")
    print(f"TTFT       {1e3 * latency.ttft_p50:.1f} ms median, {1e3 * latency.ttft_p99:.1f} ms p99")
    print(f"ITL        {1e3 * latency.itl_p50:.2f} ms median, {1e3 * latency.itl_p99:.2f} ms p99")
    return 0


if __name__ == "__main__":
    sys.exit(main())
