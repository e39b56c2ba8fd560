"""Asks a server one conversation at a time over streamed HTTP, and takes the times.

Works against any OpenAI-compatible server: completions for prompts that are
token ids or text, chat completions for conversations. `ignore_eos` (an
extension that weft, vLLM, SGLang and llama.cpp share) makes answers exactly as
long as asked for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from weft.serving.bench.workload import Turn


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Piece(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Piece | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_DECODE = msgspec.json.Decoder(_Chunk).decode


@dataclass(slots=True)
class Result:
    """What one request took; times are seconds on the benchmark's clock.

    Attributes:
        due: when the load said it should start; `start` is when it did.
        arrivals: when each piece of the answer came.
        prompt_tokens, output_tokens: as the server counted them.
        error: why it failed, or None.
    """

    due: float
    start: float
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to the first token, from when the request was due: a late start counts."""
        return self.arrivals[0] - self.due

    @property
    def latency(self) -> float:
        """Time to the end of the answer, from when the request was due."""
        return self.end - self.due

    @property
    def itl(self) -> list[float]:
        """Times between pieces of the answer: what a reader sees as a stutter."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 for answers of one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Client:
    """Where and how to ask.

    Attributes:
        session: of aiohttp, with as many connections as there are users.
        base_url: with its /v1.
        model: its name on the server.
        chat: use /chat/completions; else /completions.
        extra: fields that every request carries besides (temperature, ignore_eos, ...).
    """

    session: aiohttp.ClientSession
    base_url: str
    model: str
    chat: bool
    extra: dict[str, Any]

    async def ask(self, conversation: list[Turn], due: float) -> list[Result]:
        """Hold a conversation, one request per turn; a failed turn ends it."""
        results: list[Result] = []
        said: list[dict[str, str]] = []
        for turn in conversation:
            result = Result(due=due, start=time.perf_counter())
            results.append(result)
            if self.chat:
                said.append({"role": "user", "content": str(turn.prompt)})
                body: dict[str, Any] = {"messages": said}
            else:
                body = {"prompt": turn.prompt}
            answer = await self._stream(body, turn.output_tokens, result)
            result.end = time.perf_counter()
            if result.error:
                break
            said.append({"role": "assistant", "content": answer})
            due = result.end
        return results

    async def _stream(self, body: dict[str, Any], max_tokens: int, result: Result) -> str:
        """One request; fills in `result` and returns the text."""
        body |= {
            "model": self.model,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        route = "/chat/completions" if self.chat else "/completions"
        text: list[str] = []
        try:
            async with self.session.post(self.base_url + route, json=body) as response:
                if response.status != 200:
                    reason = (await response.text())[:300]
                    result.error = f"HTTP {response.status}: {reason}"
                    return ""
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(_DECODE(line[6:]), result, text)
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
            result.error = f"{type(error).__name__}: {error}"
        if not result.error and not result.arrivals:
            result.error = "the answer was empty"
        return "".join(text)

    def _take(self, chunk: _Chunk, result: Result, text: list[str]) -> None:
        if chunk.usage is not None:
            result.prompt_tokens = chunk.usage.prompt_tokens
            result.output_tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            piece = choice.text if choice.delta is None else choice.delta.content
            # The first piece of a chat only names the role; an empty one carries no token.
            if piece:
                result.arrivals.append(time.perf_counter())
                text.append(piece)
