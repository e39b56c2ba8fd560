"""A model with ranks on the nodes of a Ray cluster.

Ray only places and supervises actors. A placement group reserves a bundle of devices on each node,
and an actor in the bundle runs an agent (agent.py). Steps use the agent's own connection, because
an actor call takes a millisecond, as long as a whole step of a small model.

Each engine has its own placement group, so a failed engine releases only its own nodes. Ray may
place several engines on one node, and they then share its memory and cores. Each engine finds out
how many from the names of the placement groups.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import zmq

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import Kind
from weft.serving.executor.loading import LoadedModel
from weft.serving.executor.node import Node
from weft.serving.executor.nodes.curve import Context
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.link import LINGER
from weft.serving.executor.nodes.multi_node_executor import start_nodes
from weft.serving.executor.nodes.remote import JoinedNode
from weft.serving.executor.placement import kind_of
from weft.serving.executor.ranks import STUCK_FRACTION, RankExecutor, import_path

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PLACE_TIMEOUT = 5.0
"""Seconds for Ray to find room until weft logs what it waits for."""

PLACED_POLL = 0.05
"""Seconds between two checks whether all engines have been placed."""

ENDED_POLL = 0.5
"""Seconds between two checks whether an actor has ended instead of joining."""

RESOURCES: dict[Kind, str] = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}
"""Ray's names for the kinds of devices."""

logger = logging.getLogger(__name__)


class RayExecutor(RankExecutor):
    """Executor for ranks on the Ray cluster at RAY_ADDRESS, or on the local cluster.

    Args:
        config: settings of this engine, with its slice. Each part of the slice is a Ray node; this
            node is one of them only if Ray chooses it.
        load_model: `loading.load_model` or a replacement, importable on the nodes.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster.
        EngineError: a node did not join.
    """

    def __init__(self, config: EngineConfig, load_model: Callable[..., LoadedModel]) -> None:
        _connect()
        self._group: PlacementGroup | None = None
        self._context: Context = zmq.Context()
        try:
            super().__init__(config, self._start_nodes(config, import_path(load_model)))
        except BaseException:
            self._release_cluster()
            raise

    def close(self) -> None:
        """See `Executor.close`."""
        super().close()
        self._release_cluster()

    def _start_nodes(self, config: EngineConfig, load_model: str) -> Iterator[Node]:
        import ray

        # An actor sees only its own devices, numbered from 0.
        slice = tuple(
            replace(part, devices=tuple(range(len(part.devices)))) for part in config.replica.slice
        )
        counts = {part.node: len(part.devices) for part in slice}
        resource = RESOURCES[kind_of(config)]
        name = f"weft {config.replica.group} engine {config.replica.number}"
        self._group = _place(resource, list(counts.values()), name)
        engines = _engines_on_nodes(self._group, name, config)
        slice = tuple(replace(part, engines=n) for part, n in zip(slice, engines, strict=True))
        config = replace(config, replica=replace(config.replica, slice=slice))
        own = config.node_address or ray.util.get_node_ip_address()
        patience = config.stall_timeout * STUCK_FRACTION
        with JoinListener(
            self._context, replace(config, node_port=0), patience=patience
        ) as listener:
            joins = self._start_actors(
                resource, counts, own, listener.port, listener.token, load_model
            )
            joined = _wait_for(listener, joins, self._group)
        nodes = {each.hello.node: each for each in joined}
        yield from start_nodes(config, nodes, load_model)

    def _start_actors(self, resource: str, counts: dict[int, int], *arguments: object) -> list[Any]:
        """Start an actor on each node; return references that are ready when an actor has ended.

        Args:
            resource: Ray's name for the devices.
            counts: number of devices by node number.
            arguments: first arguments of `_AgentActor.join`.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        joins = []
        self._actors = []  # Ray ends an actor without references
        for bundle, (node, count) in enumerate(counts.items()):
            strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
            options = _resource_options(resource, count)
            remote = ray.remote(_AgentActor)
            actor = remote.options(scheduling_strategy=strategy, **options).remote()
            self._actors.append(actor)
            joins.append(actor.join.remote(*arguments, node))
        return joins

    def _release_cluster(self) -> None:
        import ray

        self._context.destroy(LINGER)  # the last messages have left then
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


class _AgentActor:
    """Ray actor that runs an agent on its node."""

    def join(self, host: str, port: int, token: str, load_model: str, node: int) -> None:
        """Run this node's ranks until the controller ends."""
        import logging

        import ray

        from weft.serving.executor.nodes.agent import join

        logging.basicConfig(level=logging.INFO)
        name = _name(ray.get_runtime_context().get_node_id())
        join(host, port, token, name=name, once=True, load_model=load_model, node=node)


