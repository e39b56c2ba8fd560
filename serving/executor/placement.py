"""Which device each rank gets: virtual slices, mapped to what the nodes have.

A small resource manager as in Pathways (Barham et al. 2022, section 4.1): engines ask for a
virtual slice, and get devices of their own that suit how its ranks talk.

    node 0, an island of 4       node 1, an island of 4
    0    1    2    3                0    1    2    3             devices
    r0   r1   r2   r3               r4   r5   r6   r7            --tp 4 --pp 2, --devices 2x4
    a0   a1   a2   a3               b0   b1   b2   b3            --tp 4 --dp 2: engines a and b

An island is what reaches its own devices fast: GPUs of a node, by NVLink, or its cores. Ranks
that exchange most have neighbouring numbers (models/spec/layout.py), and islands get ranks in their
order: of the units that a model is made of (an engine, a stage, a copy of attention, the ranks
that share a KV head), the largest of which all can be whole on an island are.

All GPUs of a node count as one island: torch does not tell where NVLink is and where not. So do
its TPUs, though those of other nodes of their slice are as near.

A rank is a process. With torch it has one device; with jax all that its engine has of a node.
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

if TYPE_CHECKING:
    from weft.serving.config.settings import Backend, EngineConfig


@dataclass(frozen=True, slots=True)
class Device:
    """What one part of a model runs on.

    Attributes:
        node: its number, which is that of an island, too; the controller's is 0.
        index: among the devices of its node; ranks on a CPU share it, and have max_ranks.
    """

    node: int
    index: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a node has for ranks.

    Attributes:
        max_ranks: ranks that may share its cores; None for as many as come.
        memory: free bytes of the node.
        gpus: free bytes of each.
        where: its name and address.
        tpus: how many, as jax counts them.
    """

    max_ranks: int | None = None
    memory: int = 0
    gpus: tuple[int, ...] = ()
    where: str = HERE
    tpus: int = 0

    def devices(self, kind: Kind, node: int, maximum: int) -> list[Device]:
        """Of a kind, as those of the node with that number; so many if there is no limit."""
        if kind == "cpu":
            count = maximum if self.max_ranks is None else self.max_ranks
        else:
            count = len(self.gpus) if kind == "cuda" else self.tpus
        return [Device(node, i) for i in range(count)]

    def describe(self, kind: Kind) -> str:
        """In words."""
        if kind == "cuda":
            return f"{self.where}: {len(self.gpus)} GPUs"
        if kind == "tpu":
            return f"{self.where}: {self.tpus} TPUs"
        count = "any number of" if self.max_ranks is None else self.max_ranks
        return f"{self.where}: {count} CPU ranks"


def map_slices(config: EngineConfig, inventories: Sequence[Inventory]) -> list[Slice]:
    """The slice of each of the `dp` engines; they have no device in common.

    Without `devices`, every node takes part, as equally as its devices and whole units allow.

    Args:
        config: of the engine.
        inventories: of the nodes, the first of which is the controller's.

    Raises:
        ConfigError: there are not the devices; lists those that there are, and what fits.
    """
    try:
        slices = _map_request(
            config, inventories, None if config.devices is None else parse(config.devices)
        )
    except _NoRoomError as error:
        kind = kind_of(config)
        there = "; ".join(inventory.describe(kind) for inventory in inventories)
        asked = f"--device is {kind}: " if config.device == kind != "cpu" else ""
        advice = _advice(config, inventories)
        raise ConfigError(f"{asked}{error}. What there is: {there}. {advice}") from None
    on = [{part.node for part in each} for each in slices]
    engines = [sum(number in nodes for nodes in on) for number in range(len(inventories))]
    return [
        tuple(replace(s, engines=engines[s.node], where=inventories[s.node].where) for s in each)
        for each in slices
    ]


def devices_of_ranks(config: EngineConfig, part: NodeSlice) -> list[RankDevices]:
    """What each rank that is on a node has: one device, or with jax all of the share."""
    if config.backend == "jax":
        return [part.devices]
    return [(index,) for index in part.devices]


