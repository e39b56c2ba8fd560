"""Which device each rank gets: virtual slices, mapped to what the machines have.

A small resource manager as in Pathways (Barham et al. 2022, section 4.1): engines ask for a
virtual slice, and get devices of their own that suit how its ranks talk.

    machine 0, an island of 4       machine 1, an island of 4
    0    1    2    3                0    1    2    3             devices
    r0   r1   r2   r3               r4   r5   r6   r7            --tp 4 --pp 2, --devices 2x4
    a0   a1   a2   a3               b0   b1   b2   b3            --tp 4 --dp 2: engines a and b

An island is what reaches its own devices fast: GPUs of a machine, by NVLink, or its cores. Ranks
that exchange most have neighbouring numbers (models/spec/layout.py), and islands get ranks in their
order: of the units that a model is made of (an engine, a stage, a copy of attention, the ranks
that share a KV head), the largest of which all can be whole on an island are.

All GPUs of a machine count as one island: torch does not tell where NVLink is and where not. So do
its TPUs, though those of other machines of their slice are as near.

A rank is a process. With torch it has one device; with jax all that its engine has of a machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serving.config.slices import HERE, DeviceRequest, Kind, RankDevices, Share, Slice, parse

if TYPE_CHECKING:
    from weft.serving.config.settings import Backend, EngineConfig


@dataclass(frozen=True, slots=True)
class Device:
    """What one part of a model runs on.

    Attributes:
        machine: its number, which is that of an island, too; the controller's is 0.
        index: among the devices of its machine; ranks on a CPU share it, and have places.
    """

    machine: int
    index: int


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a machine has for ranks.

    Attributes:
        places: ranks that may share its cores; None for as many as come.
        memory: free bytes of the machine.
        gpus: free bytes of each.
        where: its name and address.
        tpus: how many, as jax counts them.
    """

    places: int | None = None
    memory: int = 0
    gpus: tuple[int, ...] = ()
    where: str = HERE
    tpus: int = 0

    def devices(self, kind: Kind, machine: int, most: int) -> list[Device]:
        """Of a kind, as those of the machine with that number; so many if there is no limit."""
        if kind == "cpu":
            count = most if self.places is None else self.places
        else:
            count = len(self.gpus) if kind == "cuda" else self.tpus
        return [Device(machine, i) for i in range(count)]

    def describe(self, kind: Kind) -> str:
        """In words."""
        if kind == "cuda":
            return f"{self.where}: {len(self.gpus)} GPUs"
        if kind == "tpu":
            return f"{self.where}: {self.tpus} TPUs"
        return f"{self.where}: {'any number of' if self.places is None else self.places} places"


def map_slices(config: EngineConfig, offers: Sequence[Inventory]) -> list[Slice]:
    """The slice of each of the `dp` engines; they have no device in common.

    Without `devices`, every machine takes part, as equally as its devices and whole units allow.

    Args:
        config: of the engine.
        offers: of the machines, the first of which is the controller's.

    Raises:
        ConfigError: there are not the devices; lists those that there are, and what fits.
    """
    try:
        slices = _map(config, offers, None if config.devices is None else parse(config.devices))
    except _NoRoomError as error:
        kind = kind_of(config)
        there = "; ".join(offer.describe(kind) for offer in offers)
        asked = f"--device is {kind}: " if config.device == kind != "cpu" else ""
        advice = _advice(config, offers)
        raise ConfigError(f"{asked}{error}. What there is: {there}. {advice}") from None
    on = [{share.machine for share in each} for each in slices]
    engines = [sum(number in machines for machines in on) for number in range(len(offers))]
    return [
        tuple(replace(s, engines=engines[s.machine], where=offers[s.machine].where) for s in each)
        for each in slices
    ]


def devices_of_ranks(config: EngineConfig, share: Share) -> list[RankDevices]:
    """What each rank that is on a machine has: one device, or with jax all of the share."""
    if config.backend == "jax":
        return [share.devices]
    return [(index,) for index in share.devices]


def can_replace(
    config: EngineConfig, slices: Sequence[Slice], machine: int, offer: Inventory
) -> bool:
    """Whether a machine has all the devices that engines use on the one with that number."""
    indexes = {i for each in slices for s in each if s.machine == machine for i in s.devices}
    most = 1 + max(indexes, default=-1)
    return len(offer.devices(kind_of(config), machine, most)) >= most


def kind_of(config: EngineConfig) -> Kind:
    """Of the devices that ranks run on; where `device` is auto and not `decided`, CPUs."""
    request = None if config.devices is None else parse(config.devices)
    if request is not None and request.kind is not None:
        return request.kind
    return "cpu" if config.device == "auto" else config.device


