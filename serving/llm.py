"""The model as a Python object: `LLM("weft-demo").generate(prompts)`.

An AsyncEngine runs in this process, on an event loop in a thread of its own;
the methods here are plain functions that hand it work and wait. A list of
prompts is worked on by as many workers as keep the engine full, each taking
the next prompt when it is done with one: the engine's queue stays short, and
the answers come back in the order of the prompts.

Does not handle: calls from the engine's own event loop; one prompt that cannot
be served fails the whole list before anything runs (batch.py is the way to
have it fail alone).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from msgspec.structs import replace

from weft.errors import EngineError, RequestError
from weft.serving.config import EngineConfig
from weft.serving.progress import Progress
from weft.serving.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.serving.engine import AsyncEngine, Delta
    from weft.serving.messages import EngineInfo, TokenLogprob
    from weft.serving.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer.

    Attributes:
        prompt_token_ids: the prompt as the model saw it.
        text: without the stop string that ended it.
        token_ids: what was sampled, an end token included.
        finish_reason: "stop", "length", or "error", and then `error` says why.
        stop_reason: the stop string or stop token that ended it, if one did.
        logprobs: one per output token, when asked for.
        prompt_logprobs: one per prompt token from the second on, when asked for.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    cached_tokens: int = 0
    error: str | None = None


class LLM:
    """A loaded model.

        with LLM("weft-demo") as llm:
            for answer in llm.generate(["1 + 1 =", "2 + 2 ="], SamplingParams(temperature=0)):
                print(answer.text)

    Args:
        model: a checkpoint's directory, or the name of a bundled model.
        settings: fields of `EngineConfig`, such as `max_model_len=4096`.

    Raises:
        ConfigError: a setting cannot be.
        ModelError: the checkpoint cannot be loaded.
    """

    def __init__(self, model: str | Path = "weft-demo", **settings: Any) -> None:
        from weft.serving.engine import AsyncEngine

        config = EngineConfig(model=str(model), **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-llm", daemon=True)
        self._thread.start()
        self._engine: AsyncEngine | None = None
        try:
            self._engine = self._wait(AsyncEngine.start(config, in_process=True))
        finally:
            if self._engine is None:
                self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the model. What still runs is aborted; a second call does nothing."""
        if self._loop.is_closed():
            return
        if self._engine is not None:
            self._wait(self._engine.shutdown(drain=False))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template."""
        return self._running.tokenizer

    @property
    def info(self) -> EngineInfo:
        """Sizes of the loaded model and of its KV cache."""
        return self._running.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | str = False,
    ) -> list[Completion]:
        """Continue texts.

        Args:
            prompts: texts or lists of token ids; a single one is a list of one.
            params: for all, or one for each prompt.
            progress: show a bar on stderr; a text is its title.

        Returns:
            The answers in the order of the prompts. A prompt with `n` above 1 has n answers, one
            after the other.

        Raises:
            RequestError: a prompt cannot be served; the message says which.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        texts = cast("Sequence[Prompt]", [prompts] if one else prompts)
        return self._complete([partial(self._encode, text) for text in texts], params, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Tools | Sequence[Tools | None] | None = None,
        progress: bool | str = False,
    ) -> list[Completion]:
        """Answer conversations, through the model's chat template.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
            params: for all, or one for each conversation.
            tools: functions that the model may call, in OpenAI's form.
            progress: show a bar on stderr; a text is its title.

        Returns and raises as `generate`.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        chats = cast("Sequence[Conversation]", [messages] if one else messages)
        shared = not tools or isinstance(tools[0], Mapping)
        each = cast("Sequence[Tools | None]", [tools] * len(chats) if shared else tools)
        template = self.tokenizer.apply_chat_template
        encoders = [partial(template, *pair) for pair in zip(chats, each, strict=True)]
        return self._complete(encoders, params, progress)

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
    ) -> Iterator[Delta]:
        """One answer as it grows, to a text or to a conversation; closing the iterator aborts it.

        Raises:
            RequestError: it cannot be served.
        """
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        ids = (
            self.tokenizer.apply_chat_template(cast("Conversation", prompt), tools)
            if is_chat
            else self._encode(cast("Prompt", prompt))
        )
        deltas = self._running.generate(ids, params or SamplingParams())

        async def following() -> Delta | None:
            return await anext(deltas, None)

        try:
            while (delta := self._wait(following())) is not None:
                yield delta
        finally:
            self._wait(deltas.aclose())

    @property
    def _running(self) -> AsyncEngine:
        if self._engine is None or self._loop.is_closed():
            raise EngineError("this LLM is closed")
        return self._engine

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _complete(
        self,
        encoders: Sequence[Callable[[], list[int]]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool | str,
    ) -> list[Completion]:
        engine, count = self._running, len(encoders)
        wishes = params if isinstance(params, Sequence) else [params or SamplingParams()] * count
        if len(wishes) != count:
            raise RequestError(
                f"params has {len(wishes)} entries for {count} prompts", param="params"
            )
        jobs: list[tuple[list[int], SamplingParams]] = []
        for i, (encode, wish) in enumerate(zip(encoders, wishes, strict=True)):
            try:
                ids = encode()
                jobs += [(ids, engine.validate(ids, one)) for one in answers(wish)]
            except RequestError as error:
                raise RequestError(f"prompt {i}: {error}", param=error.param) from error
        title = progress if isinstance(progress, str) else "generate"
        results: list[Completion | None] = [None] * len(jobs)

        async def work() -> None:
            with Progress(title, len(jobs), quiet=not progress) as shown:

                async def one(job: tuple[int, tuple[list[int], SamplingParams]]) -> None:
                    index, (ids, wish) = job
                    done = results[index] = await complete(engine, ids, wish)
                    shown.advance(len(done.token_ids))

                await for_each(enumerate(jobs), one, workers=window(engine))

        self._wait(work())
        return cast("list[Completion]", results)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def answers(params: SamplingParams) -> list[SamplingParams]:
    """The requests that `n` answers are: the i-th with its own seed, so that they differ."""
    if params.n == 1:
        return [params]
    seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
    return [replace(params, n=1, seed=seed) for seed in seeds]


async def complete(engine: AsyncEngine, ids: list[int], params: SamplingParams) -> Completion:
    """Run one request to its end."""
    deltas = [delta async for delta in engine.generate(ids, params)]
    last = deltas[-1]
    return Completion(
        prompt_token_ids=ids,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        finish_reason=last.finish_reason or "error",
        stop_reason=last.stop_reason,
        logprobs=_joined(delta.logprobs for delta in deltas),
        prompt_logprobs=_joined(delta.prompt_logprobs for delta in deltas),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        error=last.error,
    )


def window(engine: AsyncEngine) -> int:
    """Requests to have in the engine at once: as many as run, and as many again in its queue."""
    running = engine.config.max_num_seqs
    return running + min(running, engine.config.max_queue)


async def for_each(
    items: Iterable[T], work: Callable[[T], Coroutine[Any, Any, None]], *, workers: int
) -> None:
    """Do `work` for every item, `workers` at a time; the items are drawn as they are needed.

    The first error ends it, and aborts the others.
    """
    source = iter(items)

    async def worker() -> None:
        for item in source:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _joined(parts: Iterable[Sequence[TokenLogprob] | None]) -> list[TokenLogprob] | None:
    found = [part for part in parts if part is not None]
    return [entry for part in found for entry in part] if found else None
