"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer, in vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter, Response
from pydantic import ConfigDict, WithJsonSchema, model_validator

from weft.errors import RequestError
from weft.serving.api.admin.documentation import returns
from weft.serving.api.body import Body, JsonRoute
from weft.serving.api.conversation import MAX_COUNTED, Conversation, prompt_from
from weft.serving.api.openai.messages import Messages
from weft.serving.api.openai.replies import DetokenizedText, TokenizerInfo, Tokens
from weft.serving.api.openai.requests import TemplateRequest
from weft.serving.api.openai.tools import Tool
from weft.serving.api.state import State

router = APIRouter(route_class=JsonRoute)

_NULL: dict[str, Any] = {"type": "null"}
_TEXT: dict[str, Any] = {"prompt": {"not": _NULL}}
_MESSAGES: dict[str, Any] = {"messages": {"not": _NULL}}
_FOR_MESSAGES = (
    *("tools", "chat_template_kwargs", "reasoning_effort", "verbosity"),
    *("add_generation_prompt", "continue_final_message"),
)
_NO_MESSAGES: dict[str, Any] = dict.fromkeys(("messages", *_FOR_MESSAGES), _NULL)


class TokenizeRequest(TemplateRequest):
    """A prompt, or messages for the chat template.

    `add_special_tokens` defaults to true for a prompt. For messages it defaults to false, because
    the template writes its own special tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["prompt"], "properties": _TEXT | _NO_MESSAGES},
                {"required": ["messages"], "properties": _MESSAGES | {"prompt": _NULL}},
            ]
        }
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give one of prompt and messages", param="prompt")
        for name in _FOR_MESSAGES if self.messages is None else ():
            if getattr(self, name) is not None:
                raise RequestError(f"{name} is only for messages", param=name)
        return self


TokenId = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]


class DetokenizeRequest(Body):
    """POST /detokenize: token ids."""

    model: str | None = None
    tokens: list[TokenId]


@router.post("/tokenize", **returns(Tokens))
async def tokenize(body: TokenizeRequest, state: State) -> Response:
    """Return the token ids for a prompt or a conversation."""
    engine = state.ready_engine(body.model)
    tokenizer = engine.tokenizer
    most = max(engine.info.max_model_len, MAX_COUNTED)

    def encoded() -> tuple[list[int], list[str] | None]:
        text, special = body.prompt, body.add_special_tokens
        if text is None:
            conversation = Conversation(
                body.messages or (),
                [tool.function for tool in body.tools or ()],
                template_arguments=body.chat_template_kwargs or {},
                to_answer=body.to_answer,
                continued=bool(body.continue_final_message),
                thinking=body.thinking,
                verbosity=body.asked_verbosity,
            )
            text = conversation.prompt(tokenizer, most=most)
            special = bool(special)
        ids = tokenizer.encode(text, add_special_tokens=special is not False, most=most)
        named = body.return_token_strs
        return ids, [tokenizer.backend.id_to_token(i) for i in ids] if named else None

    with prompt_from("prompt" if body.messages is None else "messages"):
        ids, names = await state.aside(encoded)
    answer = Tokens(len(ids), engine.info.max_model_len, ids, names)
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize", **returns(DetokenizedText))
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    """Return the text for token ids."""
    engine = state.ready_engine(body.model)
    size = engine.info.vocab_size

    def decoded() -> str:
        for token in body.tokens:
            if not 0 <= token < size:
                message = f"tokens has {token}; token ids are in [0, {size})"
                raise RequestError(message, param="tokens")
        return engine.tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await state.aside(decoded)
    return Response(msgspec.json.encode(DetokenizedText(text)), media_type="application/json")


@router.get("/tokenizer_info", **returns(TokenizerInfo))
async def tokenizer_info(state: State) -> Response:
    """Return the tokenizer's special tokens and chat template."""
    engine = state.ready_engine()
    tokenizer = engine.tokenizer
    special = tokenizer.special_tokens
    info = TokenizerInfo(
        tokenizer_class=type(tokenizer.backend.model).__name__,
        vocab_size=tokenizer.vocab_size,
        max_model_len=engine.info.max_model_len,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        eos_token_ids=list(tokenizer.eos_token_ids),
        chat_template=tokenizer.chat_templates.sources.get("default"),
    )
    return Response(msgspec.json.encode(info), media_type="application/json")
