"""A model whose ranks are on several machines.

    this machine                                   others
    RankExecutor ──► LocalMachine: ranks 0, 1
                 ──► RemoteMachine ──── TCP ────►  agent: ranks 2, 3

The other machines have joined the front (pool.py), which says to the agents of those that are in
this engine's slice (resources.py) that they connect here, too. When all have, each is given its
ranks, and the port is closed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import Share
from weft.serving.executor.loading import LOOPBACK, LoadedModel
from weft.serving.executor.node import LocalNode, Node
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import check_address
from weft.serving.executor.nodes.messages import Unreachable
from weft.serving.executor.nodes.probe import measure
from weft.serving.executor.nodes.remote import JoinedNode, RemoteNode
from weft.serving.executor.placement import devices_of_ranks
from weft.serving.executor.ranks import STUCK, RankExecutor, named

LEND = 30.0
"""Seconds for the machines of a slice to connect."""


class MultiNodeExecutor(RankExecutor):
    """Ranks on this machine and on others that join it; see RankExecutor.

    Args:
        config: of this engine, with a slice.
        load_model: `loading.load_model`, or what stands in for it, on this machine.
        announce: told the port at which the machines of the slice are awaited.

    Raises:
        EngineError: a machine did not come.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_model: Callable[..., LoadedModel],
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(config, gather(config, load_model, announce))


def gather(
    config: EngineConfig, load_model: Callable[..., LoadedModel], announce: Callable[[int], None]
) -> Iterator[Node]:
    """All machines of the slice, each started when it is asked for."""
    others = {share.machine for share in config.replica.slice if share.machine}
    with JoinListener(replace(config, node_port=0)) as head:
        announce(head.port)
        joined = {each.hello.machine: each for each in head.wait_for(len(others), LEND)}
    if missing := others - joined.keys():
        for each in joined.values():
            each.link.close()
        names = " and ".join(
            f"{share.where}, for {_name(ranks)}"
            for share, ranks in ranks_of(config)
            if share.machine in missing
        )
        raise EngineError(f"{names}, did not connect to its engine within {LEND:g} s")
    yield from deal_out(config, joined, head.token, named(load_model))


def deal_out(
    config: EngineConfig, machines: Mapping[int, JoinedNode], token: str, load_model: str
) -> Iterator[Node]:
    """Start the ranks on each machine of the slice, in their order.

    Args:
        config: of this engine, with a slice.
        machines: those that have joined, by number; what is of the slice and not of these is here.
        token: the group's.
        load_model: "module:function", for the ranks that are here.

    Raises:
        ConfigError: some of the addresses cannot be reached by all.
        EngineError: a machine cannot reach another one, or has left.
    """
    slice, others = config.replica.slice, list(machines.values())
    waiting = list(others)
    try:
        here = any(share.machine not in machines for share in slice)
        own = own_address(config, others) if here else None
        where = [
            machines[s.machine].hello.address if s.machine in machines else own or LOOPBACK
            for s in slice
        ]
        check_addresses(where)
        for source, target, way in measure(own, others, token, seconds=0.0):
            if isinstance(way, Unreachable):
                raise EngineError(f"{source} does not reach {target} at a free port: {way.why}")
        slice_ranks = list(ranks_of(config))
        world_size = slice_ranks[-1][1].stop
        for (share, ranks), address in zip(slice_ranks, where, strict=True):
            joined = machines.get(share.machine)
            if joined is None:
                yield LocalNode(
                    config,
                    load_model,
                    ranks,
                    world_size,
                    host=where[0],
                    address=address,
                    devices=devices_of_ranks(config, share),
                )
                continue
            patience = config.stall_timeout * STUCK
            waiting.remove(joined)
            try:
                yield RemoteNode(
                    joined,
                    config,
                    share,
                    ranks,
                    world_size,
                    host=where[0],
                    patience=patience,
                )
            except OSError as error:
                joined.link.close()
                raise EngineError(f"{joined.where} has left: {error.strerror}") from None
    finally:
        for joined in waiting:
            joined.link.close()


def ranks_of(config: EngineConfig) -> Iterator[tuple[Share, range]]:
    """The parts of an engine's slice, each with its ranks."""
    first = 0
    for share in config.replica.slice:
        yield share, range(first, first := first + len(devices_of_ranks(config, share)))


def _name(ranks: range) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_nodes(config: EngineConfig) -> None:
    """Refuse what cannot be, before others are waited for.

    Raises:
        ConfigError: naming what is wrong.
    """
    ranks = config.dp * config.world_size
    if config.nodes > ranks and config.devices is None:
        raise ConfigError(
            f"--nodes is {config.nodes}; it must be at most {ranks}: each machine has a rank"
        )
    check_address(config.node_address)


def own_address(config: EngineConfig, others: list[JoinedNode]) -> str:
    """This machine's address, at which others reach it.

    Raises:
        ConfigError: they use several.
    """
    if config.node_address is not None:
        return config.node_address
    used = sorted({joined.link.own_address for joined in others})
    if len(used) > 1:
        raise ConfigError(
            f"machines have joined this one at {' and '.join(used)}: --node-address must say at "
            "which of these all of them reach it"
        )
    return used[0]


def check_addresses(addresses: list[str]) -> None:
    """Refuse addresses of which some are loopback, and cannot be reached from the others.

    Raises:
        ConfigError: naming them.
    """
    local = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    if local and len(local) < len(addresses):
        far = next(address for address in addresses if address not in local)
        raise ConfigError(
            f"a machine has joined at {local[0]}, where {far} cannot reach it: "
            "--node-address must give each machine's address"
        )