def can_replace(
    config: EngineConfig, slices: Sequence[Slice], node: int, inventory: Inventory
) -> bool:
    """Whether a node has all the devices that engines use on the one with that number."""
    indexes = {i for each in slices for s in each if s.node == node for i in s.devices}
    most = 1 + max(indexes, default=-1)
    return len(inventory.devices(kind_of(config), node, most)) >= most


def kind_of(config: EngineConfig) -> Kind:
    """Of the devices that ranks run on; where `device` is auto and not `decided`, CPUs."""
    request = None if config.devices is None else parse(config.devices)
    if request is not None and request.kind is not None:
        return request.kind
    return "cpu" if config.device == "auto" else config.device


def decided(config: EngineConfig, inventories: Sequence[Inventory]) -> EngineConfig:
    """With what `backend` and `device` auto are.

    jax where all nodes have TPUs, else torch: on GPUs where nodes have one for each rank,
    else on CPUs. So it is chosen once, for all ranks of all engines.
    """
    if config.backend == "auto":
        gpus = kind_of(config) == "cuda"
        tpus = (
            config.device == "auto"
            and not gpus
            and all(inventory.tpus for inventory in inventories)
        )
        backend: Backend = "jax" if tpus or config.device == "tpu" else "torch"
        config = replace(config, backend=backend)
    if config.device != "auto":
        return config
    if config.backend == "jax":
        kind: Kind = "tpu" if all(inventory.tpus for inventory in inventories) else "cpu"
        return replace(config, device=kind)
    on_gpus = replace(config, device="cuda")
    try:
        _map_request(
            on_gpus, inventories, None if config.devices is None else parse(config.devices)
        )
    except _NoRoomError:
        return replace(config, device=kind_of(config))
    return on_gpus


class _NoRoomError(Exception):
    """There is no such slice; what was asked for, in words."""


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
            f"--devices is {config.devices}, {request.count} of each engine; it has "
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
    """Ranks of what is better on one island, the largest first."""
    sizes = {config.world_size, config.stage_size, config.tp * config.cp, config.cp, 1}
    return sorted((s for s in sizes if not config.world_size % s), reverse=True)


def _spread_evenly(config: EngineConfig, capacities: Sequence[int]) -> list[int]:
    """Ranks of each island, when all take part."""
    ranks = config.dp * config.world_size
    if ranks < len(capacities):
        raise _NoRoomError(f"--nodes is {len(capacities)}; ranks for them are {ranks} in all")
    for unit in units(config):
        fit, count = [capacity // unit for capacity in capacities], ranks // unit
        if count >= len(capacities) and all(fit) and sum(fit) >= count:
            return [unit * n for n in _level_counts(fit, count)]
    raise _NoRoomError(f"{ranks} ranks have no room" if ranks > 1 else "1 rank has no room")


def _level_counts(capacities: Sequence[int], count: int) -> list[int]:
    """So many, as equally as there is room; the first ones have one more."""
    given = [0] * len(capacities)
    for _ in range(count):
        open_ = (number for number in range(len(capacities)) if given[number] < capacities[number])
        given[min(open_, key=given.__getitem__)] += 1
    return given


def _pack_engine(config: EngineConfig, capacities: Sequence[int]) -> list[tuple[int, int]] | None:
    """An engine's ranks, on as few islands as have room: their numbers, and ranks of each."""
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
    """Islands with so much room each, no two the same: their numbers, and ranks of each."""
    largest = sorted(range(len(islands)), key=lambda part: -islands[part])
    chosen = dict(zip(largest, _by_capacity(capacities), strict=False))
    if len(chosen) < len(islands) or any(
        capacities[n] < islands[part] for part, n in chosen.items()
    ):
        return None
    in_order = dict(enumerate(sorted(chosen.values())))
    if all(capacities[in_order[part]] >= size for part, size in enumerate(islands)):
        chosen = in_order
    return [(chosen[part], size) for part, size in enumerate(islands)]


def _by_capacity(capacities: Sequence[int]) -> list[int]:
    """Numbers of islands, those with most room first."""
    return sorted(range(len(capacities)), key=lambda number: -capacities[number])


def _advice(config: EngineConfig, inventories: Sequence[Inventory]) -> str:
    """What --devices could be."""
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
    return f"None fits: {needed} {'are' if needed > 1 else 'is'} needed"
