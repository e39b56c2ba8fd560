"""benchmarks/soak.py: what it takes for a leak, and a short soak of a real server."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from soak import Sample, requests_left, slope, soak
from support.checkpoints import make_checkpoint

MIB = 2**20


def samples(per_minute: float, seed: int, *, noise: float, walk: float = 0.0) -> list[Sample]:
    """Ten minutes of a process of 500 MiB, a sample a second: MiB of growth, noise, random walk."""
    rng = random.Random(seed)
    drift, taken = 0.0, []
    for second in range(600):
        drift += rng.gauss(0, walk)
        rss = 500 + per_minute * second / 60 + drift + rng.gauss(0, noise)
        taken.append(Sample(second, int(rss * MIB)))
    return taken


@pytest.mark.parametrize("seed", range(10))
def test_a_leak_is_found_in_noise(seed: int) -> None:
    mean, (low, high) = slope(samples(2.0, seed, noise=3.0))
    assert low > 0
    assert low < mean < high
    assert mean == pytest.approx(2.0 * MIB / 60, rel=0.5)


@pytest.mark.parametrize(("noise", "walk"), [(3.0, 0.0), (0.5, 0.3)])
def test_noise_is_rarely_taken_for_a_leak(noise: float, walk: float) -> None:
    """Also not where memory wanders about: of a 95 % interval, one in forty is above zero."""
    found = [slope(samples(0.0, seed, noise=noise, walk=walk))[1][0] > 0 for seed in range(100)]
    assert sum(found) <= 8


async def test_requests_that_never_end_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soak.END", 0.2)

    async def metrics(_: web.Request) -> web.Response:
        names = ("requests_running", "requests_waiting")
        return web.Response(text="".join(f'weft_{name}{{model="m"}} 2\n' for name in names))

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    async with TestServer(app) as server, ClientSession(server.make_url("/")) as session:
        assert await requests_left(session) == 4


async def test_a_short_soak_leaves_nothing_behind(tmp_path: Path) -> None:
    """Too short for the slope of its memory to say anything."""
    model = make_checkpoint(tmp_path / "tiny", "llama")
    report = await soak(12 / 60, [str(model), "--threads=1", "--kv-cache-memory=4M"])
    assert not report.unexpected
    assert (report.leaked_requests, report.leaked_blocks, report.leaked_files) == (0, 0, 0)
    assert {"200", "400", "gone"} <= report.statuses.keys()  # 404 by chance
    assert report.probes > 5
    assert "KV cache left    0.00%" in str(report)
