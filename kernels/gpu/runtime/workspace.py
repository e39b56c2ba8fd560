"""The state of an overlapped op between calls: symmetric buffers, signals, a count of calls.

All ranks create a workspace together, once, for the largest shape to come. The home releases its
memory. Buffers have two slots, for even and odd calls. Two are enough, and no rank has to
announce the end of its reading:

    A rank in call n + 2 has finished call n + 1, so it has seen every other rank's signals of
    call n + 1. Each rank sent them after its own call n, reading included. So nobody reads slot
    n mod 2 any more when call n + 2 writes to it.

This holds for every op in which each rank waits for a signal of every other rank.

Kernels read their call's number from the device. Counting a call alone takes a launch as long as a
short exchange. So row k of a table holds the number of the k-th call from now. Within
`counted_together`, a call takes the next row, and one launch at the end counts all of them.

If one rank called an op with other arguments than the rest, the others would wait in vain. Ranks
therefore compare arguments before anything is launched (`agreed`): when they create a workspace,
and when a call has arguments new to the workspace. If one rank refuses an argument, or the ranks
differ, all of them raise the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.devices import SENDERS
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
    """Return Triton's name for a torch dtype."""
    return TRITON_TYPES[dtype]


def require_dtype(check: Require, dtype: torch.dtype) -> None:
    """Refuse an unsupported dtype."""
    allowed = ", ".join(map(str, TRITON_TYPES))
    check("dtype", dtype, dtype in TRITON_TYPES, f"be one of {allowed}")


@contextmanager
def agreed(
    op: str,
    arguments: Mapping[str, object],
    exchange: Callable[[str], list[str]],
    known: set[str] | None = None,
) -> Iterator[Require]:
    """Within, check this rank's arguments; at the end, compare them with the other ranks'.
    Collective.

    Args:
        op: name for messages.
        arguments: by name; they must be the same on all ranks.
        exchange: sends this rank's value and returns the values of all ranks.
        known: arguments compared before. They are compared again only if this rank refuses them,
            and never if `arguments` is empty.

    Yields:
        a function to refuse an argument.

    Raises:
        KernelError: on every rank, if one rank refuses an argument or the ranks differ. Names op,
            argument, each rank's value and the limit.
        SymmetricMemoryError: a rank did not take part.
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
        if not mine:  # nothing new to compare: the other ranks do not take part
            raise refusal
    value = json.dumps([op, str(refusal or ""), mine])
    try:
        answers = [json.loads(answer) for answer in exchange(value)]
    except SymmetricMemoryError as error:
        if refusal is None:
            raise
        raise refusal from error  # the other ranks launch something else, or nothing
    if message := _disagreement(op, answers):
        raise KernelError(message) from refusal
    if known is not None:
        known.add(value)


def _disagreement(op: str, answers: list[tuple[str, str, dict[str, str]]]) -> str:
    """Describe the errors in each rank's (op, refusal, arguments); empty if there are none."""
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
        ]  # a rank that refuses one argument may not have checked the others
    for argument, values in columns.items():
        if len({value for value in values if value}) > 1:
            given = dict.fromkeys(filter(None, values))
            by_value = " and ".join(f"{value} on {_ranks(values, value)}" for value in given)
            found.append(f"{argument} is {by_value}; it must be the same on all ranks")
    return f"{op}: {'. '.join(found)}" if found else ""


def _ranks(values: list[str], value: str) -> str:
    ranks = [str(rank) for rank, other in enumerate(values) if other == value]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)}"


AHEAD = 256
"""Rows in a workspace's table: enough for two calls in each of 127 layers."""


@contextmanager
def counted_together(workspaces: Sequence[Workspace]) -> Iterator[None]:
    """Within, ops with these workspaces count their calls without a launch for each.

    A CUDA graph must be captured around it, not within: at the end, the device counts.
    """
    for workspace in workspaces:
        workspace._together = True
    try:
        yield
    finally:
        for workspace in workspaces:
            workspace._together = False
            if workspace._ahead:
                workspace._count(workspace._ahead)


