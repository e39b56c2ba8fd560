"""The HTTP application: which routes there are. See server.py for how it is run."""

from __future__ import annotations

from fastapi import FastAPI

from weft.serving.api import errors
from weft.serving.api.admin import documentation, engine_view, health, playground, tokens
from weft.serving.api.anthropic import route as messages
from weft.serving.api.middleware.body_size import BodyLimits
from weft.serving.api.openai import batches, chat, completions, embeddings, files, models
from weft.serving.api.responses import route as responses
from weft.serving.api.state import ServerState
from weft.version import __version__


def build_app(state: ServerState) -> FastAPI:
    """The application; `state.engine` may be set later, until then requests get a 503."""
    app = local_app(state)
    for routes in (
        responses,
        messages,
        files,
        batches,
        tokens,
        models,
        engine_view,
        health,
    ):
        app.include_router(routes.router)
    if state.page:
        app.include_router(playground.router)
    app.add_middleware(BodyLimits)
    documentation.install(app, state.open_paths)
    return app


def local_app(state: ServerState) -> FastAPI:
    """What answers requests, without what guards a socket: for the rows of batches."""
    app = FastAPI(
        title="weft",
        version=__version__,
        description="Language models, with OpenAI's API.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.server = state
    for routes in (completions, chat, embeddings):
        app.include_router(routes.router)
    errors.install(app)
    return app
