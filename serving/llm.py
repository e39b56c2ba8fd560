"""The model as a Python object: `LLM("weft-demo").generate(prompts)`.

An AsyncEngine runs in this process, on an event loop in its own thread. The methods here are plain
functions: they give work to the engine and wait. A long list of prompts keeps the engine full (see
admission.py), and the answers are returned in the order of the prompts.

Not handled: calls from the engine's own event loop; errors of single prompts. A prompt that cannot
be served fails the whole list before anything runs. Use `weft batch` if it should fail alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from weft.errors import EngineError, RequestError
from weft.serving.config.progress import Progress
from weft.serving.config.sources import from_arguments
from weft.serving.engine.admission import for_each, width
from weft.serving.engine.checks import check_dimensions
from weft.serving.engine.completion import Completion, complete, embed
from weft.serving.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from weft.models.interface import Float32
    from weft.serving.config.settings import EngineConfig
    from weft.serving.engine.checks import CheckedRequest
    from weft.serving.engine.engine import AsyncEngine, Delta
    from weft.serving.engine.generation_config import GenerationConfig
    from weft.serving.engine.protocol import EngineInfo
    from weft.serving.engine.tokenizer import Tokenizer

T = TypeVar("T")
Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A loaded model.

        with LLM("weft-demo") as llm:
            for answer in llm.generate(["1 + 1 =", "2 + 2 ="], SamplingParams(temperature=0)):
                print(answer.text)

    Args:
        model: OWNER/NAME on the Hugging Face hub, a directory, or a bundled model.
        settings: fields of `EngineConfig`, such as `max_model_len=4096`; memory also as "4GiB".

    Raises:
        ConfigError: a setting is wrong.
        ModelError: the checkpoint cannot be loaded.
    """

    def __init__(self, model: str | Path = "weft-demo", **settings: Any) -> None:
        self._start(from_arguments(settings | {"model": str(model)}))

    @classmethod
    def of(cls, config: EngineConfig) -> Self:
        """Load a model with settings that have been checked."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        from weft.serving.engine.engine import AsyncEngine

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="weft-llm", daemon=True)
        self._thread.start()
        self._engine: AsyncEngine | None = None
        try:
            # Several cores in one process would slow each other down.
            self._engine = self._wait(AsyncEngine.start(config, in_process=config.dp == 1))
        except Exception:  # an interrupt does not wait until loading ends
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model. Running requests are aborted; a second call does nothing."""
        if self._loop.is_closed():
            return
        self._wait(self._finish())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer and chat template."""
        return self._running.tokenizer

    @property
    def generation_config(self) -> GenerationConfig:
        """The effective sampling defaults, for settings without a value in SamplingParams."""
        return self._running.generation_config

    @property
    def info(self) -> EngineInfo:
        """Sizes of the loaded model and its KV cache."""
        return self._running.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        progress: bool | str = False,
    ) -> list[Completion]:
        """Continue texts.

        Args:
            prompts: texts or lists of token ids; one prompt may be given without a list.
            params: sampling settings for all prompts, or a list with one entry per prompt.
            progress: show a progress bar on stderr; a text is its title.

        Returns:
            The answers in the order of the prompts. A prompt with `n` above 1 has n consecutive
            answers.

        Raises:
            RequestError: a prompt cannot be served; the message has its number.
        """
        encoders = [partial(self._encode, prompt) for prompt in _listed(prompts)]
        return self._complete(encoders, params, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        tools: Tools | Sequence[Tools | None] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | str = False,
    ) -> list[Completion]:
        """Answer conversations through the model's chat template.

        Args:
            messages: a list of `{"role": ..., "content": ...}`, or a list of such lists.
            params: sampling settings for all conversations, or a list with one entry per
                conversation.
            tools: functions that the model may call, in OpenAI's form: one list for all
                conversations, or a list (or None) per conversation.
            chat_template_kwargs: arguments for the chat template, such as
                `{"enable_thinking": False}`.
            progress: show a progress bar on stderr; a text is its title.

        Returns and raises as `generate`.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        chats = cast("Sequence[Conversation]", [messages] if one else messages)
        shared = not tools or isinstance(tools[0], Mapping)
        each = cast("Sequence[Tools | None]", [tools] * len(chats) if shared else tools)
        template = partial(self.tokenizer.apply_chat_template, arguments=chat_template_kwargs)
        encoders = [partial(template, *pair) for pair in zip(chats, each, strict=True)]
        return self._complete(encoders, params, progress)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        progress: bool | str = False,
    ) -> Float32:
        """Compute embeddings: texts of similar meaning have similar vectors; see --pooling.

        Args:
            prompts: texts or lists of token ids; one prompt may be given without a list.
            dimensions: keep only the first numbers, up to this count; None keeps all.
            progress: show a progress bar on stderr; a text is its title.

        Returns:
            float32 [prompts, dimensions], in the order of the prompts.

        Raises:
            RequestError: a prompt cannot be served; the message has its number.
        """
        prepared = []
        for i, prompt in enumerate(_listed(prompts)):
            with _with_number(i):
                prepared.append(self._encode(prompt))
        title = progress if isinstance(progress, str) else "embed"
        shown = Progress(title, len(prepared), quiet=not progress)
        return self._wait(_embed_all(self._running, prepared, dimensions, shown))

    def stream(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | None = None,
        *,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[Delta, None, None]:
        """Yield the answer to a text or a conversation as it grows; closing the iterator aborts it.

        Raises:
            RequestError: the prompt cannot be served.
        """
        is_chat = bool(prompt) and isinstance(prompt[0], Mapping)
        ids = (
            self.tokenizer.apply_chat_template(
                cast("Conversation", prompt), tools, chat_template_kwargs
            )
            if is_chat
            else self._encode(cast("Prompt", prompt))
        )
        engine = self._running
        request = engine.validate(ids, params or SamplingParams())
        news: SimpleQueue[Delta | None] = SimpleQueue()

        async def pump() -> None:
            async with aclosing(engine.generate(request)) as deltas:
                async for delta in deltas:
                    news.put(delta)

        following = asyncio.run_coroutine_threadsafe(pump(), self._loop)
        following.add_done_callback(lambda _: news.put(None))
        try:
            while (delta := news.get()) is not None:
                yield delta
            following.result()
        finally:
            following.cancel()

    async def _finish(self) -> None:
        """End the engine and all tasks on the loop."""
        if self._engine is not None:
            await self._engine.shutdown(drain=False)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_default_executor()

    @property
    def _running(self) -> AsyncEngine:
        if self._engine is None or self._loop.is_closed():
            raise EngineError("this LLM is closed")
        return self._engine

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _complete(
        self, encoders: Sequence[Callable[[], list[int]]], params: Params, progress: bool | str
    ) -> list[Completion]:
        count = len(encoders)
        settings = params if isinstance(params, Sequence) else [params or SamplingParams()] * count
        if len(settings) != count:
            raise RequestError(
                f"params has {len(settings)} entries for {count} prompts", param="params"
            )
        prompts = []
        for i, encode in enumerate(encoders):
            with _with_number(i):
                prompts.append(encode())
        title = progress if isinstance(progress, str) else "generate"
        shown = Progress(title, sum(each.n for each in settings), quiet=not progress)
        return self._wait(_complete_all(self._running, prompts, settings, shown))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


async def _complete_all(
    engine: AsyncEngine,
    prompts: Sequence[list[int]],
    settings: Sequence[SamplingParams],
    progress: Progress,
) -> list[Completion]:
    requests: list[CheckedRequest] = []
    for i, (prompt, each) in enumerate(zip(prompts, settings, strict=True)):
        with _with_number(i):
            request = engine.validate(prompt, each)
            requests += map(request.answer, range(each.n))
    results: list[Completion | None] = [None] * len(requests)

    async def work(i: int) -> None:
        done = results[i] = await complete(engine, requests[i])
        progress.advance(len(done.token_ids))

    with progress:
        await for_each(range(len(requests)), work, workers=width(engine))
    return cast("list[Completion]", results)


async def _embed_all(
    engine: AsyncEngine, prompts: Sequence[list[int]], dimensions: int | None, progress: Progress
) -> Float32:
    import numpy as np

    check_dimensions(dimensions, engine.info)
    requests: list[CheckedRequest] = []
    for i, prompt in enumerate(prompts):
        with _with_number(i):
            requests.append(engine.validate(prompt, engine.pooling))
    vectors = np.empty((len(prompts), dimensions or engine.info.hidden_size), np.float32)

    async def work(i: int) -> None:
        with _with_number(i):
            vectors[i] = await embed(engine, requests[i], dimensions)
        progress.advance(0)

    with progress:
        await for_each(range(len(prompts)), work, workers=width(engine))
    return vectors


def _listed(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Put a single prompt into a list."""
    if isinstance(prompts, Mapping):
        raise RequestError(
            f"prompts is a dictionary with {', '.join(map(repr, prompts))}; give a text, a list of "
            "token ids, or a list of either",
            param="prompts",
        )
    one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
    return cast("Sequence[Prompt]", [prompts] if one else prompts)


@contextmanager
def _with_number(i: int) -> Iterator[None]:
    """Add the number of the prompt to the message of a RequestError."""
    try:
        yield
    except RequestError as error:
        raise RequestError(f"prompt {i}: {error}", param=error.param, code=error.code) from error
