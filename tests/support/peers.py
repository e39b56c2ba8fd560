"""The argument `peers` of kernels, for tests that launch a kernel without a workspace."""

from __future__ import annotations

import torch

from weft.kernels.gpu.runtime.peers import Peers
from weft.kernels.symmetric.memory import SymmetricTensor


def peers_of(
    signals: SymmetricTensor, buffer: SymmetricTensor | None = None, max_polls: int = 1 << 20
) -> Peers:
    """Group the symmetric tensors of one rank; nothing has timed out, and no call was counted."""
    return Peers(
        buffers=(buffer or signals).addresses,
        slot_numel=0,
        signals=signals.addresses,
        calls=torch.zeros(1, dtype=torch.int64),
        fault=torch.full((4,), -1, dtype=torch.int32),
        max_polls=max_polls,
    )
