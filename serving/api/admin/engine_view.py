"""GET /engine: the engine's current work, for the playground's live view.

The page polls it twice a second. A stream would hold a connection forever, and a browser has only
six connections to a server for all its tabs.
"""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Response

from weft.serving.api.admin.documentation import returns
from weft.serving.api.openai.replies import EngineView
from weft.serving.api.state import State
from weft.serving.engine.protocol import EngineStats

router = APIRouter()


@router.get("/engine", **returns(EngineView))
async def engine_view(
    state: State,
    since: Annotated[float, Query(description="`now` in the previous reply", ge=0)] = 0.0,
) -> Response:
    """Return counts, KV blocks, and the phases of requests that are live or have just ended."""
    engine = state.engine
    view = EngineView(
        now=time.monotonic(),
        status=state.status,
        places=0 if engine is None else engine.config.dp * engine.info.max_num_seqs,
        stats=EngineStats() if engine is None else engine.stats,
        requests=[] if engine is None else engine.timelines.since(since),
    )
    return Response(
        msgspec.json.encode(view),
        media_type="application/json",
        headers={"cache-control": "no-store"},
    )
