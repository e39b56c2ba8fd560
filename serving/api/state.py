"""What the routes share: the engine, once it is there, and the names and counters around it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from weft.errors import EngineError, RequestError
from weft.serving.api.responses import now
from weft.serving.batch.service import BatchService
from weft.serving.config import EngineConfig, ServerConfig
from weft.serving.metrics import Metrics

if TYPE_CHECKING:
    from weft.serving.engine import AsyncEngine


@dataclass
class ServerState:
    """One server.

    Attributes:
        model: the model's name in the API.
        engine: None while it loads.
        draining: the server has been told to end; what runs may finish, nothing new begins.
        created: seconds since 1970 at the server's start.
        state_dir: folder of files and batches; None for a temporary one.
        batches: files and batches.
    """

    model: str
    engine: AsyncEngine | None = None
    draining: bool = False
    created: int = field(default_factory=now)
    state_dir: Path | None = None
    metrics: Metrics = field(init=False)
    batches: BatchService = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.engine, self.model)
        self.batches = BatchService(self, self.state_dir)

    @classmethod
    def of(cls, engine_config: EngineConfig, server_config: ServerConfig) -> ServerState:
        """The state of a server whose engine is still to come."""
        name = server_config.served_model_name or Path(engine_config.model).resolve().name
        folder = server_config.state_dir
        return cls(model=name, state_dir=None if folder is None else Path(folder))

    @property
    def status(self) -> str:
        """ "ready", "loading", "restarting", "draining", "stalled" or "dead"."""
        if self.draining:
            return "draining"
        return "loading" if self.engine is None else self.engine.status

    def ready_engine(self, model: str) -> AsyncEngine:
        """The engine, for a request that names its model.

        Raises:
            RequestError: 404, the model is another one.
            EngineError: the engine is loading, dead, ending, or started again.
        """
        if model != self.model:
            raise no_such_model(model, self.model)
        if self.engine is None or self.draining:
            raise EngineError(f"the server is not ready: it is {self.status}")
        self.engine.check_serving()
        return self.engine


def no_such_model(model: str, served: str) -> RequestError:
    """The error for a model that is not the one served."""
    return RequestError(
        f"there is no model {model!r}; this server has {served!r}",
        param="model",
        code="model_not_found",
        status=404,
    )


def _of_request(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_of_request)]
