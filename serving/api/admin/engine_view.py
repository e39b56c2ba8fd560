"""GET /engine: what the engine is doing now, for the playground's live view.

Asked again and again, twice a second by the page, and not pushed: a browser has six connections to
a server for all its tabs, and a stream would hold one of them for ever.
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
    since: Annotated[float, Query(description="`now` of the answer before", ge=0)] = 0.0,
) -> Response:
    """Counts, KV blocks, and the phases of live requests and of those that ended since."""
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
