"""The ranks that hold one model between them, and what they tell each other in a step.

Plain torch.distributed, on any machine and between machines: gloo between CPUs, NCCL
between GPUs. Results have the same bits on all ranks of a copy of attention, so that each of
them samples the same tokens from them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.nn.functional import pad

from weft.models.spec.layout import WHOLE, Layout
from weft.models.torch.pipe import Pipe

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"


class Group:
    """Some ranks, of which this is one.

    Args:
        ranks: their numbers among all.
        rank: this one's.
        group: of torch.distributed; None if it is one rank alone.
        count: to be called when this rank comes to an exchange with the others.
    """

    def __init__(
        self,
        ranks: range,
        rank: int,
        group: dist.ProcessGroup | None,
        count: Callable[[], None] = lambda: None,
    ) -> None:
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self._group = group
        self.count = count

    @property
    def of_torch(self) -> dist.ProcessGroup | None:
        """The group of torch.distributed; None if it is one rank alone."""
        return self._group

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what is to be in a sum once."""
        return self.index == 0

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, which may be changed; the same bits on all."""
        if self._group is not None:
            self.count()
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' x, which have one shape: [size, *x.shape]; the same bits on all."""
        if self._group is None:
            return x[None]
        self.count()
        every = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(every.unbind()), x.contiguous(), group=self._group)
        return every

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """[S, n] -> [S, columns]: all ranks' x side by side.

        Each has ceil(columns / size) columns, but for the last ones, which may have fewer.
        """
        each = -(-columns // self.size)
        every = self.gather(pad(x, (0, each - x.shape[1])))
        return torch.cat(every.unbind(), dim=1)[:, :columns]

    def gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """[rows[index], n] -> [sum(rows), n]: all ranks' x one after the other.

        Args:
            rows: of each rank; the same on all.
        """
        out = x.new_empty(sum(rows), x.shape[1])
        copies = x.repeat(self.size, 1)
        self.count()
        dist.all_to_all_single(out, copies, list(rows), [len(x)] * self.size, group=self._group)
        return out

    def scatter_sum(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """[sum(rows), n] -> float32 [rows[index], n]: this rank's rows of the sum of all x.

        Args:
            rows: of each rank; the same on all.
        """
        own = rows[self.index]
        parts = x.new_empty(self.size * own, x.shape[1])
        self.count()
        dist.all_to_all_single(parts, x, [own] * self.size, list(rows), group=self._group)
        by_rank = parts.view(self.size, own, x.shape[1]).float()
        total = by_rank[0]
        for part in by_rank[1:]:
            total += part
        return total

    def exchange(self, x: Tensor) -> Tensor:
        """[size, ...] to the same: row i goes to rank i, and row i of the result comes from it."""
        if self._group is None:
            return x
        self.count()
        got = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(got, x.contiguous(), group=self._group)
        return got


@dataclass(frozen=True, slots=True)
class Groups:
    """This rank's groups.

    Attributes:
        tensor: ranks with the parts of attention, dense MLPs and the vocabulary.
        copies: of attention: ranks that have the same parts of it as this one.
        expert: ranks with the parts of the experts: all of a stage.
        context: ranks with the parts of the positions, of the same KV heads.
        pipe: to the other stages.
    """

    tensor: Group
    copies: Group
    expert: Group
    context: Group
    pipe: Pipe

    def open(self, device: torch.device) -> None:
        """Exchange something in each group: then NCCL has taken its memory. Collective."""
        for group in (self.tensor, self.copies, self.expert, self.context):
            group.sum(torch.zeros(1, device=device))
        row = torch.zeros(1, 1, device=device)
        if not self.pipe.is_first:
            row = self.pipe.receive(1, 1, row.dtype)
        if not self.pipe.is_last:
            self.pipe.send(row)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def least(self, number: int) -> int:
        """The least of all ranks' numbers, through gloo on any device. Collective."""
        if self.expert.size == 1 and self.pipe.stages == 1:
            return number
        least = torch.tensor(number)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)


_ONE = Group(range(1), 0, None)
ALONE = Groups(_ONE, _ONE, _ONE, _ONE, Pipe(WHOLE))


def meet(
    rank: int,
    world_size: int,
    find_port: Callable[[int | None], int],
    timeout: float,
    *,
    host: str = LOOPBACK,
    address: str = LOOPBACK,
) -> Store:
    """Meet the other ranks, once in a process. Collective.

    What is opened for it listens at `host` and `address` alone: on one machine nothing of it can
    be reached from others. On several it is open to the network that has these addresses.

    Args:
        rank, world_size: this one's number, and how many there are.
        find_port: where they meet: called with the port by the first one, which has opened it,
            and with None by the others.
        timeout: seconds that a rank waits for another, here and in every step.
        host: an address of the first one's machine, at which it is reached by all.
        address: the one of this machine at which it is reached by all.

    Returns:
        what they may find more of each other in.

    Raises:
        RuntimeError: they did not come.
        ValueError: this machine does not have `address`.
    """
    wait = timedelta(seconds=timeout)
    # Else it would be the interface that has the host's name.
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    store_of = dist.TCPStore  # type: ignore[attr-defined]
    open_store = partial(store_of, host, world_size=world_size, timeout=wait)
    if rank == 0:
        # Its own socket would listen on all interfaces; it takes over this one.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        listening = listener.detach()
        store = open_store(
            port=port, is_master=True, wait_for_workers=False, master_listen_fd=listening
        )
        find_port(port)
    else:
        store = open_store(port=find_port(None), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=wait)
    return store


def interface_of(address: str) -> str:
    """The network interface that has an address; ValueError if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    raise ValueError(f"no network interface of this machine has the address {address}")


def split(
    layout: Layout,
    count: Callable[[bool], None] = lambda of_all: None,
    device: torch.device = CPU,
    timeout: float | None = None,
) -> Groups:
    """The groups of a layout, once all ranks have met. Collective.

    Args:
        layout: this rank's.
        count: called when this rank comes to an exchange with others, and told whether every
            rank of its stage comes to it, or to one like it.
        device: of what they exchange; between GPUs through NCCL.
        timeout: seconds that a rank waits for another; torch's own if None.
    """
    size, stage, part, rank = layout.world_size, layout.stage_size, layout.dense_size, layout.rank
    if size == 1:
        return ALONE

    def parts(each: int) -> Iterable[range]:
        """So many ranks that are next to each other, and the next ones."""
        return (range(i, i + each) for i in range(0, size, each))

    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = None if timeout is None else timedelta(seconds=timeout)

    def mine(groups: Iterable[range], of_all: bool) -> Group:
        found = _ONE
        for ranks in groups:
            if len(ranks) == size and device.type == "cpu":
                return Group(ranks, rank, dist.group.WORLD, partial(count, of_all))
            made = None
            if len(ranks) > 1:  # by every rank
                made = dist.new_group(list(ranks), timeout=wait, backend=backend)
            if rank in ranks and made is not None:
                found = Group(ranks, rank, made, partial(count, of_all))
        return found

    expert = tensor = mine(parts(stage), True)
    if layout.dp_size > 1:
        tensor = mine(parts(part), False)
    context = tensor if layout.tp == 1 else mine(parts(layout.cp), layout.dp_size == 1)
    columns = (range(i + j, i + stage, part) for i in range(0, size, stage) for j in range(part))
    copies = mine(columns, True)
    # Of each rank and the one with its place in the next stage.
    pairs = [mine([range(i, i + stage + 1, stage)], True).of_torch for i in range(size - stage)]
    before = pairs[rank - stage] if rank >= stage else None
    after = pairs[rank] if rank < len(pairs) else None
    pipe = Pipe(layout, partial(count, layout.dp_size == 1), device, before, after)
    groups = Groups(tensor, copies, expert, context, pipe)
    if device.type == "cuda":
        groups.open(device)
    return groups
