"""A model whose ranks are on several nodes.

    this node                                   others
    RankExecutor ──► LocalNode: ranks 0, 1
                 ──► RemoteNode ──── TCP ────►  agent: ranks 2, 3

The other nodes have joined the front (pool.py), which says to the agents of those that are in
this engine's slice (resources.py) that they connect here, too. When all have, each is given its
ranks, and the port is closed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.loading import LOOPBACK, LoadedModel
from weft.serving.executor.node import LocalNode, Node
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import check_address
from weft.serving.executor.nodes.messages import Unreachable
from weft.serving.executor.nodes.probe import measure_links
from weft.serving.executor.nodes.remote import JoinedNode, RemoteNode
from weft.serving.executor.placement import devices_of_ranks
from weft.serving.executor.ranks import STUCK_FRACTION, RankExecutor, import_path

JOIN_TIMEOUT = 30.0
"""Seconds for the nodes of a slice to connect."""


class MultiNodeExecutor(RankExecutor):
    """Ranks on this node and on others that join it; see RankExecutor.

    Args:
        config: of this engine, with a slice.
        load_model: `loading.load_model`, or what stands in for it, on this node.
        announce: told the port at which the nodes of the slice are awaited.

    Raises:
        EngineError: a node did not come.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_model: Callable[..., LoadedModel],
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(config, connected_nodes(config, load_model, announce))


def connected_nodes(
    config: EngineConfig, load_model: Callable[..., LoadedModel], announce: Callable[[int], None]
) -> Iterator[Node]:
    """All nodes of the slice, each started when it is asked for."""
    others = {part.node for part in config.replica.slice if part.node}
    with JoinListener(replace(config, node_port=0)) as listener:
        announce(listener.port)
        joined = {each.hello.node: each for each in listener.wait_for(len(others), JOIN_TIMEOUT)}
    if missing := others - joined.keys():
        for each in joined.values():
            each.link.close()
        names = " and ".join(
            f"{part.where}, for {_describe(ranks)}"
            for part, ranks in ranks_by_node(config)
            if part.node in missing
        )
        raise EngineError(f"{names}, did not connect to its engine within {JOIN_TIMEOUT:g} s")
    yield from start_nodes(config, joined, listener.token, import_path(load_model))


def start_nodes(
    config: EngineConfig, nodes: Mapping[int, JoinedNode], token: str, load_model: str
) -> Iterator[Node]:
    """Start the ranks on each node of the slice, in their order.

    Args:
        config: of this engine, with a slice.
        nodes: those that have joined, by number; what is of the slice and not of these is here.
        token: the group's.
        load_model: "module:function", for the ranks that are here.

    Raises:
        ConfigError: some of the addresses cannot be reached by all.
        EngineError: a node cannot reach another one, or has left.
    """
    slice, others = config.replica.slice, list(nodes.values())
    waiting = list(others)
    try:
        here = any(part.node not in nodes for part in slice)
        own = own_address(config, others) if here else None
        addresses = [
            nodes[s.node].hello.address if s.node in nodes else own or LOOPBACK for s in slice
        ]
        check_addresses(addresses)
        for source, target, way in measure_links(own, others, token, seconds=0.0):
            if isinstance(way, Unreachable):
                raise EngineError(f"{source} does not reach {target} at a free port: {way.reason}")
        slice_ranks = list(ranks_by_node(config))
        world_size = slice_ranks[-1][1].stop
        for (part, ranks), address in zip(slice_ranks, addresses, strict=True):
            joined = nodes.get(part.node)
            if joined is None:
                yield LocalNode(
                    config,
                    load_model,
                    ranks,
                    world_size,
                    rendezvous_host=addresses[0],
                    address=address,
                    devices=devices_of_ranks(config, part),
                )
                continue
            patience = config.stall_timeout * STUCK_FRACTION
            waiting.remove(joined)
            try:
                yield RemoteNode(
                    joined,
                    config,
                    part,
                    ranks,
                    world_size,
                    rendezvous_host=addresses[0],
                    patience=patience,
                )
            except OSError as error:
                joined.link.close()
                raise EngineError(f"{joined.where} has left: {error.strerror}") from None
    finally:
        for joined in waiting:
            joined.link.close()


def ranks_by_node(config: EngineConfig) -> Iterator[tuple[NodeSlice, range]]:
    """The parts of an engine's slice, each with its ranks."""
    first = 0
    for part in config.replica.slice:
        yield part, range(first, first := first + len(devices_of_ranks(config, part)))


def _describe(ranks: range) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_nodes(config: EngineConfig) -> None:
    """Refuse what cannot be, before others are waited for.

    Raises:
        ConfigError: naming what is wrong.
    """
    ranks = config.dp * config.world_size
    if config.nodes > ranks and config.devices is None:
        raise ConfigError(
            f"--nodes is {config.nodes}; it must be at most {ranks}: each node has a rank"
        )
    check_address(config.node_address)


def own_address(config: EngineConfig, others: list[JoinedNode]) -> str:
    """This node's address, at which others reach it.

    Raises:
        ConfigError: they use several.
    """
    if config.node_address is not None:
        return config.node_address
    used = sorted({joined.link.own_address for joined in others})
    if len(used) > 1:
        raise ConfigError(
            f"nodes have joined this one at {' and '.join(used)}: --node-address must say at "
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
            f"a node has joined at {local[0]}, where {far} cannot reach it: "
            "--node-address must give each node's address"
        )
