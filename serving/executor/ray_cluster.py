"""A model whose ranks are on the nodes of a Ray cluster.

Ray places and supervises, and does no more: a placement group reserves a bundle of CPUs on each
node, with an actor in it that runs an agent (agent.py). Steps go by the agent's own connection,
for a call of an actor takes a millisecond, as long as a step of a small model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from weft.errors import ConfigError
from weft.serving.config import EngineConfig
from weft.serving.executor.hosts import Head, check_nodes, deal_out
from weft.serving.executor.machine import Machine
from weft.serving.executor.processes import RankExecutor, named
from weft.serving.loading import LoadedModel

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PLACE = 10.0
"""Seconds for Ray to find room."""


class RayExecutor(RankExecutor):
    """Ranks on nodes of the Ray cluster that RAY_ADDRESS names, or of the one that runs here.

    Args:
        config: of the engine; `nodes` of it are taken, this one only if it is a node with room.
        load_model: `loading.load_model`, or what stands in for it, on the nodes.

    Raises:
        ConfigError: there is no Ray, no cluster, or no room in it.
    """

    def __init__(self, config: EngineConfig, load_model: Callable[..., LoadedModel]) -> None:
        check_nodes(config)
        _connect()
        self._group: PlacementGroup | None = None
        try:
            super().__init__(config, self._gather(config, named(load_model)))
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        super().close()
        self._leave()

    def _gather(self, config: EngineConfig, load_model: str) -> Iterator[Machine]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = config.world_size // config.nodes
        self._group = _place(config.nodes, share)
        own = config.node_address or ray.util.get_node_ip_address()
        with Head(replace(config, node_port=0)) as head:
            self._actors = []  # which end when nobody knows them
            for bundle in range(config.nodes):
                strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
                actor = ray.remote(_Node).options(num_cpus=share, scheduling_strategy=strategy)
                self._actors.append(actor.remote())
            names = ray.get([actor.name.remote() for actor in self._actors])
            for actor in self._actors:
                actor.join.remote(own, head.port, head.token, load_model)
            others = head.wait_for(config.nodes)
        others.sort(key=lambda joined: names.index(joined.hello.name))
        yield from deal_out(config, others, head.token, load_model, own_ranks=False)

    def _leave(self) -> None:
        import ray

        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


class _Node:
    """The actor on a node."""

    def name(self) -> str:
        """The node's."""
        import ray

        return f"Ray node {ray.get_runtime_context().get_node_id()[:8]}"

    def join(self, host: str, port: int, token: str, load_model: str) -> None:
        """Run this node's share of ranks until the controller ends."""
        import logging

        from weft.serving.executor.agent import join

        logging.basicConfig(level=logging.INFO)
        join(host, port, token, name=self.name(), once=True, load_model=load_model)


def _connect() -> None:
    try:
        import ray
    except ModuleNotFoundError:
        raise ConfigError("--executor ray needs Ray: pip install 'weft[ray]'") from None
    try:
        ray.init(address="auto", logging_level="ERROR")
    except ConnectionError:
        where = os.environ.get("RAY_ADDRESS", "here; `ray start --head` starts one")
        raise ConfigError(f"--executor ray finds no Ray cluster at {where}") from None


def _place(nodes: int, share: int) -> PlacementGroup:
    """A bundle of so many CPUs on each of so many nodes; ConfigError if there is no room."""
    import ray

    group: Any = ray.util.placement_group([{"CPU": share}] * nodes, strategy="STRICT_SPREAD")
    if group.wait(PLACE):
        return group
    ray.util.remove_placement_group(group)
    free = [
        f"{node['NodeManagerAddress']}: {node['Resources'].get('CPU', 0):g}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    ray.shutdown()
    raise ConfigError(
        f"--nodes is {nodes}; Ray has no room for {share} ranks, a CPU each, on each of so many "
        f"nodes. CPUs of its nodes are {', '.join(free)}"
    )
