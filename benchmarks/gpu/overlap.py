"""Everything that one GPU can show of the overlapped ops, in one call of under 8 minutes.

    python benchmarks/gpu/overlap.py --output build/overlap        on a GPU
    python benchmarks/gpu/overlap.py --tiny                        its logic, without one

    correct    each op equals its oracle on 2, 4 and 8 virtual ranks (threads of this process on
               one GPU, each with streams of its own), some ranks slow
    product    the persistent product alone over torch.matmul; the goal is 0.95 of its speed
    waiting    the product whose signals are all set, over the same product without waits: at
               most 2% longer
    overlap    one rank's call over its parts one after the other (collective, then product, or
               the other way round), and over the decomposed op

For `waiting` and `overlap`, one rank runs and finds all signals of the others
set; what it sends goes to the same GPU's memory. That shows what overlapping
does to the product and what waiting costs. It does not show a link's bandwidth:
NVLink needs a machine with several GPUs.

Each row is printed and written as soon as it is there. When a kernel hangs, a
watchdog writes the report with what was being done, and ends the process with
status 3. Exit status 1: a result was wrong or a goal was missed.
"""

from __future__ import annotations

import sys

from harness.command import Loaded, main


def load(tiny: bool) -> Loaded:
    """The parts, and what makes their scale."""
    from overlap_parts.parts import PARTS
    from overlap_parts.scale import TINY, full

    return PARTS, (lambda: TINY) if tiny else full


if __name__ == "__main__":
    sys.exit(main("overlap", __doc__, load))
