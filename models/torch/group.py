"""Groups of ranks that hold one model together, and their collectives.

This is plain torch.distributed, within and between nodes: gloo between CPUs, NCCL between GPUs. All
ranks in a data-parallel attention group get bitwise equal results, so they all sample the same
tokens.
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
    """Some ranks, including this one.

    Args:
        ranks: their global ranks.
        rank: this rank.
        group: torch.distributed's group; None for a single rank.
        count: called when this rank reaches an exchange with the others.
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
        self._ranks = ranks
        self._group = group
        self.count = count

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """torch.distributed's group; None for a single rank."""
        return self._group

    @property
    def is_first(self) -> bool:
        """True if this rank adds terms that a sum must contain once."""
        return self.index == 0

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all ranks; the same bits on all. May overwrite x."""
        if self._group is not None:
            self.count()
            dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Gather equally shaped tensors: [size, *x.shape]; the same bits on all ranks."""
        if self._group is None:
            return x[None]
        self.count()
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self._group)
        return gathered

    def gather_columns(self, x: Tensor, columns: int) -> Tensor:
        """Gather columns: [S, n] -> [S, columns].

        Each rank has ceil(columns / size) columns; the last ranks may have fewer.
        """
        each = -(-columns // self.size)
        gathered = self.gather(pad(x, (0, each - x.shape[1])))
        return torch.cat(gathered.unbind(), dim=1)[:, :columns]

    def gather_rows(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Gather rows: [rows[index], n] -> [sum(rows), n], in rank order.

        Args:
            x: this rank's rows.
            rows: each rank's number of rows; the same on all ranks.
        """
        out = x.new_empty(sum(rows), x.shape[1])
        repeated = x.repeat(self.size, 1)
        self.count()
        dist.all_to_all_single(out, repeated, list(rows), [len(x)] * self.size, group=self._group)
        return out

    def scatter_sum(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Sum over the ranks and keep this rank's rows: [sum(rows), n] -> float32 [rows[index], n].

        Args:
            x: a term for every row.
            rows: each rank's number of rows; the same on all ranks.
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

    def all_to_all(self, x: Tensor) -> Tensor:
        """Exchange rows: row i of x [size, ...] goes to rank i, and row i of the result comes from
        it.
        """
        if self._group is None:
            return x
        self.count()
        got = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(got, x.contiguous(), group=self._group)
        return got

    def move(
        self, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]
    ) -> None:
        """Send tensors to other ranks, and fill tensors from other ranks.

        Args:
            sent, received: contiguous tensors, and the index of the other rank for each. Two ranks
                list what they exchange in the same order.
        """
        self.count()
        sides = ((dist.isend, sent), (dist.irecv, received))
        ops = [
            dist.P2POp(op, tensor, self._ranks[index], self._group)
            for op, tensors in sides
            for tensor, index in tensors
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups that this rank belongs to.

    Attributes:
        tensor: ranks that split attention, dense MLPs and the vocabulary.
        data: ranks with the same part as this one, one in each data-parallel attention group.
        expert: ranks that split the experts: the whole stage.
        context: ranks that share KV heads by position.
        pipe: the connection to the other stages.
    """

    tensor: Group
    data: Group
    expert: Group
    context: Group
    pipe: Pipe

    def open(self, device: torch.device) -> None:
        """Run an exchange in each group, so that NCCL allocates its memory now. Collective."""
        for group in (self.tensor, self.data, self.expert, self.context):
            group.sum(torch.zeros(1, device=device))
        row = torch.zeros(1, 1, device=device)
        if not self.pipe.is_first:
            row = self.pipe.receive(1, 1, row.dtype)
        if not self.pipe.is_last:
            self.pipe.send(row)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def minimum(self, number: int) -> int:
        """Return the minimum over all ranks, through gloo on any device. Collective."""
        if self.expert.size == 1 and self.pipe.stages == 1:
            return number
        minimum = torch.tensor(number)
        dist.all_reduce(minimum, dist.ReduceOp.MIN)
        return int(minimum)


_SINGLE = Group(range(1), 0, None)
ALONE = Groups(_SINGLE, _SINGLE, _SINGLE, _SINGLE, Pipe(WHOLE))


def meet(
    rank: int,
    world_size: int,
    find_port: Callable[[int | None], int],
    timeout: float,
    *,
    host: str = LOOPBACK,
    address: str = LOOPBACK,
) -> Store:
    """Rendezvous with the other ranks, once per process. Collective.

    All sockets listen at `host` and `address` only. On one node, other machines cannot reach them.
    Over several nodes, they are open to the network with these addresses.

    Args:
        rank, world_size: this rank, and the number of ranks.
        find_port: passes on the port: rank 0 calls it with the port that it opened, the others call
            it with None.
        timeout: seconds that a rank waits for another, here and in every step.
        host: an address of rank 0's node that all ranks can reach.
        address: this node's address that all ranks can reach.

    Returns:
        a store for further exchanges.

    Raises:
        RuntimeError: a rank did not arrive in time.
        ValueError: this node does not have `address`.
    """
    wait = timedelta(seconds=timeout)
    # By default, gloo would take the interface that the node's name resolves to.
    os.environ["GLOO_SOCKET_IFNAME"] = interface_of(address)
    store_of = dist.TCPStore  # type: ignore[attr-defined]
    open_store = partial(store_of, host, world_size=world_size, timeout=wait)
    if rank == 0:
        # A store's own socket would listen on all interfaces, so it takes over this one.
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
    """Return the network interface with an address.

    Raises:
        ValueError: no interface has it.
    """
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    raise ValueError(f"no network interface of this machine has the address {address}")


def make_groups(
    layout: Layout,
    count: Callable[[bool], None] = lambda whole_stage: None,
    device: torch.device = CPU,
    timeout: float | None = None,
) -> Groups:
    """Make a layout's groups after all ranks have met. Collective.

    Args:
        layout: this rank's layout.
        count: called when this rank reaches an exchange. Its argument tells whether every rank in
            the stage reaches this exchange or a similar one.
        device: the data's device; NCCL connects GPUs.
        timeout: seconds that a rank waits for another; None takes torch's default.
    """
    size, stage, dense, rank = layout.world_size, layout.stage_size, layout.dense_size, layout.rank
    if size == 1:
        return ALONE

    def runs(each: int) -> Iterable[range]:
        """Cut all ranks into runs of `each` neighbours."""
        return (range(i, i + each) for i in range(0, size, each))

    backend = "nccl" if device.type == "cuda" else "gloo"
    wait = None if timeout is None else timedelta(seconds=timeout)

    def own_group(groups: Iterable[range], whole_stage: bool) -> Group:
        found = _SINGLE
        for ranks in groups:
            if len(ranks) == size and device.type == "cpu":
                return Group(ranks, rank, dist.group.WORLD, partial(count, whole_stage))
            made = None
            if len(ranks) > 1:  # every rank makes every group
                made = dist.new_group(list(ranks), timeout=wait, backend=backend)
            if rank in ranks and made is not None:
                found = Group(ranks, rank, made, partial(count, whole_stage))
        return found

    expert = tensor = own_group(runs(stage), True)
    if layout.dp_size > 1:
        tensor = own_group(runs(dense), False)
    context = tensor if layout.tp == 1 else own_group(runs(layout.cp), layout.dp_size == 1)
    columns = (range(i + j, i + stage, dense) for i in range(0, size, stage) for j in range(dense))
    data = own_group(columns, True)
    # One group for each rank and its peer in the next stage.
    pairs = [
        own_group([range(i, i + stage + 1, stage)], True).process_group for i in range(size - stage)
    ]
    before = pairs[rank - stage] if rank >= stage else None
    after = pairs[rank] if rank < len(pairs) else None
    pipe = Pipe(layout, partial(count, layout.dp_size == 1), device, before, after)
    groups = Groups(tensor, data, expert, context, pipe)
    if device.type == "cuda":
        groups.open(device)
    return groups
