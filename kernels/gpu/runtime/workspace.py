"""What an overlapped op keeps between its calls: symmetric buffers, signals, a count of calls.

A workspace is made once, for the largest shape that will come, by all ranks
together; the home releases its memory. Buffers have two slots, for even and odd
calls. That is enough, and no rank has to say that it is done reading:

    A rank that is in call n + 2 has finished call n + 1, and so has seen the
    signals that every other rank sent in its call n + 1. A rank sends those
    after its own call n, reading included. So nobody reads slot n mod 2 any
    more when call n + 2 writes to it.

It holds for every op in which each rank waits for a signal of every other one.

An op in which one rank does something else than the others would wait for what
never comes. So ranks compare what they ask for, before anything is launched
(`agreed`): when a workspace is made, and whenever a call has arguments that the
workspace has not seen yet. An argument that one rank refuses, or that is not the
same on all, is then the same error on every one of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.gpu.runtime import signals
from weft.kernels.gpu.runtime.arguments import (
    KernelError,
    Require,
    require,
    require_counts,
    require_tensor,
)
from weft.kernels.gpu.runtime.launches import is_loading
from weft.kernels.gpu.runtime.peers import SLOTS, Peers, Slots
from weft.kernels.symmetric.memory import Home, SymmetricMemoryError, SymmetricTensor

TRITON_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


def triton_type(dtype: torch.dtype) -> tl.dtype:
    """Triton's name of a torch dtype."""
    return TRITON_TYPES[dtype]


def require_dtype(check: Require, dtype: torch.dtype) -> None:
    """Refuse a dtype that kernels do not move."""
    allowed = ", ".join(map(str, TRITON_TYPES))
    check("dtype", dtype, dtype in TRITON_TYPES, f"be one of {allowed}")


@contextmanager
def agreed(
    op: str,
    arguments: Mapping[str, object],
    exchange: Callable[[str], list[str]],
    known: set[str] | None = None,
) -> Iterator[Require]:
    """Within, this rank checks its arguments; at the end the ranks compare them. Collective.

    Args:
        op: in messages.
        arguments: by name, that must be the same on all ranks.
        exchange: this rank's value for those of all ranks.
        known: arguments that were compared before, and are not again unless they are refused; and
            not even then if there are none.

    Yields:
        what refuses an argument.

    Raises:
        KernelError: on every rank, if one of them has refused an argument or has another one than
            the rest: naming op, argument, each rank's value and what is allowed.
        SymmetricMemoryError: a rank did not come.
    """
    refusal = None
    try:
        yield partial(require, op)
    except KernelError as error:
        refusal = error
    mine = {argument: str(value) for argument, value in arguments.items()}
    if known is not None and json.dumps([op, "", mine]) in known:
        if refusal is None:
            return
        if not mine:  # of what was compared nothing can be new: the others do not come
            raise refusal
    value = json.dumps([op, str(refusal or ""), mine])
    try:
        answers = [json.loads(answer) for answer in exchange(value)]
    except SymmetricMemoryError as error:
        if refusal is None:
            raise
        raise refusal from error  # the others launch something else, or nothing
    if message := _disagreement(op, answers):
        raise KernelError(message) from refusal
    if known is not None:
        known.add(value)


def _disagreement(op: str, answers: list[tuple[str, str, dict[str, str]]]) -> str:
    """What is wrong with (op, refusal, arguments) of each rank; nothing if all is well."""
    refusals = [refusal for _, refusal, _ in answers]
    if refusals[0] and len(set(refusals)) == 1:
        return refusals[0]
    found = [
        f"on rank {rank} {refusal.removeprefix(f'{op}: ')}"
        for rank, refusal in enumerate(refusals)
        if refusal
    ]
    columns = {"the op": [name for name, _, _ in answers]}
    for argument in dict.fromkeys(name for _, _, given in answers for name in given):
        columns[argument] = [
            given.get(argument, "" if refusal else "not given") for _, refusal, given in answers
        ]  # a rank that refuses one may not have come to the others
    for argument, values in columns.items():
        if len({value for value in values if value}) > 1:
            given = dict.fromkeys(filter(None, values))
            by_value = " and ".join(f"{value} on {_ranks(values, value)}" for value in given)
            found.append(f"{argument} is {by_value}; it must be the same on all ranks")
    return f"{op}: {'. '.join(found)}" if found else ""


