"""The assistant's next turn in a conversation, `n` times: content, reasoning and calls.

What the routes that shape it differently have in common: chat.py, responses_route.py and
messages.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from weft.errors import RequestError
from weft.serving.api.conversation import Conversation
from weft.serving.api.generation import Answers, finish_reason
from weft.serving.api.openai.replies import (
    CompletionTokensDetails,
    CompletionUsage,
    FinishReason,
)
from weft.serving.api.openai.requests import FunctionName
from weft.serving.api.parsing.pieces import CallStart, ParsedAnswer, Piece, Reasoning
from weft.serving.api.parsing.tool_grammar import Offered, calls_only, or_calls, strict_calls
from weft.serving.api.state import ServerState
from weft.serving.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.serving.api.parsing.parser import AnswerFormat, AnswerParser
    from weft.serving.engine.engine import AsyncEngine
    from weft.serving.engine.protocol import TokenLogprob


_NO_PARAMETERS = {"type": "object", "properties": {}}
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


@dataclass(frozen=True, slots=True)
class TurnDelta:
    """What is new of one turn.

    Attributes:
        index: of the turn.
        pieces: may be none.
        logprobs: of the new tokens, when asked for.
        finish_reason: of the last one; None before.
        stop_reason: the stop string or user's stop token that ended it.
    """

    index: int
    pieces: list[Piece]
    logprobs: Sequence[TokenLogprob]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn, all of it; see `TurnDelta`."""

    answer: ParsedAnswer
    logprobs: Sequence[TokenLogprob]
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class Turns:
    """Runs the turns of one request; made by `begin`.

    Attributes:
        format: of what the model writes.
        reasoning_tokens: of the turns that have ended.
    """

    def __init__(
        self,
        state: ServerState,
        engine: AsyncEngine,
        conversation: Conversation,
        prompt: str,
        token_ids: list[int],
        params: SamplingParams,
        priority: int,
    ) -> None:
        self.format = state.answer_format(engine)
        self._prompt = prompt
        self._parallel = conversation.parallel
        self._names = [tool.name for tool in conversation.offered]
        self._answers = Answers(state, engine, [token_ids], params, priority, self.format.visible)
        self.reasoning_tokens = 0

    @classmethod
    async def begin(
        cls,
        state: ServerState,
        engine: AsyncEngine,
        conversation: Conversation,
        params: SamplingParams,
        priority: int = 0,
    ) -> Turns:
        """Make the prompt.

        Raises:
            RequestError: the conversation or a setting does not fit the model.
        """
        form = state.answer_format(engine)

        def prepared() -> tuple[str, list[int], SamplingParams]:
            prompt, most = conversation.prompt(engine.tokenizer), engine.info.max_model_len
            token_ids = engine.tokenizer.encode(prompt, add_special_tokens=False, most=most)
            return prompt, token_ids, _with_grammar(params, conversation, form, prompt)

        prompt, token_ids, guided = await asyncio.to_thread(prepared)
        return cls(state, engine, conversation, prompt, token_ids, guided, priority)

    @property
    def count(self) -> int:
        """How many turns there are."""
        return self._answers.count

    async def stream(self) -> AsyncGenerator[TurnDelta, None]:
        """The turns as they come; raises as `Answers.stream` and `finish_reason` do."""
        parsing = [self._parsing() for _ in range(self.count)]
        async with aclosing(self._answers.stream()) as deltas:
            async for i, delta in deltas:
                reason = finish_reason(delta)
                one = parsing[i]
                pieces = one.push(delta.text, delta.token_ids)
                if reason is not None:
                    pieces += one.flush()
                    self.reasoning_tokens += one.reasoning_tokens
                    reason = one.finish_reason(reason)
                yield TurnDelta(i, pieces, delta.logprobs or (), reason, delta.stop_reason)

    async def collect(self) -> list[Turn]:
        """Every turn, once all have ended; raises as `stream` does."""
        turns = []
        for answer in await self._answers.collect():
            one = self._parsing()
            whole = ParsedAnswer()
            whole.add(one.push(answer.text, answer.token_ids))
            whole.add(one.flush())
            self.reasoning_tokens += one.reasoning_tokens
            reason = one.finish_reason(answer.finish_reason)
            turns.append(Turn(whole, answer.logprobs, reason, answer.stop_reason))
        return turns

    def usage(self) -> CompletionUsage:
        """Token counts; those of reasoning once the turns have ended."""
        usage = self._answers.usage()
        usage.completion_tokens_details = CompletionTokensDetails(self.reasoning_tokens)
        return usage

    def _parsing(self) -> _Parsing:
        parser = self.format.parser(self._prompt, self._names, parallel=self._parallel)
        return _Parsing(parser, self.format)


def _with_grammar(
    params: SamplingParams, conversation: Conversation, form: AnswerFormat, prompt: str
) -> SamplingParams:
    """The settings, with a grammar when calls must be of a form, or must be made.

    Whatever grammar there is begins behind the thought, if the model has any.
    """
    tools = [
        (tool, Offered(tool.name, tool.parameters or _NO_PARAMETERS))
        for tool in conversation.offered
    ]
    free = [
        offered if tool.strict else replace(offered, schema=_ANY_OBJECT) for tool, offered in tools
    ]
    choice, several, tokens = (
        conversation.tool_choice,
        conversation.parallel,
        form.tokenizer.mark_tokens,
    )
    grammar = params.grammar
    if isinstance(choice, FunctionName) or choice == "required":
        if grammar is not None:
            raise RequestError(
                f"{grammar.param} says what the answer must be, and so does tool_choice; "
                "give one of them",
                param=grammar.param,
            )
        wanted = [offered for _, offered in tools]
        if isinstance(choice, FunctionName):
            wanted = [offered for offered in wanted if offered.name == choice.name][:1]
            several = False
        grammar = calls_only(form.tools, wanted, several=several, tokens=tokens)
    elif tools and grammar is not None:
        grammar = or_calls(grammar, form.tools, free, several=several, tokens=tokens)
    elif any(tool.strict for tool, _ in tools):
        grammar = strict_calls(form.tools, free, several=several, tokens=tokens)
    if grammar is None:
        return params
    return msgspec.structs.replace(params, grammar=form.after_thought(grammar, prompt))


class _Parsing:
    """One turn on its way through the parser.

    Attributes:
        reasoning_tokens: up to the one that ends the thought, once the turn has ended.
    """

    def __init__(self, parser: AnswerParser, form: AnswerFormat) -> None:
        self._parser = parser
        self._format = form
        self._thinking = True
        self._tokens = 0  # until the end of the thought, if there turns out to be one
        self._thought: list[str] = []
        self._calls = False
        self.reasoning_tokens = 0

    def push(self, text: str, token_ids: Sequence[int]) -> list[Piece]:
        for token in token_ids if self._thinking else ():
            self._tokens += 1
            if token == self._format.end_of_reasoning:
                self._thinking = False
                break
        return self._seen(self._parser.push(text))

    def flush(self) -> list[Piece]:
        pieces = self._seen(self._parser.flush())
        if self._format.end_of_reasoning is None:
            self.reasoning_tokens = self._format.count_tokens("".join(self._thought))
        elif self._parser.has_reasoning:
            self.reasoning_tokens = self._tokens
        return pieces

    def finish_reason(self, reason: FinishReason) -> FinishReason:
        """A turn with calls has not come to its own end."""
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _seen(self, pieces: list[Piece]) -> list[Piece]:
        for piece in pieces:
            self._calls = self._calls or isinstance(piece, CallStart)
            if isinstance(piece, Reasoning):
                self._thought.append(piece.text)
        return pieces
