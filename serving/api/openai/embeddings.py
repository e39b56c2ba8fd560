"""POST /v1/embeddings: vectors for texts, from the model's last hidden states."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, cast

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from weft.errors import RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import Body, JsonRoute
from weft.serving.api.generation import finish_reason, note_prompts
from weft.serving.api.middleware.request_context import admit, current
from weft.serving.api.openai.replies import Embedding, EmbeddingList, EmbeddingUsage
from weft.serving.api.openai.requests import Priority, prompts_up_to
from weft.serving.api.state import ServerState, State
from weft.serving.api.streaming import cancel_on_disconnect
from weft.serving.engine.admission import for_each
from weft.serving.engine.checks import CheckedRequest, check_dimensions
from weft.serving.engine.metrics import Phases

if TYPE_CHECKING:
    from weft.serving.engine.engine import AsyncEngine

MAX_INPUTS = 2048  # as OpenAI

router = APIRouter(route_class=JsonRoute)


class EmbeddingRequest(Body):
    """POST /v1/embeddings; OpenAI does not have `priority`."""

    model: str | None = None
    input: Annotated[list[str] | list[list[int]], prompts_up_to(MAX_INPUTS)]
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    priority: Priority | None = None
    user: str | None = None


@router.post("/v1/embeddings", **returns(EmbeddingList))
async def create_embeddings(request: Request, body: EmbeddingRequest, state: State) -> Response:
    """Return a vector for each input; texts with similar meaning have similar vectors."""
    engine = state.ready_engine(body.model)
    check_dimensions(body.dimensions, engine.info)
    requests = await state.aside(_checked, engine, body.input)
    await note_prompts(state, engine, [each.prompt_token_ids for each in requests])
    answer = await cancel_on_disconnect(request.receive, _embed(state, engine, body, requests))
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _checked(engine: AsyncEngine, inputs: Sequence[str | list[int]]) -> list[CheckedRequest]:
    """Encode and check the inputs; a RequestError names the input at fault."""
    encode = partial(engine.tokenizer.encode, most=engine.info.max_model_len)
    requests = []
    for i, each in enumerate(inputs):
        try:
            prompt = encode(each) if isinstance(each, str) else each
            requests.append(engine.validate(prompt, engine.pooling))
        except RequestError as error:
            message = f"input[{i}]: {error.message}"
            raise RequestError(message, param="input", code=error.code) from error
    return requests


async def _embed(
    state: ServerState, engine: AsyncEngine, body: EmbeddingRequest, requests: list[CheckedRequest]
) -> EmbeddingList:
    """Run the prompts, at most as many at once as the engine runs, so the queue stays free.

    Once the first prompt is admitted, the whole request is: a full queue refuses no later prompt.
    """
    context = current.get()
    deadline = None if context is None else state.deadline(context)
    data = [msgspec.Raw()] * len(requests)
    admitting = admit.get()

    async def work(i: int) -> None:
        phases = Phases(len(requests[i].prompt_token_ids))
        if context is not None:
            context.answers.append(phases)

        def on_admitted() -> None:
            nonlocal admitting
            admitting = admitting or _at_once
            if context is not None and context.key is not None:
                context.key.spend(phases.prompt_tokens)

        deltas = engine.generate(
            requests[i],
            priority=body.priority or 0,
            deadline=deadline,
            admit=admitting,
            on_admitted=on_admitted,
            observer=state.metrics.observer(phases),
        )
        async with aclosing(deltas):
            async for delta in deltas:
                finish_reason(delta)
                assert delta.embedding is not None
                pooled = delta.embedding
        vector = engine.pooling.finish(pooled, body.dimensions)
        encoded: list[float] | str = vector.tolist()
        if body.encoding_format == "base64":
            encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        # Encoded one by one, because all at once would delay other requests.
        data[i] = msgspec.Raw(msgspec.json.encode(Embedding(i, encoded)))

    running = engine.config.dp * engine.info.max_num_seqs
    await for_each(range(len(requests)), work, workers=running)
    tokens = sum(len(each.prompt_token_ids) for each in requests)
    embeddings = cast(list[Embedding], data)
    return EmbeddingList(embeddings, state.model, EmbeddingUsage(tokens, tokens))


async def _at_once() -> None:
    """Admit an input without waiting."""
