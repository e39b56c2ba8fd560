"""Placement of ranks on devices: maps virtual slices to the nodes' devices.

This is a small resource manager as in Pathways (Barham et al. 2022, section 4.1). Each engine asks
for a virtual slice and gets its own devices, chosen to suit the communication between its ranks.

    node 0, an island of 4          node 1, an island of 4
    0    1    2    3                0    1    2    3             devices
    r0   r1   r2   r3               r4   r5   r6   r7            --tp 4 --pp 2, --devices 2x4
    a0   a1   a2   a3               b0   b1   b2   b3            --tp 4 --dp 2: engines a and b

An island is a set of devices with fast links between them: a node's GPUs (NVLink), or its CPU
cores. Ranks that communicate most have neighbouring numbers (models/spec/layout.py), and islands
are filled in rank order. A model has nested units: an engine, a stage, an attention group, and
the ranks that share a KV head. The mapping chooses the largest kind of unit that fits on single
islands everywhere, and never splits such a unit.

All GPUs on a node count as one island, since torch does not report where NVLink is missing. So do
all TPUs on a node, although TPUs on other nodes in their slice are just as near.

A rank is a process. With torch it has one device; with jax it has all its engine's devices on a
node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serving.config.slices import (
    HERE,
    DeviceRequest,
    Kind,
    NodeSlice,
    RankDevices,
    Slice,
    parse,
)
from weft.serving.executor.sizing import with_tp

if TYPE_CHECKING:
    from weft.serving.config.settings import Backend, EngineConfig


@dataclass(frozen=True, slots=True)
class Device:
    """A device for ranks.

    Attributes:
        node: number of its node, which is also its island; 0 is the controller's node.
        index: index among the devices of the node. CPU ranks share the cores; there it is the
            index of a rank.
    """

    node: int
    index: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """A node's devices and memory.

    Attributes:
        max_ranks: maximum number of ranks on the CPU cores; None for no limit.
        memory: free bytes of main memory.
        gpus: free bytes of each GPU.
        where: name and address of the node.
        tpus: bytes of each TPU, as jax counts them.
    """

    max_ranks: int | None = None
    memory: int = 0
    gpus: tuple[int, ...] = ()
    where: str = HERE
    tpus: tuple[int, ...] = ()

    def devices(self, kind: Kind, node: int, maximum: int) -> list[Device]:
        """List the node's devices.

        Args:
            kind: kind of device.
            node: number of this node.
            maximum: number of CPU ranks to return if `max_ranks` sets no limit.
        """
        if kind == "cpu":
            count = maximum if self.max_ranks is None else self.max_ranks
        else:
            count = len(self.gpus) if kind == "cuda" else len(self.tpus)
        return [Device(node, i) for i in range(count)]

    def describe(self, kind: Kind) -> str:
        """Describe the node's devices in words."""
        if kind == "cuda":
            return f"{self.where}: {len(self.gpus)} GPUs"
        if kind == "tpu":
            return f"{self.where}: {len(self.tpus)} TPUs"
        if self.max_ranks is None:
            return f"{self.where}: any number of CPU ranks"
        return f"{self.where}: {self.max_ranks} CPU rank{'s' * (self.max_ranks != 1)}"


def map_slices(config: EngineConfig, inventories: Sequence[Inventory]) -> list[Slice]:
    """Assign a slice to each engine. No two slices share a device.

    Without `devices`, all nodes are used, as equally as their devices and whole units allow.

    Args:
        config: settings of all engines.
        inventories: one per node, the controller's first.

    Raises:
        ConfigError: there are not enough devices. The message lists those that exist, and what
            would fit.
    """
    request = None if config.devices is None else parse(config.devices)
    try:
        slices = _map_request(config, inventories, request)
    except _NoRoomError as error:
        kind = kind_of(config)
        available = "; ".join(inventory.describe(kind) for inventory in inventories)
        asked = f"--device is {kind}: " if config.device == kind != "cpu" else ""
        advice = _advice(config, inventories)
        raise ConfigError(f"{asked}{error}. Available: {available}. {advice}") from None
    nodes_of_engines = [{part.node for part in each} for each in slices]
    engines = [
        sum(number in nodes for nodes in nodes_of_engines) for number in range(len(inventories))
    ]
    return [
        tuple(
            replace(part, engines=engines[part.node], where=inventories[part.node].where)
            for part in each
        )
        for each in slices
    ]


