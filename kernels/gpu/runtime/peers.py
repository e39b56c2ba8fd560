"""The arguments that kernels of several ranks have in common, grouped into one: `peers`.

A kernel takes a NamedTuple as one argument and reads its members by name, as in
`peers.signals`. Triton passes each member as a separate kernel argument, so the machine code
does not change. This works in the compiler, the launcher and the interpreter of Triton 3.6 and
3.9, for the targets of NVIDIA and AMD.

Four limits of Triton decide what a tuple may contain (3.6 and 3.9 alike, unless noted):

- `do_not_specialize` does not reach the members. Triton therefore compiles another binary when
  an int in a tuple is 1 or a multiple of 16. So `rank` stays a parameter beside `peers`, with
  `do_not_specialize=["rank"]`, and so do token counts.
- Compile-time constants form the value of one `tl.constexpr` parameter, named in capitals.
  Triton 3.6 returns its members as bare numbers, and some operations reject those. A kernel
  therefore first names the members it uses: `BLOCK_M: tl.constexpr = FORM.block_m`.
- A member cannot be called `values` or `type`: Triton's own tuples have these attributes.
- Triton 3.6 does not find TMA descriptors inside tuples when it launches a kernel. They stay
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
        addresses: int64 [W]; its address on each rank.
        numel: numbers in one slot.
    """

    addresses: Tensor
    numel: int

    @classmethod
    def of(cls, tensor: SymmetricTensor) -> Slots:
        """Describe a tensor [SLOTS, ...] to a kernel."""
        return cls(tensor.addresses, tensor.local.numel() // SLOTS)


class Peers(NamedTuple):
    """Everything a kernel needs to store to other ranks, signal them and wait for them.

    Attributes:
        buffers: int64 [W]; address of each rank's buffer, 0 for a rank without an address.
        slot_numel: numbers in one of a buffer's two slots.
        signals: int64 [W]; address of each rank's signals, which are int32.
        calls: int64 [1]; number of this call.
        fault: int32 [4], this rank's: (rank, index, wanted, seen) of the first wait that timed out;
            -1 if none has.
        max_polls: polls until a wait times out.
    """

    buffers: Tensor
    slot_numel: int
    signals: Tensor
    calls: Tensor
    fault: Tensor
    max_polls: int
