"""A cluster on one machine: pods with networks of their own, and the controllers that keep them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from support.charts import templates_of
from support.container import skip_without_containers
from support.kubelet import Pod, Secrets
from support.netns import Network, network
from support.server import TIMEOUT

LOOK = 0.05  # seconds between two looks of a controller
NAMESPACE = "llm"

Object = dict[str, Any]


class Cluster:
    """Pods, each with a host of its own.

    Attributes:
        pods: all that have not ended.
        past: those that have.
    """

    def __init__(self, network: Network, folder: Path, secrets: Secrets) -> None:
        self.pods: list[Pod] = []
        self.past: list[Pod] = []
        self._network, self._folder, self._secrets = network, folder, secrets
        self._numbers = count()

    def create(
        self,
        name: str,
        template: Object,
        injected: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Pod:
        """Run a pod; see `Pod`."""
        pod = Pod(
            name,
            template,
            self._network.add(),
            self._folder / f"{next(self._numbers)}-{name}",
            secrets=self._secrets,
            injected=injected or {},
            names=names or {},
        )
        self.pods.append(pod)
        return pod

    async def delete(self, pod: Pod) -> None:
        """End a pod as the kubelet does."""
        await pod.delete()
        self.pods.remove(pod)
        self.past.append(pod)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it; raises what has gone wrong meanwhile, or TimeoutError."""
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                for pod in self.pods:
                    pod.check()
                await asyncio.sleep(LOOK)


@asynccontextmanager
async def cluster(folder: Path, secrets: Secrets | None = None) -> AsyncIterator[Cluster]:
    """A cluster, in whose network the caller's thread is. Skips the test where none can be made."""
    skip_without_containers()
    with network() as made, made.switch.inside():
        here = Cluster(made, folder, secrets or {})
        try:
            yield here
        except BaseException:
            for pod in [*here.past, *here.pods]:
                print(pod.name, pod.events, pod.log.read_text(), sep="\n")
            raise
        finally:
            closed = [pod.close() for pod in here.pods]
            errors = await asyncio.gather(*closed, return_exceptions=True)
            assert errors == [None] * len(errors)


class Deployment:
    """Replicas that are alike, replaced as `strategy.rollingUpdate` says."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._numbers = count()
        self._ending: list[asyncio.Task[None]] = []

    async def apply(self, deployment: Object) -> None:
        """Until all pods are of this template, and ready."""
        spec = deployment["spec"]
        replicas, rolling = spec["replicas"], spec["strategy"]["rollingUpdate"]
        template = spec["template"]
        while True:
            pods = [pod for pod in self._cluster.pods if not pod.terminating]
            new = [pod for pod in pods if pod.template == template]
            old = [pod for pod in pods if pod.template != template]
            if not old and len(new) == replicas and all(pod.ready for pod in new):
                return
            for _ in range(min(replicas - len(new), replicas + rolling["maxSurge"] - len(pods))):
                name = f"{deployment['metadata']['name']}-{next(self._numbers)}"
                self._cluster.create(name, template)
            spare = sum(pod.ready for pod in pods) - (replicas - rolling["maxUnavailable"])
            for pod in old[: max(0, spare)]:
                self._ending.append(asyncio.create_task(self._cluster.delete(pod)))
            await asyncio.sleep(LOOK)

    async def settle(self) -> None:
        """Until what has been told to end has ended."""
        await asyncio.gather(*self._ending)


class Group:
    """A LeaderWorkerSet's only group, all of which is made anew when one of its containers ends
    (RecreateGroupOnPodRestart).

    Attributes:
        leader, workers: its pods.
        generation: how often it has been made.
    """

    def __init__(self, cluster: Cluster, workload: Object) -> None:
        spec = workload["spec"]["leaderWorkerTemplate"]
        assert spec["restartPolicy"] == "RecreateGroupOnPodRestart"
        assert workload["spec"]["startupPolicy"] == "LeaderCreated"
        self._cluster, self._size = cluster, int(spec["size"])
        self._templates = templates_of(workload)
        self._name = workload["metadata"]["name"]
        self.generation = 0

    def create(self) -> None:
        """Its leader, then its workers, who know the leader's name at once."""
        name = f"{self._name}-0"
        address = f"{name}.{self._name}.{NAMESPACE}"
        injected = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(self._size)}
        index = "LWS_WORKER_INDEX"
        self.leader = self._cluster.create(name, self._templates["server"], injected | {index: "0"})
        names = {address: self.leader.host.address}
        self.workers = [
            self._cluster.create(
                f"{name}-{number}",
                self._templates["worker"],
                injected | {index: str(number)},
                names,
            )
            for number in range(1, self._size)
        ]
        self.generation += 1

    async def delete(self) -> None:
        """All of it at once, as garbage is collected when its leader is deleted."""
        await asyncio.gather(*(self._cluster.delete(pod) for pod in [self.leader, *self.workers]))

    async def control(self) -> None:
        """Make it anew when a container has ended; for ever."""
        while True:
            if any(pod.exits for pod in [self.leader, *self.workers]):
                await self.delete()
                self.create()
            await asyncio.sleep(LOOK)