def _name(node_id: str) -> str:
    return f"Ray node {node_id[:8]}"


def _connect() -> None:
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("--executor ray needs Ray: pip install 'ray>=2.50'") from None
    try:
        ray.init(address="auto", logging_level="ERROR")
    except ConnectionError:
        where = "here; `ray start --head` starts one"
        if (address := os.environ.get("RAY_ADDRESS")) is not None:
            where = f"at RAY_ADDRESS {address}"
        raise ConfigError(f"--executor ray finds no Ray cluster {where}") from None


def _resource_options(resource: str, count: int) -> dict[str, Any]:
    """Build the options for an actor to take its whole bundle."""
    named_options = {"CPU": "num_cpus", "GPU": "num_gpus"}
    if resource in named_options:
        return {named_options[resource]: count}
    return {"num_cpus": 0, "resources": {resource: count}}


def _place(resource: str, counts: list[int], name: str) -> PlacementGroup:
    """Reserve devices on a separate node for each count; wait until Ray has room."""
    import ray

    bundles = [{resource: float(count)} for count in counts]
    group: Any = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name=name)
    logged = ""
    while not group.wait(PLACE_TIMEOUT):
        existing = ", ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get(resource, 0):g}"
            for node in ray.nodes()
            if node["Alive"]
        )
        if existing != logged:
            logger.warning(
                "waiting for Ray to have room for %s ranks (each number on a separate node, one %s "
                "per rank); %ss of its nodes, free or not: %s",
                " + ".join(map(str, counts)),
                resource,
                resource,
                existing,
            )
        logged = existing
    return group


def _engines_on_nodes(group: PlacementGroup, name: str, config: EngineConfig) -> list[int]:
    """Count the server's engines on the node of each bundle.

    Engines start at the same time, and each measures the free memory before the others have taken
    theirs. Engines that Ray has not placed in time therefore count, too: they may come to any node.

    Args:
        group, name: placement group of this engine, and its name.
        config: settings of this engine.
    """
    import ray

    own: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    deadline = time.monotonic() + PLACE_TIMEOUT
    while True:
        placed = {
            each["name"]: each["bundles_to_node_id"].values()
            for each in ray.util.placement_group_table().values()
            if each["name"].startswith(f"weft {config.replica.group} ")
            and each["state"] == "CREATED"
        }
        placed[name] = own.values()  # replaces the entry from a previous core
        missing = config.dp - len(placed)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(PLACED_POLL)
    return [
        missing + sum(own[bundle] in nodes for nodes in placed.values()) for bundle in sorted(own)
    ]


def _wait_for(listener: JoinListener, joins: list[Any], group: PlacementGroup) -> list[JoinedNode]:
    """Wait until all nodes have joined.

    Raises:
        EngineError: an actor has ended instead.
    """
    import ray

    others: list[JoinedNode] = []
    try:
        while len(others) < len(joins):
            others += listener.wait_for(len(joins) - len(others), ENDED_POLL)
            for join in ray.wait(joins, timeout=0)[0]:
                where = _describe_node(group, joins.index(join))
                raise EngineError(f"{where} has not joined: {_reason_ended(join)}")
    except BaseException:
        for joined in others:
            joined.link.close()
        raise
    return others


def _reason_ended(join: Any) -> str:
    """Describe why an actor has ended."""
    import ray

    try:
        ray.get(join)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.RayError as error:
        return str(error)
    return "it has ended"


def _describe_node(group: PlacementGroup, bundle: int) -> str:
    """Return name and address of a bundle's node."""
    import ray

    node_id = ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return f"{_name(node_id)} at {address}"