def _ranks(values: list[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"


class Workspace:
    """Of one op, on one rank. Made by all ranks together.

    Args:
        home: of this rank.
        name: of the op; in messages.
        numel: of one slot of the buffer.
        dtype: of its elements.
        num_signals: of this rank.
        near: the ranks that the op stores to by their addresses; all if None.

    Attributes:
        far: there are ranks without an address (beyond NVLink: symmetric/nvshmem.py).
        processors, beside, rejoin, compare: the home's.
        ops: that take it, by name.
        max_polls: after which a wait gives up; may be set at any time, and holds for the calls
            after that (a CUDA graph keeps what it was captured with).
        concurrent: whether launches on two streams run at once, as on a GPU.

    Raises:
        KernelError: on every rank, if an argument is refused on one or not the same on all.
    """

    def __init__(
        self,
        home: Home,
        name: str,
        numel: int,
        dtype: torch.dtype,
        num_signals: int,
        near: Sequence[int] | None = None,
    ) -> None:
        asked = {"numel": numel, "dtype": dtype, "num_signals": num_signals}
        with agreed(name, asked, home.exchange) as check:
            require_dtype(check, dtype)
            require_counts(check, 0, numel=numel, num_signals=num_signals)
        self.name = name
        self.ops: tuple[str, ...] = (name,)
        self.rank = home.rank
        self.world_size = home.world_size
        self.numel = numel
        self.dtype = dtype
        self.buffer: SymmetricTensor = home.empty(f"{name}.buffer", (SLOTS, numel), dtype)
        with agreed(name, {}, home.exchange) as check:
            addresses = self.buffer.addresses.tolist()
            stored_to = range(home.world_size) if near is None else near
            missing = [rank for rank in stored_to if not addresses[rank]]
            which = "all ranks" if near is None else "the ranks of its node"
            check(
                "a peer without an address (beyond NVLink: symmetric/nvshmem.py)",
                f"rank {missing[0]}" if missing else "none",
                not missing,
                f"be none: the op stores to {which} by their addresses",
            )
        self.far = 0 in addresses
        self.signals: SymmetricTensor = home.zeros(f"{name}.signals", (num_signals,), torch.int32)
        self.calls = torch.zeros(1, dtype=torch.int32, device=home.device)
        self.fault = torch.full((4,), -1, dtype=torch.int32, device=home.device)
        self.device = home.device
        self.num_signals = num_signals
        self.processors = home.processors
        self.beside = home.beside
        self.rejoin = home.rejoin
        self.max_polls = signals.MAX_POLLS
        self.concurrent = home.device.type == "cuda"
        self.compare = home.compare
        self._known: set[str] = set()

    @contextmanager
    def agreed(self, op: str, arguments: Mapping[str, object]) -> Iterator[None]:
        """`agreed` of a call's arguments: when they are new to this workspace, or refused.

        A workspace of another op is refused. The arguments are read at the end, so that what
        depends on an operand may be added within, once the operand is known to be a tensor.

        Ranks that have made the same calls so far are all told. What only some have seen before
        cannot be: those launch, and their waits run out. Nor are arguments compared of calls that
        only load their kernels, which nobody waits in.
        """
        if is_loading():
            yield
            return
        with agreed(op, arguments, self.compare, self._known) as check:
            check("workspace", f"one of {self.name}", op in self.ops, f"be one of {op}")
            yield

    def resident(self, items: int) -> int:
        """Programs of a persistent kernel that waits, and goes over so many items.

        No more than run at once, one on each processor: on a GPU that several ranks share, more
        of them could keep out the programs of another rank that send what they wait for.
        """
        return max(1, min(items, self.processors))

    def peers(self, buffer: SymmetricTensor | None = None, calls: Tensor | None = None) -> Peers:
        """The argument `peers` of the op's kernels: see peers.py.

        Args:
            buffer: [SLOTS, ...], that the kernel stores to; the workspace's own if None.
            calls: int32 [1]; the number of the call, if it is not the present one's.
        """
        addresses, numel = Slots.of(buffer or self.buffer)
        return Peers(
            buffers=addresses,
            slot_numel=numel,
            signals=self.signals.addresses,
            calls=self.calls if calls is None else calls,
            fault=self.fault,
            max_polls=self.max_polls,
        )

    def begin(self) -> None:
        """Count a call; the op's kernels come next."""
        signals.begin_call[(1,)](calls=self.calls)

    def check(self) -> None:
        """Synchronise with the device, and raise if a wait has run out since the last check.

        Raises:
            KernelError: as of `report`.
        """
        self.report(self.fault.tolist())

    def report(self, fault: Sequence[int]) -> None:
        """Raise if `fault`, which `self.fault` was when it was read, says that a wait ran out.

        Raises:
            KernelError: naming the rank, the signal and what it was.
        """
        rank, index, wanted, seen = fault
        if rank >= 0:
            self.fault.fill_(-1)
            raise KernelError(
                f"{self.name}: rank {rank} gave up waiting for its signal {index} to reach "
                f"{wanted}; it is {seen}. The rank that sends it has failed or is stuck"
            )

    def require_tensor(self, argument: str, tensor: Tensor) -> None:
        """Refuse what is no tensor of the workspace's dtype and device, or not contiguous."""
        require_tensor(self.require, argument, tensor, None, self.device, self.dtype)

    def require_room(self, argument: str, numel: int) -> None:
        """Refuse what is larger than a slot of the buffer."""
        self.require(
            f"what {argument} needs of the workspace",
            f"{numel} numbers",
            numel <= self.numel,
            f"be at most {self.numel}, which it was made for",
        )

    def require_signals(self, count: int) -> None:
        """Refuse what takes more signals than there are."""
        self.require(
            "what this call needs of the workspace",
            f"{count} signals",
            count <= self.num_signals,
            f"be at most {self.num_signals}: make it for as many rows, with the same blocks",
        )

    def require_programs(self, programs: int, available: int, why: str) -> None:
        """Refuse more programs that wait than can run at once, where launches run at once."""
        most = available if self.concurrent else max(programs, 0)
        must = f"be from 1 to {available}, or 0 for as many: {why}"
        self.require("programs", programs, 0 <= programs <= most, must)

    def require(self, argument: str, value: object, allowed: bool, must: str) -> None:
        """`require` of this op."""
        require(self.name, argument, value, allowed, must)
