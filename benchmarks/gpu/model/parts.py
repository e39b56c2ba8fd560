"""A whole model: the parts, and their scales."""

from __future__ import annotations

from parts import Part

from model.machine import machine
from model.peers import graphs, peer
from model.ranks import shard, together
from model.scale import TINY, full
from model.steps import mixed, step
from model.tokens import tokens

__all__ = ["PARTS", "TINY", "full"]

PARTS: dict[str, Part] = {
    "machine": machine,
    "tokens": tokens,
    "step": step,
    "mixed": mixed,
    "peer": peer,
    "graphs": graphs,
    "shard": shard,
    "together": together,
}
