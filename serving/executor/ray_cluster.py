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
from weft.serving.executor.hosts import Head, deal_out
from weft.serving.executor.machine import Machine
from weft.serving.executor.processes import RankExecutor, named
from weft.serving.loading import LoadedModel
from weft.serving.resources import kind_of

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

PLACE = 10.0
"""Seconds for Ray to find room."""


class RayExecutor(RankExecutor):
    """Ranks on nodes of the Ray cluster that RAY_ADDRESS names, or of the one that runs here.

    Args:
        config: of this engine, with a slice: each part of it is a node, this one only if it is
            one with room.
        load_model: `loading.load_model`, or what stands in for it, on the nodes.

    Raises:
        ConfigError: there is no Ray, no cluster, or no room in it.
    """

    def __init__(self, config: EngineConfig, load_model: Callable[..., LoadedModel]) -> None:
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

        # Its own are what a node's actor sees, from the first.
        slice = tuple(
            replace(share, devices=tuple(range(len(share.devices))))
            for share in config.replica.slice
        )
        config = replace(config, replica=replace(config.replica, slice=slice))
        counts = {share.machine: len(share.devices) for share in config.replica.slice}
        resource = "GPU" if kind_of(config) == "cuda" else "CPU"
        self._group = _place(resource, list(counts.values()))
        own = config.node_address or ray.util.get_node_ip_address()
        with Head(replace(config, node_port=0)) as head:
            self._actors = []  # which end when nobody knows them
            for bundle, (machine, count) in enumerate(counts.items()):
                strategy = PlacementGroupSchedulingStrategy(self._group, bundle)
                takes = {"num_gpus": count} if resource == "GPU" else {"num_cpus": count}
                actor = ray.remote(_Node).options(scheduling_strategy=strategy, **takes).remote()
                actor.join.remote(own, head.port, head.token, load_model, machine)
                self._actors.append(actor)
            joined = {each.hello.machine: each for each in head.wait_for(len(counts))}
        yield from deal_out(config, joined, head.token, load_model)

    def _leave(self) -> None:
        import ray

        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        ray.shutdown()


class _Node:
    """The actor on a node."""

    def join(self, host: str, port: int, token: str, load_model: str, machine: int) -> None:
        """Run this node's share of ranks until the controller ends."""
        import logging

        import ray

        from weft.serving.executor.agent import join

        logging.basicConfig(level=logging.INFO)
        name = f"Ray node {ray.get_runtime_context().get_node_id()[:8]}"
        join(host, port, token, name=name, once=True, load_model=load_model, machine=machine)


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


def _place(resource: str, counts: list[int]) -> PlacementGroup:
    """So many CPUs or GPUs on a node each; ConfigError if there is no room."""
    import ray

    bundles = [{resource: float(count)} for count in counts]
    group: Any = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
    if group.wait(PLACE):
        return group
    ray.util.remove_placement_group(group)
    free = [
        f"{node['NodeManagerAddress']}: {node['Resources'].get(resource, 0):g}"
        for node in ray.nodes()
        if node["Alive"]
    ]
    ray.shutdown()
    raise ConfigError(
        f"Ray has no room for {' + '.join(map(str, counts))} ranks, a {resource} each, on a node "
        f"for each number. {resource}s of its nodes are {', '.join(free)}"
    )