class Workspace:
    """The workspace of one op on one rank. All ranks create it together.

    Args:
        home: this rank's.
        name: the op's name, for messages.
        numel: numbers in one slot of the buffer.
        dtype: element type of the buffer.
        num_signals: number of this rank's signals.
        near: ranks with stores by address; all if None.

    Attributes:
        far: some ranks have no address (beyond NVLink: symmetric/nvshmem.py).
        processors, beside, rejoin, record_event, wait_event, compare, barrier: the home's.
        ops: names of the ops that take this workspace.
        max_polls: polls until a wait times out. You may set it at any time, for later calls. A
            captured CUDA graph keeps the value it was captured with.
        concurrent: whether launches on two streams run at the same time, as on a GPU.

    Raises:
        KernelError: on every rank, if one rank refuses an argument or the ranks differ.
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
        self.signals: SymmetricTensor = home.zeros(f"{name}.signals", (num_signals,), torch.int64)
        # A row has 16 bytes: for a pointer without this alignment, Triton compiles another binary.
        self._calls = torch.zeros(AHEAD, 2, dtype=torch.int64, device=home.device)
        self._calls[:, 0] = torch.arange(AHEAD, device=home.device)
        self._ahead = 0  # calls that the device has not counted
        self._together = False
        self.fault = torch.full((4,), -1, dtype=torch.int32, device=home.device)
        self.device = home.device
        self.num_signals = num_signals
        self.processors = home.processors
        self.beside = home.beside
        self.rejoin = home.rejoin
        self.record_event = home.record_event
        self.wait_event = home.wait_event
        self.max_polls = signals.MAX_POLLS
        self.concurrent = home.device.type == "cuda"
        self.compare = home.compare
        self.barrier = home.barrier
        self._known: set[str] = set()

    @contextmanager
    def agreed(self, op: str, arguments: Mapping[str, object]) -> Iterator[None]:
        """Compare a call's arguments with the other ranks' if they are new here, or refused.

        Refuses a workspace of another op. Reads the arguments at the end, so you can add an entry
        for an operand after checking that the operand is a tensor.

        If all ranks have made the same calls so far, all of them raise the error. If only some
        ranks know the arguments, these launch the op, and their waits time out. Calls that only
        load their kernels compare nothing, because no rank waits in them.
        """
        if is_loading():
            yield
            return
        with agreed(op, arguments, self.compare, self._known) as check:
            check("workspace", f"one of {self.name}", op in self.ops, f"be one of {op}")
            yield

    def resident(self, items: int) -> int:
        """Return the number of programs for a persistent kernel with waits, for `items` items.

        It never exceeds the number of programs running at once, one on each processor. On a GPU
        shared by several ranks, more could keep out another rank's programs with the awaited data.
        """
        return max(1, min(items, self.processors))

    def divide(self, items: int, senders: int) -> tuple[int, int]:
        """Divide the processors between programs that copy and programs that compute.

        The latter would otherwise wait for a processor until the copies are through.

        Args:
            items: number of pieces to copy.
            senders: wanted number of programs that copy; SENDERS if 0.

        Returns:
            the numbers of programs that copy and compute. They fit the device together.
        """
        copying = min(items, senders or SENDERS)
        if self.concurrent:
            copying = min(copying, max(1, self.processors // 2))
        return copying, max(1, self.processors - copying)

    def peers(self, buffer: SymmetricTensor | None = None, calls: Tensor | None = None) -> Peers:
        """Return the argument `peers` of the op's kernels: see peers.py.

        Args:
            buffer: [SLOTS, ...], where the kernel stores; the workspace's own if None.
            calls: int64 [1]; the call's number, if it is not the present call's.
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

    @property
    def calls(self) -> Tensor:
        """The present call's number, int64 [1], on the device."""
        return self._calls[self._ahead, :1]

    @property
    def counting(self) -> Sequence[Tensor]:
        """This rank's tensors that hold numbers of calls, besides its table."""
        return (self.signals.local,)

    def skip(self, calls: int) -> None:
        """Continue as after this number of calls, before the first one. Collective.

        Checks begin near the numbers at which narrower counters would wrap.
        """
        self._calls[:, 0] += calls
        for tensor in self.counting:
            tensor.fill_(calls)
        self.barrier()

    def begin(self) -> None:
        """Count a call. The op's kernels come next, with `peers` from here on."""
        if not self._together or self._ahead == AHEAD - 1:
            self._count(self._ahead + 1)
        else:
            self._ahead += 1

    def _count(self, number: int) -> None:
        """Let the device count calls, after all earlier launches."""
        signals.count_calls[(1,)](calls=self._calls, number=number, ROWS=AHEAD)
        self._ahead = 0

    def check(self) -> None:
        """Synchronise with the device, and raise if a wait has timed out since the last check.

        Raises:
            KernelError: as in `report`.
        """
        self.report(self.fault.tolist())

    def report(self, fault: Sequence[int]) -> None:
        """Raise if `fault`, an earlier reading of `self.fault`, reports a timeout.

        Raises:
            KernelError: names the rank, the signal, and the wanted and seen values.
        """
        rank, index, wanted, seen = fault
        if rank >= 0:
            self.fault.fill_(-1)
            raise KernelError(
                f"{self.name}: rank {rank} gave up waiting for its signal {index} to reach "
                f"{wanted}; it is {seen}. The rank that sends it has failed or is stuck"
            )

    def require_tensor(self, argument: str, tensor: Tensor) -> None:
        """Refuse anything but a contiguous tensor of the workspace's dtype and device."""
        require_tensor(self.require, argument, tensor, None, self.device, self.dtype)

    def require_room(self, argument: str, numel: int) -> None:
        """Refuse more numbers than a slot of the buffer holds."""
        self.require(
            f"what {argument} needs of the workspace",
            f"{numel} numbers",
            numel <= self.numel,
            f"be at most {self.numel}, which it was made for",
        )

    def require_signals(self, count: int) -> None:
        """Refuse a call with more signals than the workspace has."""
        self.require(
            "what this call needs of the workspace",
            f"{count} signals",
            count <= self.num_signals,
            f"be at most {self.num_signals}: make it for as many rows, with the same blocks",
        )

    def require_programs(self, programs: int, available: int, why: str) -> None:
        """Refuse more waiting programs than can run at once, if launches run at the same time."""
        most = available if self.concurrent else max(programs, 0)
        must = f"be from 1 to {available}, or 0 for as many: {why}"
        self.require("programs", programs, 0 <= programs <= most, must)

    def require(self, argument: str, value: object, allowed: bool, must: str) -> None:
        """Refuse an argument in the name of this op."""
        require(self.name, argument, value, allowed, must)