def devices_of_ranks(config: EngineConfig, part: NodeSlice) -> list[RankDevices]:
    """Return each rank's devices on a node: one device each, with jax all for one rank."""
    if config.backend == "jax":
        return [part.devices]
    return [(index,) for index in part.devices]


def can_replace(
    config: EngineConfig, slices: Sequence[Slice], node: int, inventory: Inventory
) -> bool:
    """Return whether a node has all devices in use on the node with this number."""
    indexes = {i for each in slices for part in each if part.node == node for i in part.devices}
    needed = 1 + max(indexes, default=-1)
    return len(inventory.devices(kind_of(config), node, needed)) >= needed


def kind_of(config: EngineConfig) -> Kind:
    """Return the device kind for ranks; "cpu" if `device` is still auto."""
    request = None if config.devices is None else parse(config.devices)
    if request is not None and request.kind is not None:
        return request.kind
    return "cpu" if config.device == "auto" else config.device


def decided(config: EngineConfig, inventories: Sequence[Inventory]) -> EngineConfig:
    """Decide `backend`, `device` and `tp` for these nodes, as far as they are not set.

    The backend is jax if all nodes have TPUs, else torch. With torch the device is cuda if there
    is a GPU for each rank, else cpu. One choice holds for all ranks of all engines.

    Raises:
        ModelError: `tp` depends on the checkpoint, and it cannot be found or understood.
    """
    return with_tp(_with_device(config, inventories), inventories)


def _with_device(config: EngineConfig, inventories: Sequence[Inventory]) -> EngineConfig:
    if config.backend == "auto":
        gpus = kind_of(config) == "cuda"
        tpus = config.device == "auto" and not gpus and all(each.tpus for each in inventories)
        backend: Backend = "jax" if tpus or config.device == "tpu" else "torch"
        config = replace(config, backend=backend)
    if config.device != "auto":
        return config
    if config.backend == "jax":
        kind: Kind = "tpu" if all(each.tpus for each in inventories) else "cpu"
        return replace(config, device=kind)
    on_gpus = replace(config, device="cuda")
    request = None if config.devices is None else parse(config.devices)
    try:
        _map_request(on_gpus, inventories, request)
    except _NoRoomError:
        return replace(config, device=kind_of(config))
    return on_gpus


class _NoRoomError(Exception):
    """No slice meets the request. The message describes the request."""


def _map_request(
    config: EngineConfig, inventories: Sequence[Inventory], request: DeviceRequest | None
) -> list[Slice]:
    ranks = config.dp * config.world_size
    kind = kind_of(config)
    free = [inventory.devices(kind, number, ranks) for number, inventory in enumerate(inventories)]
    if request is None:
        counts = _spread_evenly(config, [len(devices) for devices in free])
        order = [device for devices, n in zip(free, counts, strict=True) for device in devices[:n]]
        size = config.world_size
        return [_slice(order[e * size : (e + 1) * size]) for e in range(config.dp)]
    if request.count != config.world_size:
        raise _NoRoomError(
            f"--devices is {config.devices}, {request.count} for each engine; an engine has "
            f"{config.world_size} ranks"
        )
    slices = []
    for _ in range(config.dp):
        capacities = [len(devices) for devices in free]
        taken = (
            _pack_engine(config, capacities)
            if request.islands is None
            else _pick_islands(request.islands, capacities)
        )
        if taken is None:
            engines = f" for each of {config.dp} engines" if config.dp > 1 else ""
            raise _NoRoomError(f"--devices is {config.devices}; that is not available{engines}")
        order = []
        for number, count in taken:
            order += free[number][:count]
            free[number] = free[number][count:]
        slices.append(_slice(order))
    return slices


