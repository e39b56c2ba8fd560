"""Tokens of small models, sharded where it would not pay."""

from __future__ import annotations

import pytest

from weft.models.plan.switches import Decision, Torus


def shard_tokens(
    patch: pytest.MonkeyPatch, each: int = 32, *, weights_travel: bool = False
) -> None:
    """Let steps with `each` tokens a device shard them, and MLPs pass on weights if so said."""

    def shards(torus: Torus, tokens: int) -> Decision[bool]:
        devices = torus._devices
        return Decision(devices > 1 and tokens >= each * devices, "a test says so")

    def gathers(torus: Torus, tokens: int) -> Decision[bool]:
        return Decision(weights_travel, "a test says so")

    patch.setattr(Torus, "shards_tokens", shards)
    patch.setattr(Torus, "gathers_weights", gathers)
