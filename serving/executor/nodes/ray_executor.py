"""A model whose ranks are on the nodes of a Ray cluster.

Ray places and supervises, and does no more: a placement group reserves a bundle of CPUs on each
node, with an actor in it that runs an agent (agent.py). Steps go by the agent's own connection,
for a call of an actor takes a millisecond, as long as a step of a small model.

Each engine has a placement group of its own, so that one that fails lets go of its nodes alone.
Ray may place several engines on one node, which then share its memory and cores: each counts, by
the names of the groups, how many are where it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError, EngineError
from weft.serving.config.settings import EngineConfig
from weft.serving.config.slices import Kind
from weft.serving.executor.loading import LoadedModel
from weft.serving.executor.node import Node
from weft.serving.executor.nodes.join_listener import JoinListener
from weft.serving.executor.nodes.multi_node_executor import start_nodes
from weft.serving.executor.nodes.remote import JoinedNode
from weft.serving.executor.placement import kind_of
from weft.serving.executor.ranks import RankExecutor, import_path

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PLACE_TIMEOUT = 5.0
"""Seconds for Ray to find room, until it is said what is waited for."""

PLACED_POLL = 0.05
"""Seconds between two looks whether all engines have been placed."""

ENDED_POLL = 0.5
"""Seconds between two looks whether an actor has ended that should join."""

RESOURCES: dict[Kind, str] = {"cpu": "CPU", "cuda": "GPU", "tpu": "TPU"}
"""What Ray calls devices."""

logger = logging.getLogger(__name__)


class RayExecutor(RankExecutor):
    """Ranks on nodes of the Ray cluster that RAY_ADDRESS names, or of the one that runs here.

    Args:
        config: of this engine, with a slice: each part of it is a node, this one only if it is
            one with room.
        load_model: `loading.load_model`, or what stands in for it, on the nodes.

    Raises:
        ConfigError: there is no Ray, or no cluster.
        EngineError: a node has not joined.
    """

    def __init__(self, config: EngineConfig, load_model: Callable[..., LoadedModel]) -> None:
        _connect()
        self._group: PlacementGroup | None = None
        try:
            super().__init__(config, self._gather(config, import_path(load_model)))
        except BaseException:
            self._release_cluster()
            raise

    def close(self) -> None:
        super().close()
        self._release_cluster()

    def _gather(self, config: EngineConfig, load_model: str) -> Iterator[Node]:
        import ray

        # A node's actor sees its own devices, from the first.
        slice = tuple(
            replace(part, devices=tuple(range(len(part.devices)))) for part in config.replica.slice
        )
        counts = {part.node: len(part.devices) for part in slice}
        resource = RESOURCES[kind_of(config)]
        name = f"weft {config.replica.group} engine {config.replica.number}"
        self._group = _place(resource, list(counts.values()), name)
        engines = _engines_on_nodes(self._group, name, config)
        slice = tuple(replace(s, engines=n) for s, n in zip(slice, engines, strict=True))
        config = replace(config, replica=replace(config.replica, slice=slice))
        own = config.node_address or ray.util.get_node_ip_address()
        with JoinListener(replace(config, node_port=0)) as listener:
            joins = self._start(resource, counts, own, listener.port, listener.token, load_model)
            joined = _wait_for(listener, joins, self._group)
        nodes = {each.hello.node: each for each in joined}
        yield from start_nodes(config, nodes, listener.token, load_model)

    def _start(self, resource: str, counts: dict[int, int], *arguments: object) -> list[Any]:
        """Start an actor on each node, which joins; returns what says that they have ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        joins = []
        self._actors = []  # which end when nobody knows them
        for bundle, (node, count) in enumerate(counts.items()):
            strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
            takes = _takes(resource, count)
            actor = ray.remote(_Node).options(scheduling_strategy=strategy, **takes).remote()
            self._actors.append(actor)
            joins.append(actor.join.remote(*arguments, node))
        return joins

    def _release_cluster(self) -> None:
        import ray

        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


class _Node:
    """The actor on a node."""

    def join(self, host: str, port: int, token: str, load_model: str, node: int) -> None:
        """Run this node's share of ranks until the controller ends."""
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
        raise ConfigError("--executor ray needs Ray: pip install 'weft[ray]'") from None
    try:
        ray.init(address="auto", logging_level="ERROR")
    except ConnectionError:
        where = "here; `ray start --listener` starts one"
        if (address := os.environ.get("RAY_ADDRESS")) is not None:
            where = f"at RAY_ADDRESS {address}"
        raise ConfigError(f"--executor ray finds no Ray cluster {where}") from None


def _takes(resource: str, count: int) -> dict[str, Any]:
    """What an actor is said to take: all of its bundle."""
    of_rays = {"CPU": "num_cpus", "GPU": "num_gpus"}
    if resource in of_rays:
        return {of_rays[resource]: count}
    return {"num_cpus": 0, "resources": {resource: count}}


def _place(resource: str, counts: list[int], name: str) -> PlacementGroup:
    """So many CPUs, GPUs or TPUs, each number on a node of its own, once Ray has room for them."""
    import ray

    bundles = [{resource: float(count)} for count in counts]
    group: Any = ray.util.placement_group(bundles, strategy="STRICT_SPREAD", name=name)
    logged = ""
    while not group.wait(PLACE_TIMEOUT):
        there = ", ".join(
            f"{node['NodeManagerAddress']}: {node['Resources'].get(resource, 0):g}"
            for node in ray.nodes()
            if node["Alive"]
        )
        if there != logged:
            logger.warning(
                "waiting for Ray to have room for %s ranks, a %s each, on a node for each number; "
                "those of its nodes, free or not: %s",
                " + ".join(map(str, counts)),
                resource,
                there,
            )
        logged = there
    return group


def _engines_on_nodes(group: PlacementGroup, name: str, config: EngineConfig) -> list[int]:
    """How many of the server's engines have a part of the node of each bundle.

    Engines start at one time, and each measures the memory that is free before others have taken
    theirs. So those that Ray has not placed in time count, too: they may come to any node.

    Args:
        group, name: of this engine.
        config: of this engine.
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
        placed[name] = own.values()  # and not those of a core that has ended
        missing = config.dp - len(placed)
        if not missing or time.monotonic() >= deadline:
            break
        time.sleep(PLACED_POLL)
    return [
        missing + sum(own[bundle] in nodes for nodes in placed.values()) for bundle in sorted(own)
    ]


def _wait_for(listener: JoinListener, joins: list[Any], group: PlacementGroup) -> list[JoinedNode]:
    """The nodes, once all have joined.

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
    """Why an actor has ended."""
    import ray

    try:
        ray.get(join)
    except ray.exceptions.RayTaskError as error:
        return str(error.cause)
    except ray.exceptions.RayError as error:
        return str(error)
    return "it has ended"


def _describe_node(group: PlacementGroup, bundle: int) -> str:
    """Name and address of the node that a bundle is on."""
    import ray

    on = ray.util.placement_group_table(group)["bundles_to_node_id"][bundle]
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == on)
    return f"{_name(on)} at {address}"