def _slice(devices: Sequence[Device]) -> Slice:
    parts: list[NodeSlice] = []
    for device in devices:
        if parts and parts[-1].node == device.node:
            parts[-1] = replace(parts[-1], devices=(*parts[-1].devices, device.index))
        else:
            parts.append(NodeSlice(device.node, (device.index,)))
    return tuple(parts)


def units(config: EngineConfig) -> list[int]:
    """Return the unit sizes (in ranks) to keep on one island, the largest first."""
    sizes = {config.world_size, config.stage_size, config.tp_size * config.cp, config.cp, 1}
    return sorted((s for s in sizes if not config.world_size % s), reverse=True)


def _spread_evenly(config: EngineConfig, capacities: Sequence[int]) -> list[int]:
    """Return the rank count on each island if all islands are used."""
    ranks = config.dp * config.world_size
    if ranks < len(capacities):
        raise _NoRoomError(f"--nodes is {len(capacities)}; there are only {ranks} ranks in all")
    for unit in units(config):
        fit, count = [capacity // unit for capacity in capacities], ranks // unit
        if count >= len(capacities) and all(fit) and sum(fit) >= count:
            return [unit * n for n in _level_counts(fit, count)]
    raise _NoRoomError(f"no room for {ranks} rank{'s' if ranks > 1 else ''}")


def _level_counts(capacities: Sequence[int], count: int) -> list[int]:
    """Split `count` as equally as capacities allow; the first islands get the remainder."""
    given = [0] * len(capacities)
    for _ in range(count):
        open_ = (number for number in range(len(given)) if given[number] < capacities[number])
        given[min(open_, key=given.__getitem__)] += 1
    return given


def _pack_engine(config: EngineConfig, capacities: Sequence[int]) -> list[tuple[int, int]] | None:
    """Place an engine on as few islands as possible; return (island, ranks) pairs."""
    for unit in units(config):
        left, taken = config.world_size // unit, []
        for number in _by_capacity(capacities):
            if count := min(left, capacities[number] // unit):
                taken.append((number, unit * count))
                left -= count
        if not left:
            return sorted(taken)
    return None


def _pick_islands(
    islands: Sequence[int], capacities: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Choose a different island for each requested size; return (island, ranks) pairs."""
    largest = sorted(range(len(islands)), key=lambda part: -islands[part])
    chosen = dict(zip(largest, _by_capacity(capacities), strict=False))
    too_small = any(capacities[number] < islands[part] for part, number in chosen.items())
    if len(chosen) < len(islands) or too_small:
        return None
    in_order = dict(enumerate(sorted(chosen.values())))
    if all(capacities[in_order[part]] >= size for part, size in enumerate(islands)):
        chosen = in_order
    return [(chosen[part], size) for part, size in enumerate(islands)]


def _by_capacity(capacities: Sequence[int]) -> list[int]:
    """Return the island numbers, the largest capacity first."""
    return sorted(range(len(capacities)), key=lambda number: -capacities[number])


def _advice(config: EngineConfig, inventories: Sequence[Inventory]) -> str:
    """List values for --devices that would work."""
    size = config.world_size
    link = "nvlink:" if kind_of(config) == "cuda" else ""
    shapes = [f"{link}{n}x{size // n}" for n in range(1, size + 1) if not size % n]
    fits = []
    for text in shapes if link else (str(size), *shapes):
        try:
            _map_request(config, inventories, parse(text))
        except _NoRoomError:
            continue
        fits.append(text)
    if fits:
        return f"These --devices would fit: {', '.join(fits)}"
    needed = config.dp * size
    return f"No --devices would fit: {needed} {'are' if needed > 1 else 'is'} needed"
