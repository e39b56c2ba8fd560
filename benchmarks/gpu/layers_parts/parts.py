"""The parts of layers.py, in their order."""

from __future__ import annotations

from harness.command import Parts

from layers_parts.attention import decode, latents, prefill, sequence
from layers_parts.exchange import exchange, nccl
from layers_parts.experts import experts
from layers_parts.rows import rows

PARTS: Parts = {
    "decode": decode,
    "prefill": prefill,
    "latents": latents,
    "sequence": sequence,
    "experts": experts,
    "exchange": exchange,
    "rows": rows,
    "nccl": nccl,
}
