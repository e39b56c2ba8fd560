"""All parts by name, and the module that has each one: modules import torch and Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.report import Case

Part = Callable[[Any, int], "Iterator[Case]"]
"""(scale, repetitions) -> cases."""

FAMILIES = {
    "model": ("machine", "tokens", "step", "mixed", "peer", "graphs", "shard", "together"),
    "products": ("correct", "product", "few_rows", "waiting", "overlap"),
    "layers": (
        *("decode", "prefill", "latents", "sequence"),
        *("experts", "exchange", "rows", "nccl"),
    ),
}
FAMILY = {part: family for family, parts in FAMILIES.items() for part in parts}

BESIDE_EACH_OTHER = frozenset({"correct", "shard", "together", "sequence", "exchange", "waiting"})
"""Parts with virtual ranks: torch's own kernels must be loaded before one of them waits."""


def load(name: str, *, tiny: bool) -> tuple[Part, Any]:
    """Import a part; return it and its scale."""
    family = FAMILY[name]
    parts = importlib.import_module(f"{family}.parts")
    scale = parts.TINY if tiny else parts.full()
    part: Part = parts.PARTS[name]
    return part, scale
