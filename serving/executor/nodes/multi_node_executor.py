"""A model with ranks on several nodes.

    this node                                      other nodes
    RankExecutor ──► LocalNode: ranks 0, 1
                 ──► RemoteNode ─── link.py ─────►  agent: ranks 2, 3

The other nodes have joined the API process (node_pool.py). It tells the agents in this engine's
slice (placement.py) to join this engine core, too. Once all have joined, each gets its ranks, and
the join port is closed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import zmq

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import NodeSlice
from weft.serving.executor.loading import LOOPBACK, LoadedModel
from weft.serving.executor.node import LocalNode, Node
from weft.serving.executor.nodes.curve import Context
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import LINGER, check_address
from weft.serving.executor.nodes.messages import Unreachable
from weft.serving.executor.nodes.probe import measure_links
from weft.serving.executor.nodes.remote import JoinedNode, RemoteNode
from weft.serving.executor.placement import devices_of_ranks
from weft.serving.executor.ranks import STUCK_FRACTION, RankExecutor, import_path

JOIN_TIMEOUT = 30.0
"""Seconds for the nodes of a slice to connect."""


class MultiNodeExecutor(RankExecutor):
    """Executor for ranks on this node and on joined nodes; see RankExecutor.

    Args:
        config: settings of this engine, with its slice.
        load_model: `loading.load_model` or a replacement, for the ranks on this node.
        announce: callback with the port where the nodes of the slice must connect.

    Raises:
        EngineError: a node did not connect.
    """

    def __init__(
        self,
        config: EngineConfig,
        load_model: Callable[..., LoadedModel],
        announce: Callable[[int], None],
    ) -> None:
        self._context: Context = zmq.Context()
        nodes = connected_nodes(self._context, config, load_model, announce)
        try:
            super().__init__(config, nodes)
        except BaseException:
            self._context.destroy(LINGER)
            raise

    def close(self) -> None:
        """See `Executor.close`. The last messages have left then."""
        super().close()
        self._context.destroy(LINGER)


def connected_nodes(
    context: Context,
    config: EngineConfig,
    load_model: Callable[..., LoadedModel],
    announce: Callable[[int], None],
) -> Iterator[Node]:
    """Wait for all nodes in the slice; yield each one with its ranks started."""
    others = {part.node for part in config.replica.slice if part.node}
    patience = config.stall_timeout * STUCK_FRACTION
    with JoinListener(context, replace(config, node_port=0), patience=patience) as listener:
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
    yield from start_nodes(config, joined, import_path(load_model))


def start_nodes(
    config: EngineConfig, joined: Mapping[int, JoinedNode], load_model: str
) -> Iterator[Node]:
    """Start the ranks on each node, in rank order.

    Args:
        config: settings of this engine, with its slice.
        joined: the other nodes by number. A node of the slice that is missing here is this one.
        load_model: "module:function", for the ranks on this node.

    Raises:
        ConfigError: some nodes cannot reach all addresses.
        EngineError: a node cannot reach another one, or has left.
    """
    slice, others = config.replica.slice, list(joined.values())
    waiting = list(others)
    try:
        uses_this_node = any(part.node not in joined for part in slice)
        own = own_address(config, others) if uses_this_node else None
        addresses = [
            joined[part.node].hello.address if part.node in joined else own or LOOPBACK
            for part in slice
        ]
        check_addresses(addresses)
        for source, target, link in measure_links(own, others, seconds=0.0):
            if isinstance(link, Unreachable):
                raise EngineError(f"{source} cannot reach {target} at a free port: {link.reason}")
        slice_ranks = list(ranks_by_node(config))
        world_size = slice_ranks[-1][1].stop
        for (part, ranks), address in zip(slice_ranks, addresses, strict=True):
            node = joined.get(part.node)
            if node is None:
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
            waiting.remove(node)
            try:
                yield RemoteNode(
                    node,
                    config,
                    part,
                    ranks,
                    world_size,
                    rendezvous_host=addresses[0],
                    patience=config.stall_timeout * STUCK_FRACTION,
                )
            except OSError as error:
                node.link.close()
                raise EngineError(f"{node.where} has left: {error.strerror}") from None
    finally:
        for node in waiting:
            node.link.close()


def ranks_by_node(config: EngineConfig) -> Iterator[tuple[NodeSlice, range]]:
    """Yield each part of an engine's slice with its rank numbers."""
    first = 0
    for part in config.replica.slice:
        yield part, range(first, first := first + len(devices_of_ranks(config, part)))


def _describe(ranks: range) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def check_nodes(config: EngineConfig) -> None:
    """Check `nodes` and `node_address` before waiting for other nodes.

    Raises:
        ConfigError: one of them cannot work.
    """
    ranks = config.dp * config.world_size
    if config.nodes > ranks and config.devices is None:
        raise ConfigError(
            f"--nodes is {config.nodes}; it must be at most {ranks}, the number of ranks"
        )
    check_address(config.node_address)


def own_address(config: EngineConfig, others: list[JoinedNode]) -> str:
    """Return this node's address, as used by the other nodes.

    Raises:
        ConfigError: they use different ones.
    """
    if config.node_address is not None:
        return config.node_address
    used = sorted({joined.link.own_address for joined in others})
    if len(used) > 1:
        raise ConfigError(
            f"nodes have joined this one at {' and '.join(used)}: set --node-address to the one "
            "that all nodes can reach"
        )
    return used[0]


def check_addresses(addresses: list[str]) -> None:
    """Check that loopback addresses are used either by all nodes or by none.

    Raises:
        ConfigError: other nodes cannot reach the named address.
    """
    local = [address for address in addresses if ipaddress.ip_address(address).is_loopback]
    if local and len(local) < len(addresses):
        remote = next(address for address in addresses if address not in local)
        raise ConfigError(
            f"a node has joined at {local[0]}, where {remote} cannot reach it: set --node-address "
            "on each node"
        )
