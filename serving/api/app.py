"""The HTTP application: its routes and its middleware. See server.py for how it runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from weft.serving.api import errors
from weft.serving.api.admin import documentation, engine_view, health, playground, tokens
from weft.serving.api.anthropic import batches as message_batches
from weft.serving.api.anthropic import route as messages
from weft.serving.api.anthropic.errors import AnthropicErrors
from weft.serving.api.middleware.access_log import AccessLog
from weft.serving.api.middleware.auth import KeyGuard, open_paths
from weft.serving.api.middleware.body_size import BodyLimits
from weft.serving.api.middleware.keys import Keyring
from weft.serving.api.openai import batches, chat, completions, embeddings, files, models
from weft.serving.api.responses import route as responses
from weft.serving.api.state import ServerState
from weft.serving.config.settings import ServerConfig
from weft.version import __version__

if TYPE_CHECKING:
    from weft.serving.api.middleware.tracing import Tracer

# The routes for rows of batches.
_ROW_ROUTES = (completions.router, chat.router, embeddings.router, messages.router)


def build_app(
    state: ServerState,
    config: ServerConfig | None = None,
    keys: Keyring | None = None,
    tracer: Tracer | None = None,
) -> ASGIApp:
    """Return the application: all routes, and the middleware around them.

    `state.engine` may be set later; until then requests get a 503.
    """
    config = config or ServerConfig()
    routes = [
        *_ROW_ROUTES,
        responses.router,
        message_batches.router,
        files.router,
        batches.router,
        tokens.router,
        models.router,
        engine_view.router,
        health.router,
    ]
    if state.page:
        routes.append(playground.router)
    api = _fastapi(state, routes)
    documentation.install(api, state.open_paths)

    # The innermost middleware comes first. A request passes the last one first.
    app: ASGIApp = BodyLimits(api)
    if (paths := open_paths(config)) is not None:
        app = KeyGuard(app, keys or Keyring(config), paths)
    app = AnthropicErrors(app)
    if config.cors_origins is not None:
        app = CORSMiddleware(
            app,
            allow_origins=[origin.strip() for origin in config.cors_origins.split(",")],
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["retry-after", "request-id", "x-request-id"],
        )
    log = config.log_requests or config.log_prompts
    return AccessLog(app, state.metrics, tracer, log=log)


def row_app(state: ServerState) -> FastAPI:
    """Return the application that answers rows of batches: no middleware, and only some routes."""
    return _fastapi(state, _ROW_ROUTES)


def _fastapi(state: ServerState, routes: Iterable[APIRouter]) -> FastAPI:
    app = FastAPI(
        title="weft",
        version=__version__,
        description="Language models, with OpenAI's API.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the client's Host
    )
    app.state.server = state
    for router in routes:
        app.include_router(router)
    errors.install(app)
    return app
