"""What one GPU can show of attention, experts and the kernels between them, in under 8 minutes.

    python benchmarks/gpu/layers.py --output build/layers          on a GPU
    python benchmarks/gpu/layers.py --tiny                         its logic, without one

    decode     decode_attention: the part of the memory's bandwidth that it reads its keys and
               values with; and torch's scaled_dot_product_attention
    prefill    paged_attention: the part of the tensor cores' rate; and the same of torch
    latents    mla_decode_attention: the part of the bandwidth that it reads its latents with;
               and the same of torch
    sequence   sequence_parallel_attention, one rank's part of a prefill: the part of the tensor
               cores' rate. It runs alone, as exchange
    experts    grouped_matmul over torch._grouped_mm, with rows spread evenly and all of one expert
    exchange   moe_dispatch and moe_combine of one rank over the copying of the bytes they move;
               it runs alone, finds all signals set, and sends to the same GPU's memory
    rows       rms_norm, silu_multiply, quantize and rotate_into_cache over the copying of their
               bytes: at most 1.2; argmax, top_k and sort_by_expert over torch's
    nccl       moe_dispatch and moe_combine over NCCL's all-to-all of the same rows there and
               back; needs several GPUs

Bandwidth and rate are those of a copy and of a product of torch, taken in turns
with the kernel. What is called is a captured CUDA graph, so the host's time does
not count. A figure is for what the op chooses by itself; details name the best
of the other configurations tried.

Rows are written, and hangs are ended, as by overlap.py.
"""

from __future__ import annotations

import sys

from harness.command import Loaded, main


def load(tiny: bool) -> Loaded:
    """The parts, and what makes their scale."""
    from layers_parts.parts import PARTS
    from layers_parts.scale import TINY, full

    return PARTS, (lambda: TINY) if tiny else full


if __name__ == "__main__":
    sys.exit(main("layers", __doc__, load))
