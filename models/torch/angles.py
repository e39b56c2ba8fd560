"""The rotary angles of a step, once for all layers with the same rotary embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.cpu.rope import Rotation
from weft.models.spec.spec import LayerSpec, RopeSpec


class Turn(NamedTuple):
    """A step's rotary embedding.

    Attributes:
        rotation: of queries and keys.
        query_scale: [T, 1, 1], multiplies the queries; None for 1.
    """

    rotation: Rotation
    query_scale: Tensor | None


Turns = Mapping[RopeSpec, Turn]
"""A step's turn for each rotary embedding in the model."""


class Angles:
    """Radians per position for the layers of a model.

    Args:
        layers: the layers.
        head_dim: one head's width.
        device: device for the rotations.
    """

    def __init__(self, layers: Iterable[LayerSpec], head_dim: int, device: torch.device) -> None:
        self._of: dict[RopeSpec, tuple[Tensor, Tensor | None]] = {}
        for rope in {layer.attention.rope: None for layer in layers}:
            inverse = torch.from_numpy(rope.inverse_frequencies(head_dim)).to(device)
            amplitudes = rope.amplitudes(head_dim)
            self._of[rope] = (
                inverse,
                None if amplitudes is None else torch.from_numpy(amplitudes).to(device),
            )

    @property
    def are_equal(self) -> bool:
        """True if all layers have the same rotary embedding."""
        return len(self._of) == 1

    def at(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """Compute the turns for tokens at `positions`, int [T]."""
        return {
            rope: Turn(
                Rotation.of(positions, inverse, dtype, amplitudes),
                _query_scale(rope, positions, dtype),
            )
            for rope, (inverse, amplitudes) in self._of.items()
        }


def _query_scale(rope: RopeSpec, positions: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the queries' factors, [T, 1, 1]; see RopeSpec.query_beta."""
    if not rope.query_beta:
        return None
    shifted = positions + rope.query_shift
    contexts = torch.div(shifted, rope.original_max_len, rounding_mode="floor")
    return (1 + rope.query_beta * (1 + contexts).log()).to(dtype)[:, None, None]
