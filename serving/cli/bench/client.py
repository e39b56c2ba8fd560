"""A client for one conversation at a time, over streamed HTTP, with the times of each request.

It works with any OpenAI-compatible server: completions for prompts as token ids or text, chat
completions for conversations. Servers differ in what a stream event stands for. Here an event
counts as at least one token in two cases:

- It has text, in the answer or in its reasoning (`reasoning_content`, or `reasoning` on some
  servers). The model generated both, and usage counts both.
- Its text is present but empty, as for part of a character. Events with a role or a finish reason
  do not count: they carry no token.

The number of tokens comes from the server's usage, whatever the events were. Without usage, each
event counts as one token. Some servers (llama.cpp) hold back tokens without text, and send them
with the next text, or never. So if usage counts more tokens than there were events, the event that
ends the answer stands for the last token.

Every request has its own connection: some servers close a connection after a stream, and a race
with that would look like a failed request.

Does not handle: several answers to one request, tool calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from weft.serving.cli.bench.workload import Turn

REASON_LENGTH = 300  # maximum characters to keep from a server's error


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def carries_token(self) -> bool:
        """Return whether this event stands for a token; see the module's text."""
        delta = self.delta
        if delta is None:
            return bool(self.text) or (self.text is not None and self.finish_reason is None)
        if delta.content or delta.reasoning_content or delta.reasoning:
            return True
        parts = (delta.content, delta.reasoning_content, delta.reasoning)
        return "" in parts and delta.role is None and self.finish_reason is None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Result:
    """Times for one request, in seconds on the benchmark's clock.

    Attributes:
        due: scheduled start.
        start: actual start.
        end: end of the answer.
        asked_tokens: requested length of the answer.
        arrivals: arrival of each event with tokens.
        prompt_tokens, output_tokens: counts from the server.
        cached_tokens: prompt tokens from the server's cache, as it reports them.
        error: reason for the failure, or None.
    """

    due: float
    start: float
    end: float = 0.0
    asked_tokens: int = 0
    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time from `due` to the first token, so a late start counts."""
        return self.arrivals[0] - self.due

    @property
    def latency(self) -> float:
        """Time from `due` to the end of the answer."""
        return self.end - self.due

    @property
    def itl(self) -> list[float]:
        """Times between events with tokens; a reader sees long ones as stutter."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 for answers with one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


Record = Callable[[Result], None]


def ignore(_: Result) -> None:
    """Discard a result."""


@dataclass(frozen=True, slots=True)
class Client:
    """A connection pool and the fixed part of all requests.

    Attributes:
        session: aiohttp session; its timeout applies to each request.
        base_url: URL with /v1.
        model: name of the model on the server.
        chat: use /chat/completions instead of /completions.
        extra: further fields for every request (temperature, ignore_eos, ...).
    """

    session: aiohttp.ClientSession
    base_url: str
    model: str
    chat: bool
    extra: dict[str, Any]

    async def ask(
        self, conversation: list[Turn], due: float, record: Record = ignore
    ) -> list[Result]:
        """Hold a conversation, with one request per turn; a failed turn ends it.

        Args:
            conversation: turns.
            due: scheduled start of the first turn; each later one is due when the one before ends.
            record: called with each result at once.
        """
        results: list[Result] = []
        said: list[dict[str, str]] = []
        for turn in conversation:
            result = Result(due=due, start=time.perf_counter(), asked_tokens=turn.output_tokens)
            if self.chat:
                said.append({"role": "user", "content": str(turn.prompt)})
                answer = await self._stream("/chat/completions", {"messages": said}, result)
                said.append({"role": "assistant", "content": answer})
            else:
                await self._stream("/completions", {"prompt": turn.prompt}, result)
            due = result.end = time.perf_counter()
            results.append(result)
            record(result)
            if result.error is not None:
                break
        return results

    async def _stream(self, route: str, asked: dict[str, Any], result: Result) -> str:
        """Make one request, fill in `result` except its end, and return the text."""
        body = asked | {
            "model": self.model,
            "max_tokens": result.asked_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        reader = EventReader(result)
        try:
            async with self.session.post(
                self.base_url + route,
                data=_encode(body),
                headers={"Content-Type": "application/json"},
            ) as response:
                if response.status == 200:
                    async for data in response.content.iter_any():
                        reader.feed(data, time.perf_counter())
                    reader.finish()
                else:
                    result.error = f"HTTP {response.status}: {_short(await response.read())}"
        except TimeoutError:
            result.error = f"timed out after {self.session.timeout.total:g} s"
        except (aiohttp.ClientError, msgspec.MsgspecError) as error:
            result.error = f"{type(error).__name__}: {error}"
        return "".join(reader.text)


class EventReader:
    """A parser that reads the events of one stream into a result."""

    def __init__(self, result: Result) -> None:
        self.text: list[str] = []
        self._result = result
        self._rest = b""  # start of an incomplete line
        self._ended = False  # whether an event had a finish reason
        self._silent_end: float | None = None  # arrival of that event, if it had no text

    def feed(self, data: bytes, now: float) -> None:
        """Take any piece of the stream, which arrived at the time `now`."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                if line.startswith(b"[DONE]", 6):
                    self._ended = True
                else:
                    self._take(_decode(line[5:]), now)
            elif line.startswith(b"error:"):  # from older llama.cpp servers
                self._result.error = _short(line)

    def finish(self) -> None:
        """End the stream: settle the number of tokens, and check that the answer is complete."""
        result = self._result
        if self._silent_end is not None and result.output_tokens > len(result.arrivals):
            result.arrivals.append(self._silent_end)
        result.output_tokens = result.output_tokens or len(result.arrivals)
        if result.error is None and not self._ended:
            result.error = "the stream ended in the middle of the answer"
        elif result.error is None and not result.arrivals:
            result.error = "the answer was empty"

    def _take(self, event: _Event, now: float) -> None:
        result = self._result
        if event.error is not None:
            result.error = _short(_encode(event.error))
        if (usage := event.usage) is not None:
            result.prompt_tokens = usage.prompt_tokens
            result.output_tokens = usage.completion_tokens
            if usage.prompt_tokens_details is not None:
                result.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
        for choice in event.choices:
            if choice.carries_token():
                result.arrivals.append(now)
                text = choice.text if choice.delta is None else choice.delta.content
                self.text.append(text or "")
            elif choice.finish_reason is not None:
                self._silent_end = now
            self._ended = self._ended or choice.finish_reason is not None


def _short(reason: bytes) -> str:
    return reason.decode(errors="replace").strip()[:REASON_LENGTH]
