"""GET /health, /ready, /metrics and /version: for operators.

/health is for liveness probes: it succeeds while the process responds. Its fields about the engine
are for people. /ready succeeds only while requests are served. It fails while the model downloads,
loads (also after a restart, with `--restart`), while the server shuts down, and while the engine
has work but makes no steps.
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


@router.head("/health", include_in_schema=False)  # balancers and monitors use it
@router.get("/health", **returns(Health))
async def health(state: State) -> Response:
    """Return 200, always."""
    engine = state.engine
    waited = 0.0 if engine is None else engine.waited
    body = Health("ok", state.status, state.progressing, round(waited, 3))
    return Response(msgspec.json.encode(body), media_type="application/json")


@router.head("/ready", include_in_schema=False)  # balancers and monitors use it
@router.get("/ready", **returns(Status, or_status=503))
async def ready(state: State) -> Response:
    """Return 200 while requests are served, else 503 with the reason as `status`."""
    code = 200 if state.status == "ready" else 503
    return Response(msgspec.json.encode(Status(state.status)), code, media_type="application/json")


@router.head("/metrics", include_in_schema=False)  # load generators look for it
@router.get("/metrics", **returns(None, media_type="text/plain"))
async def metrics(state: State) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(state.metrics.render(), headers={"content-type": CONTENT_TYPE_LATEST})


@router.get("/version", **returns(Version))
async def version() -> Response:
    """Return weft's version."""
    return Response(msgspec.json.encode(Version(__version__)), media_type="application/json")
