"""What the chart renders for CPUs runs: commands, probes and ends, as in a cluster."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from support import charts
from support.balancer import balancer
from support.checkpoints import make_checkpoint
from support.clients import GREEDY
from support.cluster import Deployment, Group, cluster

PRE_STOP = 4  # seconds; a balancer learns of a pod's end in a third of them
VALUES: dict[str, Any] = {
    "settings": {"threads": 1, "kv_cache_memory": "32M"},
    "drain": {"preStopSeconds": PRE_STOP, "timeoutSeconds": 100},
    "probes": {"startup": {"periodSeconds": 1}, "readiness": {"periodSeconds": 1}},
}
KEY = "a-key-of-the-tests"
SECRETS = {"node": {"token": "a token of the tests"}, "keys": {"keys.txt": f"{KEY} tests"}}
LONGEST = 200  # tokens
CLIENTS = 3
PAUSE = 0.3  # seconds between two requests of one, for all replicas share a machine


class Client:
    """Asks, and takes nothing but whole answers."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def ask(
        self,
        url: str,
        tokens: int,
        *,
        streamed: bool = False,
        begun: Callable[[], None] = lambda: None,
    ) -> str:
        """The answer's text; `begun` is called when its first line is there.

        Raises:
            aiohttp.ClientError, AssertionError, LookupError: it is none, or not whole.
        """
        body = GREEDY | {"model": "weft-demo", "max_tokens": tokens, "stream": streamed}
        async with self._http.post(f"{url}/v1/completions", json=body) as got:
            first = await got.content.readline()
            begun()
            text = (first + await got.content.read()).decode()
        assert got.status == 200, text
        if not streamed:
            (choice,) = json.loads(text)["choices"]
            assert choice["finish_reason"] == "length"
            return str(choice["text"])
        *pieces, done = (line.removeprefix("data: ") for line in text.split("\n\n") if line)
        assert done == "[DONE]"
        choices = [choice for piece in pieces for choice in json.loads(piece)["choices"]]
        assert choices[-1]["finish_reason"] == "length"
        return "".join(choice["text"] for choice in choices)


@asynccontextmanager
async def client() -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http:
        yield Client(http)


async def test_a_stuck_pod_gets_no_requests_and_is_started_again_and_ends_when_it_has_answered(
    tmp_path: Path,
) -> None:
    async with cluster(tmp_path, SECRETS) as here, client() as asks:
        settings = VALUES["settings"] | {"stall_timeout": 3 * PRE_STOP}
        keys = {"apiKeys": {"existingSecret": "keys"}}
        objects = charts.render(VALUES | {"settings": settings} | keys)
        pod = here.create("weft-0", charts.workload(objects)["spec"]["template"])
        await here.until(lambda: pod.ready)
        (helm_test,) = (each for each in objects if each["kind"] == "Pod")
        test = here.create("weft-test", helm_test, names={"weft": pod.host.address})
        await here.until(lambda: test.exits)
        assert test.exits == [0]
        assert '"completion_tokens": ' in test.log.read_text()
        expected = await asks.ask(pod.url, LONGEST)

        (engine,) = psutil.Process(pod.pid).children()
        engine.suspend()
        stuck = asyncio.create_task(asks.ask(pod.url, LONGEST))
        await here.until(lambda: not pod.ready)
        assert not pod.exits
        with pytest.raises(AssertionError, match="the engine is stuck"):
            await stuck
        await here.until(lambda: pod.exits and pod.ready)
        assert await asks.ask(pod.url, LONGEST, streamed=True) == expected

        ending = asyncio.create_task(here.delete(pod))
        assert expected.startswith(await asks.ask(pod.url, 4))
        assert pod.events[-1] == "is told to end"
        (engine,) = psutil.Process(pod.pid).children()
        under_way = asyncio.create_task(
            asks.ask(pod.url, 9 * LONGEST, streamed=True, begun=engine.suspend)
        )
        await here.until(lambda: "SIGTERM" in pod.events)
        assert not under_way.done()
        engine.resume()
        await ending
        assert (await under_way).startswith(expected)
        assert pod.exits == [1, 0]
        ends = [event for event in pod.events if event != "is not ready"][-4:]
        assert ends == ["is told to end", "preStop: 0", "SIGTERM", "has ended with 0"]


async def load(
    asks: Client, url: str, expected: str, tokens: Iterator[int], ends: asyncio.Event
) -> int:
    """Ask until the end, every other time for a stream; returns how often.

    Raises:
        aiohttp.ClientError, AssertionError, LookupError: one was not answered as it should be.
    """
    asked = 0
    while not ends.is_set():
        text = await asks.ask(url, next(tokens), streamed=asked % 2 == 0)
        assert text
        assert expected.startswith(text)
        asked += 1
        await asyncio.sleep(PAUSE)
    return asked


