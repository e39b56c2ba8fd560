"""The rotary angles of a step, once for all layers with the same rotary embedding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from weft.kernels.cpu.rope import Rotation
from weft.models.spec.spec import LayerSpec, RopeSpec

Rotations = Mapping[RopeSpec, Rotation]
"""A step's rotation for each rotary embedding in the model."""


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

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotations:
        """Compute the rotations for tokens at `positions`, int [T]."""
        return {
            rope: Rotation.of(positions, inverse, dtype, amplitudes)
            for rope, (inverse, amplitudes) in self._of.items()
        }
