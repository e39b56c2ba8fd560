"""State that the routes share: the engine, once it is loaded, and names, settings and metrics."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import Depends, Request

from weft.errors import EngineError, RequestError
from weft.models.checkpoint.locate import model_name
from weft.serving.api.anthropic.errors import AnthropicErrors
from weft.serving.api.body_room import BodyRoom
from weft.serving.api.local import LocalApi
from weft.serving.api.middleware.auth import open_paths
from weft.serving.api.middleware.request_context import RequestContext, heavy
from weft.serving.api.openai.replies import now
from weft.serving.api.parsing.parser import AnswerFormat
from weft.serving.api.responses.store import ResponseStore
from weft.serving.batch.service import BatchService
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.engine.metrics import Metrics

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

Result = TypeVar("Result")

STALLING = 0.25
"""After this fraction of `stall_timeout` without a step, despite work, the server is not ready."""


@dataclass
class ServerState:
    """The state of one server.

    Attributes:
        model: the model's name in the API.
        engine: None while it loads.
        tool_parser, reasoning_parser: settings of `ServerConfig`.
        downloading: the model comes from the hub or from a bucket.
        draining: the server is shutting down: running requests may finish, new ones are refused.
        request_timeout: maximum seconds for a request; None for no limit.
        log_prompts: write prompts to the log.
        page: serve the playground at /.
        vllm_metrics: repeat metrics under vLLM's names.
        created: seconds since 1970 at the server's start.
        state_dir: folder for files and batches; None for a temporary folder.
        response_memory: a setting in `ServerConfig`.
        open_paths: paths that need no API key; None if the server has no keys.
        body_room: memory for large bodies.
        counting: held while a large body's values are counted.
        metrics: counters and latencies.
        batches: files and batches.
        responses: stored responses.
    """

    model: str
    engine: AsyncEngine | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    downloading: bool = False
    draining: bool = False
    request_timeout: float | None = None
    log_prompts: bool = False
    page: bool = True
    vllm_metrics: bool = False
    created: int = field(default_factory=now)
    state_dir: Path | None = None
    response_memory: int = 0
    open_paths: frozenset[str] | None = None
    body_room: BodyRoom = field(init=False, default_factory=BodyRoom)
    counting: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)
    metrics: Metrics = field(init=False)
    batches: BatchService = field(init=False)
    responses: ResponseStore = field(init=False)
    _answer_format: AnswerFormat | None = field(init=False, default=None)
    _local_api: LocalApi | None = field(init=False, default=None)
    _turns: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.metrics = Metrics(lambda: self.engine, self.model, vllm=self.vllm_metrics)
        self.batches = BatchService(self, self.state_dir)
        self.responses = ResponseStore(self.response_memory)

    @classmethod
    def of(cls, engine_config: EngineConfig, server_config: ServerConfig) -> ServerState:
        """Return the state of a server before its engine is loaded."""
        name = server_config.served_model_name or model_name(engine_config.model)
        folder = server_config.state_dir
        return cls(
            model=name,
            tool_parser=server_config.tool_parser,
            reasoning_parser=server_config.reasoning_parser,
            request_timeout=server_config.request_timeout,
            log_prompts=server_config.log_prompts,
            page=server_config.page,
            vllm_metrics=server_config.vllm_metrics,
            state_dir=None if folder is None else Path(folder),
            response_memory=server_config.response_memory,
            open_paths=open_paths(server_config),
        )

    def deadline(self, request: RequestContext) -> float | None:
        """Return the time.monotonic() at which a request is given up, if there is a limit."""
        return None if self.request_timeout is None else request.arrival + self.request_timeout

    @property
    def status(self) -> str:
        """ "ready", "downloading", "loading", "restarting", "draining", "stalling", "stalled" or
        "dead".
        """
        if self.draining:
            return "draining"
        if self.engine is None:
            return "downloading" if self.downloading else "loading"
        status = self.engine.status
        return "stalling" if status == "ready" and not self.progressing else status

    @property
    def progressing(self) -> bool:
        """True if the engine makes steps, if it has work."""
        engine = self.engine
        return engine is None or engine.waited < STALLING * engine.config.stall_timeout

    def ready_engine(self, model: str | None = None) -> AsyncEngine:
        """Return the engine for a request.

        Args:
            model: the model's name in the request, if there is one.

        Raises:
            RequestError: the server has another model (404).
            EngineError: the engine is loading, restarting, shutting down or dead.
        """
        if model not in (None, self.model):
            raise no_such_model(model, self.model)
        if self.engine is None or self.draining:
            raise EngineError(f"the server is not ready: it is {self.status}")
        self.engine.check_serving()
        return self.engine

    async def aside(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread, because it may take long.

        Heavy requests take turns. Otherwise they could take all threads and much memory, and other
        requests would wait.
        """
        if not heavy.get():
            return await asyncio.to_thread(work, *arguments)
        async with self._turns:
            gc.disable()  # a collection walks over the body's objects, and all threads wait
            try:
                return await asyncio.to_thread(work, *arguments)
            finally:
                gc.enable()

    async def answer_row(
        self, path: str, body: bytes, admitted: Callable[[], Awaitable[None]]
    ) -> tuple[int, bytes]:
        """Answer a row of a batch; see `weft.serving.batch.job.Server`."""
        if self._local_api is None:
            from weft.serving.api.app import row_app  # which imports this module

            self._local_api = LocalApi(AnthropicErrors(row_app(self)))
        return await self._local_api.post(path, body, admitted)

    def answer_format(self, engine: AsyncEngine) -> AnswerFormat:
        """Return the format in which the model writes calls and reasoning."""
        if self._answer_format is None:
            self._answer_format = AnswerFormat.of(
                engine.tokenizer, self.tool_parser, self.reasoning_parser
            )
        return self._answer_format


def no_such_model(model: str, served: str) -> RequestError:
    """Return the error for a model that this server does not have."""
    return RequestError(
        f"there is no model {model!r}; this server has {served!r}",
        param="model",
        code="model_not_found",
        status=404,
    )


async def _of_request(request: Request) -> ServerState:  # async, so FastAPI needs no thread
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(_of_request)]
