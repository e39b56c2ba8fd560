"""Asks a server one conversation at a time over streamed HTTP, and takes the times.

Works against any OpenAI-compatible server: completions for prompts that are
token ids or text, chat completions for conversations. Servers differ in what
an event of a stream stands for; here it carries at least one token if

- it has text, of the answer or of its reasoning (`reasoning_content`, which
  some call `reasoning`): the model has made both, and the usage counts both;
- its text is there and empty, as for a token that is a part of a character.
  But not if it names the role or the reason of the end: those carry none.

How many tokens came is what the server's usage says, whatever the events were;
without usage each event counts as one. Servers that hold back tokens without
text of their own (llama.cpp) show them with the next one that has some, or not
at all: if the usage counts more tokens than there were events, the event that
ends the answer stands for the last of them.

Every request has a connection of its own: some servers drop one that a stream
has used, and a race with that would look like a failure.

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

REASON_LENGTH = 300  # characters kept of what a server says of a failure


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
        """Whether this event stands for a token; see the module's text."""
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
    """What one request took; times are seconds on the benchmark's clock.

    Attributes:
        due: when the load said it should start; `start` is when it did.
        asked_tokens: how long the answer should be.
        arrivals: when each event with tokens came.
        prompt_tokens, output_tokens: as the server counted them.
        cached_tokens: of the prompt, those that the server says it had cached.
        error: why it failed, or None.
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
        """Time to the first token, from when the request was due: a late start counts."""
        return self.arrivals[0] - self.due

    @property
    def latency(self) -> float:
        """Time to the end of the answer, from when the request was due."""
        return self.end - self.due

    @property
    def itl(self) -> list[float]:
        """Times between events with tokens: what a reader sees as a stutter."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [later - earlier for earlier, later in pairs]

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 for answers of one token."""
        if self.output_tokens < 2:
            return 0.0
        return (self.arrivals[-1] - self.arrivals[0]) / (self.output_tokens - 1)


Record = Callable[[Result], None]


def ignore(_: Result) -> None:
    """A record that keeps nothing."""


@dataclass(frozen=True, slots=True)
class Client:
    """Where and how to ask.

    Attributes:
        session: of aiohttp; its timeout bounds each request.
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

    async def ask(
        self, conversation: list[Turn], due: float, record: Record = ignore
    ) -> list[Result]:
        """Hold a conversation, one request per turn; a failed turn ends it.

        Args:
            conversation: its turns.
            due: when the first should start; a later one is due when the one before has ended.
            record: is called with each result as soon as it is there.
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
        """Make one request; fills in `result`, but for its end, and returns the text."""
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
    """Reads the events of one stream into a result."""

    def __init__(self, result: Result) -> None:
        self.text: list[str] = []
        self._result = result
        self._rest = b""  # of a line that has not come whole
        self._ended = False  # an event gave the reason of the end
        self._silent_end: float | None = None  # when it did, if it had no text

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at the time `now`: any part of the stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                if line.startswith(b"[DONE]", 6):
                    self._ended = True
                else:
                    self._take(_decode(line[5:]), now)
            elif line.startswith(b"error:"):  # of older llama.cpp servers
                self._result.error = _short(line)

    def finish(self) -> None:
        """The stream is over: settle the count, and whether the answer was whole."""
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
