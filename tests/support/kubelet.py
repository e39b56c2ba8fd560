"""A pod as the kubelet runs it: its container, started again when it ends, its probes and its end.

    start:  startupProbe ──► readinessProbe sets `ready`, livenessProbe may end the container
    end:    preStop ──► SIGTERM ──► SIGKILL when the grace period is over, which began with preStop
            (and is 2 seconds after it, at least)

Times are the manifest's. It knows one container for each pod, emptyDir, hostPath and Secret
volumes (those in memory end with the container and not with the pod), httpGet and exec probes,
preStop commands.
"""

from __future__ import annotations

import asyncio
import shlex
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import aiohttp

from support.container import Container, expand
from support.netns import Host

BACK_OFF = 10.0  # seconds before a container is started a third time, then twice as long each time
LEAST_GRACE = 2.0

Object = dict[str, Any]
Secrets = Mapping[str, Mapping[str, str]]


class Pod:
    """A pod that runs.

    Attributes:
        name, template: its own, and what it was made from.
        host: its network.
        ready: whether it may get requests.
        terminating: whether it has been told to end.
        exits: status of each container that has ended.
        events: what happened, for people and assertions.
        log: what its containers have said.
    """

    def __init__(
        self,
        name: str,
        template: Object,
        host: Host,
        folder: Path,
        *,
        secrets: Secrets,
        injected: Mapping[str, str],
        names: Mapping[str, str],
    ) -> None:
        """Run a pod.

        Args:
            template: its manifest's `metadata` and `spec`.
            folder: for its volumes and its log.
            secrets: of its namespace, by name and key.
            injected: variables that a controller adds.
            names: of other hosts, and their addresses.
        """
        self.name, self.template, self.host = name, template, host
        self.ready = self.terminating = False
        self.exits: list[int] = []
        self.events: list[str] = []
        self.log = folder / "log"
        self._folder, self._secrets = folder, secrets
        spec = template["spec"]
        (self._spec,) = spec["containers"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        self._grace: int = spec.get("terminationGracePeriodSeconds", 30)
        self._restarts = spec.get("restartPolicy", "Always") == "Always"
        self._environment = dict(injected)
        for each in self._spec.get("env", []):
            self._environment[each["name"]] = self._value(each)
        folder.mkdir()
        self._mounts = [*self._hosts_file(names), *self._volumes()]
        self._container: Container | None = None
        self._ending: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._running = asyncio.create_task(self._run())

    @property
    def url(self) -> str:
        """Of its API."""
        return f"http://{self.host.address}:{self._port('http')}"

    @property
    def pid(self) -> int:
        """Of its container's PID 1, as this machine counts."""
        assert self._container is not None
        return self._container.pid

    async def delete(self) -> None:
        """End it, as its manifest says."""
        self.terminating = True
        self._say("is told to end")
        await self._end()
        await self._running

    def check(self) -> None:
        """Raise what has gone wrong with running it."""
        if self._running.done():
            self._running.result()

    async def close(self) -> None:
        """Kill what is left of it."""
        for task in (self._ending, self._running):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._container is not None:
            self._container.signal(signal.SIGKILL)
            await self._container.wait()

    async def _run(self) -> None:
        while not self.terminating:
            if len(self.exits) > 1:
                await asyncio.sleep(BACK_OFF * 2 ** (len(self.exits) - 2))
            async with self._starting:
                if self.terminating:
                    return
                self._say("starts")
                self._container = container = await Container.start(
                    self._spec, self.name, self.host, self._environment, self._mounts, self._folder
                )
            probing = asyncio.create_task(self._probe())
            try:
                self.exits.append(await container.wait())
                self._container = None
            finally:
                self.ready = False
                probing.cancel()
                with suppress(asyncio.CancelledError):
                    await probing
            self._say(f"has ended with {self.exits[-1]}")
            if not self._restarts:
                return

    async def _end_container(self) -> None:
        async with self._starting:
            container = self._container
        if container is None:
            return
        ended = asyncio.create_task(container.wait())
        begin = asyncio.get_running_loop().time()
        hook = self._spec.get("lifecycle", {}).get("preStop")
        if hook is not None:
            command = asyncio.create_task(container.run(*hook["exec"]["command"]))
            await asyncio.wait({command, ended}, timeout=self._grace, return_when="FIRST_COMPLETED")
            self._say(f"preStop: {command.result() if command.done() else 'under way'}")
            command.cancel()
            await asyncio.wait([command])
            if ended.done():
                return
        self._say("SIGTERM")
        container.signal(signal.SIGTERM)
        left = self._grace - (asyncio.get_running_loop().time() - begin)
        await asyncio.wait([ended], timeout=max(LEAST_GRACE, left))
        if not ended.done():
            self._say("SIGKILL")
            container.signal(signal.SIGKILL)
        await ended

    async def _probe(self) -> None:
        async with aclosing(self._verdicts("startupProbe")) as verdicts:
            if not await anext(verdicts):
                self._fails("startupProbe")
                return
        self._say("has started")
        await asyncio.gather(self._follow_readiness(), self._follow_liveness())

    async def _follow_readiness(self) -> None:
        async for passes in self._verdicts("readinessProbe"):
            if passes != self.ready:
                self._say("is ready" if passes else "is not ready")
            self.ready = passes

    async def _follow_liveness(self) -> None:
        async for passes in self._verdicts("livenessProbe"):
            if not passes and not self.terminating:
                self._fails("livenessProbe")
                return

    def _fails(self, name: str) -> None:
        self._say(f"{name} fails")
        self._end()

    def _end(self) -> asyncio.Task[None]:
        """End the container, unless that is under way."""
        if self._ending is None or self._ending.done():
            self._ending = asyncio.create_task(self._end_container())
        return self._ending

    async def _verdicts(self, name: str) -> AsyncGenerator[bool]:
        """What a probe says each time that it has said so often enough; without one, True."""
        probe = self._spec.get(name)
        if probe is None:
            yield True
            return
        enough = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        in_row, last = 0, None
        await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        loop = asyncio.get_running_loop()
        while True:
            begin = loop.time()
            passes = await self._passes(probe)
            in_row, last = (in_row + 1 if passes is last else 1), passes
            if in_row >= enough[passes]:
                yield passes
            await asyncio.sleep(max(0.0, begin + probe.get("periodSeconds", 10) - loop.time()))

    async def _passes(self, probe: Object) -> bool:
        timeout = probe.get("timeoutSeconds", 1)
        try:
            async with asyncio.timeout(timeout):
                if "exec" in probe:
                    assert self._container is not None
                    return await self._container.run(*probe["exec"]["command"]) == 0
                return await self._answers(probe["httpGet"])
        except (TimeoutError, aiohttp.ClientError):
            return False

    async def _answers(self, get: Object) -> bool:
        url = f"http://{self.host.address}:{self._port(get['port'])}{get['path']}"
        async with aiohttp.ClientSession() as http, http.get(url, allow_redirects=False) as answer:
            return 200 <= answer.status < 400

    def _port(self, port: str | int) -> int:
        if isinstance(port, int):
            return port
        named = {each["name"]: each["containerPort"] for each in self._spec["ports"]}
        found: int = named[port]
        return found

    def _value(self, variable: Object) -> str:
        """Of a variable of the manifest's `env`."""
        match variable:
            case {"value": value}:
                return expand(value, self._environment)
            case {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}:
                return self.name
            case {"valueFrom": {"secretKeyRef": {"name": name, "key": key}}}:
                return self._secrets[name][key]
        raise NotImplementedError(f"{variable=} is of a kind that this kubelet does not know")

    def _hosts_file(self, names: Mapping[str, str]) -> list[str]:
        lines = {"localhost": "127.0.0.1", self.name: self.host.address} | names
        file = self._folder / "hosts"
        file.write_text("".join(f"{address}\t{name}\n" for name, address in lines.items()))
        return [f"file {shlex.quote(str(file))} /etc/hosts"]

    def _volumes(self) -> list[str]:
        """Where each volume is mounted."""
        volumes = {each["name"]: each for each in self.template["spec"].get("volumes", [])}
        lines = []
        for mount in self._spec.get("volumeMounts", []):
            path = mount["mountPath"]
            mode = "ro" if mount.get("readOnly") else "rw"
            folder = self._folder / "volumes" / mount["name"]
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o777)
            match volumes[mount["name"]]:
                case {"emptyDir": {"medium": "Memory"}}:
                    lines.append(f"memory {path}")
                    continue
                case {"emptyDir": {}}:
                    folder /= expand(mount.get("subPathExpr", ""), self._environment)
                    folder.mkdir(exist_ok=True)
                    folder.chmod(0o777)
                case {"hostPath": {"path": there, "type": "Directory"}}:
                    folder = Path(there)
                case {"secret": {"secretName": name}}:
                    for key, value in self._secrets[name].items():
                        (folder / key).write_text(value)
                case volume:
                    raise NotImplementedError(f"{volume=} is of a kind this kubelet does not know")
            lines.append(f"bind {shlex.quote(str(folder))} {path} {mode}")
        return lines

    def _say(self, event: str) -> None:
        self.events.append(event)
