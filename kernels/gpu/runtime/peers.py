"""The arguments that kernels of several ranks have in common, grouped into one: `peers`.

A kernel takes a NamedTuple as one argument and reads its members by name, as in
`peers.signals`. Triton passes each member as a kernel argument of its own, so that the
machine code is the same as for separate arguments. This works in the compiler, the launcher
and the interpreter of Triton 3.6 and 3.9, for NVIDIA's and AMD's targets.

Four limits of Triton decide what belongs into a tuple (3.6 and 3.9 alike, unless noted):

- `do_not_specialize` does not reach the members. An int in a tuple is therefore always
  specialised for 1 and for multiples of 16, and each of them is a binary of its own. So `rank`
  stays a parameter beside `peers`, with `do_not_specialize=["rank"]`; so do token counts.
- Compile-time constants are grouped as the value of one `tl.constexpr` parameter, whose name is
  in capitals. Triton 3.6 gives its members as bare numbers, which not all of its operations
  take, so a kernel first names those that it uses: `BLOCK_M: tl.constexpr = FORM.block_m`.
- A member must not be called `values` or `type`, which are attributes of Triton's own tuples.
- Triton 3.6 does not find TMA descriptors within tuples when it launches a kernel. They stay
  parameters.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.kernels.symmetric.memory import SymmetricTensor

SLOTS = 2
"""Slots of each buffer: one for even calls, one for odd calls."""


class Slots(NamedTuple):
    """A symmetric tensor with a slot for even calls and one for odd calls.

    Attributes:
        addresses: int64 [W]; where it begins on each rank.
        numel: numbers of one slot.
    """

    addresses: Tensor
    numel: int

    @classmethod
    def of(cls, tensor: SymmetricTensor) -> Slots:
        """Describe a tensor [SLOTS, ...] to a kernel."""
        return cls(tensor.addresses, tensor.local.numel() // SLOTS)


class Peers(NamedTuple):
    """What a kernel needs to store to other ranks, signal them and wait for them.

    Attributes:
        buffers: int64 [W]; addresses of the ranks' buffers, 0 for ranks without one.
        slot_numel: numbers of one of a buffer's two slots.
        signals: int64 [W]; addresses of the ranks' signals, which are int32.
        calls: int32 [1]; the number of this call.
        fault: int32 [4], of this rank; (rank, index, wanted, seen) of the first wait that timed
            out, -1 if none has.
        max_polls: polls after which a wait times out.
    """

    buffers: Tensor
    slot_numel: int
    signals: Tensor
    calls: Tensor
    fault: Tensor
    max_polls: int
