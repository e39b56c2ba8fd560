"""What the chart renders for CPUs runs: commands, probes and ends, as in a cluster."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from support import charts
from support.clients import GREEDY
from support.cluster import cluster

VALUES: dict[str, Any] = {
    "settings": {"threads": 1, "kv_cache_memory": "32M"},
    "drain": {"preStopSeconds": 3, "timeoutSeconds": 100},
    "probes": {"startup": {"periodSeconds": 1}, "readiness": {"periodSeconds": 1}},
}
KEY = "a-key-of-the-tests"
SECRETS = {"keys": {"keys.txt": f"{KEY} tests"}}
LONGEST = 200  # tokens


class Client:
    """Asks, and takes nothing but whole answers."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def ask(self, url: str, tokens: int, *, streamed: bool = False) -> str:
        """The answer's text.

        Raises:
            aiohttp.ClientError, AssertionError, LookupError: it is none, or not whole.
        """
        body = GREEDY | {"model": "weft-demo", "max_tokens": tokens, "stream": streamed}
        async with self._http.post(f"{url}/v1/completions", json=body) as got:
            text = await got.text()
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
        settings = VALUES["settings"] | {"stall_timeout": 8}
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

        under_way = asyncio.create_task(asks.ask(pod.url, 5 * LONGEST, streamed=True))
        await asyncio.sleep(0.5)
        ending = asyncio.create_task(here.delete(pod))
        assert expected.startswith(await asks.ask(pod.url, 4))
        assert pod.events[-1] == "is told to end"
        await ending
        assert (await under_way).startswith(expected)
        assert pod.exits == [1, 0]
        ends = [event for event in pod.events if event != "is not ready"][-4:]
        assert ends == ["is told to end", "preStop: 0", "SIGTERM", "has ended with 0"]
