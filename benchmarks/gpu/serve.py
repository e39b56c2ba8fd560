"""What one GPU can show of a model that is served: decode rates, and the part of the bandwidth.

    python benchmarks/gpu/serve.py --output build/serve           on a GPU
    python benchmarks/gpu/serve.py --tiny                         its logic, without one

    decode     a step of decodes of 1, 16 and 128 users by the runner, sampling and the reading of
               its result included: bytes of the weights and of the cache that are read, over the
               time, as a part of the bandwidth of a copy in the same run
    peer       tokens a second of the runner over those of transformers, for as many users
    graphs     a step without CUDA graphs over one with them
    shard      one rank of 2, 4 and 8 on overlapped kernels, as in `decode`. It runs alone, finds
               all signals set, and sends to the same GPU's memory
    together   2, 4 and 8 virtual ranks that serve on this GPU, as threads: one rank's time for a
               step over theirs, whether all sample the same tokens, and how many are those of one

The model is a Llama of 8B parameters with random weights, made on the device. All users
have contexts of the same length.

Rows are written, and hangs are ended, as by overlap.py.
"""

from __future__ import annotations

import sys

from harness.command import Loaded, main


def load(tiny: bool) -> Loaded:
    """The parts, and what makes their scale."""
    from serve_parts.parts import PARTS, TINY, full

    return PARTS, (lambda: TINY) if tiny else full


if __name__ == "__main__":
    sys.exit(main("serve", __doc__, load))
