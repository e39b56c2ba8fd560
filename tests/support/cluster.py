"""A cluster on one machine: pods, each with a network of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

from support.container import skip_without_containers
from support.kubelet import Pod, Secrets
from support.netns import Network, network
from support.server import TIMEOUT

LOOK = 0.05  # seconds between two looks

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
        """Wait for it.

        Raises:
            TimeoutError: it does not come.
        """
        async with asyncio.timeout(TIMEOUT):
            while not condition():
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
            for pod in here.pods:
                await pod.close()
