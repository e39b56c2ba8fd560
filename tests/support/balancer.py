"""A load balancer: each request to the endpoint with the fewest under way, and to no second one."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

LOOK = 0.05  # seconds between two looks at the endpoints


class Balancer:
    """A reverse proxy on a free port of 127.0.0.1; use `balancer`.

    Attributes:
        url: its own.
        endpoints: URLs that it sends requests to.
        answered: whole answers by endpoint.
    """

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self.url = ""
        self.endpoints: Sequence[str] = ()
        self.answered: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        self._http = http

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """An answer that is cut off is cut off here, too."""
        if not self.endpoints:
            return web.Response(status=503, text="no endpoint is ready")
        chosen = min(self.endpoints, key=lambda url: self._under_way[url])
        self._under_way[chosen] += 1
        try:
            asked = self._http.request(
                request.method,
                chosen + request.path_qs,
                data=await request.read(),
                headers={"Content-Type": request.headers["Content-Type"]},
            )
            async with asked as got:
                answer = web.StreamResponse(status=got.status)
                answer.content_type = got.content_type
                await answer.prepare(request)
                async for piece in got.content.iter_any():
                    await answer.write(piece)
                await answer.write_eof()
            self.answered[chosen] += 1
            return answer
        finally:
            self._under_way[chosen] -= 1

    async def follow(self, endpoints: Callable[[], Sequence[str]], delay: float) -> None:
        """Learn of every change of the endpoints, so many seconds later; for ever."""
        loop = asyncio.get_running_loop()
        last: Sequence[str] = ()
        while True:
            if (now := endpoints()) != last:
                loop.call_later(delay, setattr, self, "endpoints", now)
                last = now
            await asyncio.sleep(LOOK)


@asynccontextmanager
async def balancer(
    endpoints: Callable[[], Sequence[str]], *, delay: float
) -> AsyncIterator[Balancer]:
    """A balancer in front of what `endpoints` says, which it learns `delay` seconds late."""
    limit = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limit, timeout=aiohttp.ClientTimeout()) as http:
        made = Balancer(http)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", made.forward)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        following = asyncio.create_task(made.follow(endpoints, delay))
        try:
            yield made
        finally:
            following.cancel()
            await runner.cleanup()
