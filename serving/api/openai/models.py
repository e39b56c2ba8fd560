"""GET /v1/models: the server's model."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from weft.serving.api.admin.documentation import returns
from weft.serving.api.openai.replies import Model, ModelList, SamplingDefault
from weft.serving.api.state import ServerState, State, no_such_model

router = APIRouter()


@router.get("/v1/models", **returns(ModelList))
async def list_models(state: State) -> Response:
    """List the server's one model, even while it loads."""
    body = msgspec.json.encode(ModelList(data=[_model(state)]))
    return Response(body, media_type="application/json")


# A path, because a model's name may contain slashes.
@router.get("/v1/models/{model:path}", **returns(Model))
async def retrieve_model(model: str, state: State) -> Response:
    """Return a model by its name."""
    if model != state.model:
        raise no_such_model(model, state.model)
    return Response(msgspec.json.encode(_model(state)), media_type="application/json")


def _model(state: ServerState) -> Model:
    if (engine := state.engine) is None:
        return Model(state.model, state.created, None)
    described = engine.generation_config.described()
    defaults = {name: SamplingDefault(**each) for name, each in described.items()}
    return Model(state.model, state.created, engine.info.max_model_len, defaults)
