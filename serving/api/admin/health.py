"""GET /health, /ready, /metrics and /version: for whoever runs the server.

/health says that the process answers; a liveness probe asks it, and what it adds about the engine
is for people. /ready says that requests are served *now*: not while the model loads, also again
(`--restart`), when the server is about to end, or when there is work and no step gets done.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from weft.serving.api.admin.documentation import returns
from weft.serving.api.openai.replies import Health, Status, Version
from weft.serving.api.state import State
from weft.version import __version__

router = APIRouter()


@router.get("/health", **returns(Health))
async def health(state: State) -> Response:
    """Always 200."""
    engine = state.engine
    waited = 0.0 if engine is None else engine.waited
    body = Health("ok", state.status, state.progressing, round(waited, 3))
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.get("/ready", **returns(Status, or_status=503))
async def ready(state: State) -> Response:
    """200 when requests are served, else 503 with the reason as `status`."""
    code = 200 if state.status == "ready" else 503
    return Response(msgspec.json.encode(Status(state.status)), code, media_type="application/json")


@router.get("/metrics", **returns(None, media_type="text/plain"))
async def metrics(state: State) -> Response:
    """Prometheus' text format."""
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", **returns(Version))
async def version() -> Response:
    """The version of weft."""
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")