async def test_an_upgrade_replaces_two_replicas_under_load_and_no_request_fails(
    tmp_path: Path,
) -> None:
    before, after = (
        charts.workload(charts.render(VALUES | {"replicas": 2} | more, upgrade=bool(more)))
        for more in ({}, {"podAnnotations": {"example.com/release": "2"}})
    )
    assert before["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}

    async with cluster(tmp_path) as here, client() as asks:

        def endpoints() -> list[str]:
            return [pod.url for pod in here.pods if pod.ready and not pod.terminating]

        deployment = Deployment(here)
        async with balancer(endpoints, delay=PRE_STOP / 3) as service, asyncio.TaskGroup() as group:
            await deployment.apply(before)
            await here.until(lambda: len(service.endpoints) == 2)
            old = list(here.pods)
            expected = await asks.ask(service.url, LONGEST)
            ends, rng = asyncio.Event(), random.Random(0)
            tokens = iter(lambda: rng.choice([8, 60, LONGEST]), None)
            clients = [
                group.create_task(load(asks, service.url, expected, tokens, ends))
                for _ in range(CLIENTS)
            ]
            await deployment.apply(after)
            await deployment.settle()
            new = list(here.pods)
            await here.until(lambda: all(service.answered[pod.url] for pod in new))
            ends.set()
        assert [pod.exits for pod in old] == [[0], [0]]
        assert [pod.exits for pod in new] == [[], []]
        asked = sum(client.result() for client in clients)
        assert sum(service.answered.values()) == asked + 1
        assert all(service.answered[pod.url] for pod in old)


async def test_a_group_on_two_hosts_serves_and_is_made_anew_when_its_worker_is_killed(
    tmp_path: Path,
) -> None:
    drain = {"preStopSeconds": 0, "timeoutSeconds": 1}
    values = VALUES | {"hosts": 2, "nodeToken": {"existingSecret": "node"}, "drain": drain}
    async with cluster(tmp_path, SECRETS) as here, client() as asks:
        group = Group(here, charts.workload(charts.render(values)))
        group.create()
        leader, (worker,) = group.leader, group.workers
        await here.until(lambda: leader.ready)
        expected = await asks.ask(leader.url, LONGEST)
        assert psutil.Process(worker.pid).children(), "it has a rank"

        control = asyncio.create_task(group.control())
        psutil.Process(worker.pid).kill()
        await here.until(lambda: group.generation == 2 and group.leader.ready)
        assert await asks.ask(group.leader.url, LONGEST, streamed=True) == expected
        control.cancel()

        leader, (worker,) = group.leader, group.workers
        await group.delete()
        assert leader.exits == worker.exits == [0]


@pytest.mark.slow
async def test_a_server_that_does_not_answer_is_killed_and_started_again(tmp_path: Path) -> None:
    drain = {"preStopSeconds": 0, "timeoutSeconds": 1}
    liveness = {"periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": 3}
    values = VALUES | {"drain": drain, "probes": VALUES["probes"] | {"liveness": liveness}}
    async with cluster(tmp_path) as here, client() as asks:
        template = charts.workload(charts.render(values))["spec"]["template"]
        pod = here.create("weft-0", template)
        await here.until(lambda: pod.ready)
        psutil.Process(pod.pid).suspend()
        await here.until(lambda: pod.exits and pod.ready)
        events = [event for event in pod.events if event != "is not ready"]
        # It is stopped, so SIGTERM does nothing.
        ends = ["livenessProbe fails", "preStop: 0", "SIGTERM", "SIGKILL"]
        assert events[3:7] == ends
        assert await asks.ask(pod.url, 4)


@pytest.mark.slow
async def test_the_group_of_a_tpu_slice_serves_with_jax_on_cpus(tmp_path: Path) -> None:
    """All of it is as rendered, but for --device."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    model = make_checkpoint(tmp_path / "weft-demo", "qwen3", **heads)
    (model / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    small = {"max_num_seqs": 8, "max_num_batched_tokens": 8, "kv_cache_memory": "1M"}
    values = {
        "accelerator": {"type": "v5e", "topology": "2x4", "perHost": 4},
        "nodeToken": {"existingSecret": "node"},
        "model": {"path": f"hostpath://{model}"},
        "settings": small,
        "drain": {"preStopSeconds": 0, "timeoutSeconds": 1},
    }
    text = json.dumps(charts.workload(charts.render(values)))
    assert text.count("--device=tpu") == 1
    async with cluster(tmp_path, SECRETS) as here, client() as asks:
        group = Group(here, json.loads(text.replace("--device=tpu", "--device=cpu")))
        group.create()
        await here.until(lambda: group.leader.ready)
        assert await asks.ask(group.leader.url, 12)
        leader, (worker,) = group.leader, group.workers
        await group.delete()
        assert leader.exits == worker.exits == [0]