def decided(config: EngineConfig, offers: Sequence[Inventory]) -> EngineConfig:
    """With what `backend` and `device` auto are.

    jax where all machines have TPUs, else torch: on GPUs where machines have one for each rank,
    else on CPUs. So it is chosen once, for all ranks of all engines.
    """
    if config.backend == "auto":
        gpus = kind_of(config) == "cuda"
        tpus = config.device == "auto" and not gpus and all(offer.tpus for offer in offers)
        backend: Backend = "jax" if tpus or config.device == "tpu" else "torch"
        config = replace(config, backend=backend)
    if config.device != "auto":
        return config
    if config.backend == "jax":
        kind: Kind = "tpu" if all(offer.tpus for offer in offers) else "cpu"
        return replace(config, device=kind)
    on_gpus = replace(config, device="cuda")
    try:
        _map(on_gpus, offers, None if config.devices is None else parse(config.devices))
    except _NoRoomError:
        return replace(config, device=kind_of(config))
    return on_gpus


class _NoRoomError(Exception):
    """There is no such slice; what was asked for, in words."""


def _map(
    config: EngineConfig, offers: Sequence[Inventory], request: DeviceRequest | None
) -> list[Slice]:
    ranks = config.dp * config.world_size
    kind = kind_of(config)
    free = [offer.devices(kind, number, ranks) for number, offer in enumerate(offers)]
    if request is None:
        counts = _deal(config, [len(devices) for devices in free])
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
        rooms = [len(devices) for devices in free]
        taken = _pack(config, rooms) if request.islands is None else _pick(request.islands, rooms)
        if taken is None:
            engines = f" for each of {config.dp} engines" if config.dp > 1 else ""
            raise _NoRoomError(f"--devices is {config.devices}; that is not to be had{engines}")
        order = []
        for number, count in taken:
            order += free[number][:count]
            free[number] = free[number][count:]
        slices.append(_slice(order))
    return slices


def _slice(devices: Sequence[Device]) -> Slice:
    shares: list[Share] = []
    for device in devices:
        if shares and shares[-1].machine == device.machine:
            shares[-1] = replace(shares[-1], devices=(*shares[-1].devices, device.index))
        else:
            shares.append(Share(device.machine, (device.index,)))
    return tuple(shares)


def units(config: EngineConfig) -> list[int]:
    """Ranks of what is better on one island, the largest first."""
    sizes = {config.world_size, config.stage_size, config.tp * config.cp, config.cp, 1}
    return sorted((s for s in sizes if not config.world_size % s), reverse=True)


def _deal(config: EngineConfig, rooms: Sequence[int]) -> list[int]:
    """Ranks of each island, when all take part."""
    ranks = config.dp * config.world_size
    if ranks < len(rooms):
        raise _NoRoomError(f"--nodes is {len(rooms)}; ranks for them are {ranks} in all")
    for unit in units(config):
        fit, count = [room // unit for room in rooms], ranks // unit
        if count >= len(rooms) and all(fit) and sum(fit) >= count:
            return [unit * n for n in _level(fit, count)]
    raise _NoRoomError(f"{ranks} ranks have no room" if ranks > 1 else "1 rank has no room")


def _level(rooms: Sequence[int], count: int) -> list[int]:
    """So many, as equally as there is room; the first ones have one more."""
    given = [0] * len(rooms)
    for _ in range(count):
        open_ = (number for number in range(len(rooms)) if given[number] < rooms[number])
        given[min(open_, key=given.__getitem__)] += 1
    return given


def _pack(config: EngineConfig, rooms: Sequence[int]) -> list[tuple[int, int]] | None:
    """An engine's ranks, on as few islands as have room: their numbers, and ranks of each."""
    for unit in units(config):
        left, taken = config.world_size // unit, []
        for number in _roomiest(rooms):
            if count := min(left, rooms[number] // unit):
                taken.append((number, unit * count))
                left -= count
        if not left:
            return sorted(taken)
    return None


def _pick(islands: Sequence[int], rooms: Sequence[int]) -> list[tuple[int, int]] | None:
    """Islands with so much room each, no two the same: their numbers, and ranks of each."""
    largest = sorted(range(len(islands)), key=lambda part: -islands[part])
    chosen = dict(zip(largest, _roomiest(rooms), strict=False))
    if len(chosen) < len(islands) or any(rooms[n] < islands[part] for part, n in chosen.items()):
        return None
    in_order = dict(enumerate(sorted(chosen.values())))
    if all(rooms[in_order[part]] >= size for part, size in enumerate(islands)):
        chosen = in_order
    return [(chosen[part], size) for part, size in enumerate(islands)]


def _roomiest(rooms: Sequence[int]) -> list[int]:
    """Numbers of islands, those with most room first."""
    return sorted(range(len(rooms)), key=lambda number: -rooms[number])


def _advice(config: EngineConfig, offers: Sequence[Inventory]) -> str:
    """What --devices could be."""
    size = config.world_size
    link = "nvlink:" if kind_of(config) == "cuda" else ""
    shapes = [f"{link}{n}x{size // n}" for n in range(1, size + 1) if not size % n]
    fits = []
    for text in shapes if link else (str(size), *shapes):
        try:
            _map(config, offers, parse(text))
        except _NoRoomError:
            continue
        fits.append(text)
    if fits:
        return f"These --devices would fit: {', '.join(fits)}"
    needed = config.dp * size
    return f"None fits: {needed} {'are' if needed > 1 else 'is'} needed"
