"""The core behind its real sockets, without the text side in front of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import zmq
from support.mock_runner import (
    CRASH_TOKEN,
    END,
    NOT_FINITE_TOKEN,
    VOCAB_SIZE,
    MockRunner,
    expected,
    load,
)

from weft.errors import EngineError
from weft.models.interface import StepInput, StepOutput
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.core import serve
from weft.serving.engine.core_channel import addresses
from weft.serving.engine.prefix_keys import pack_prompt
from weft.serving.engine.protocol import (
    Abort,
    Add,
    EngineStats,
    Failed,
    FromCore,
    Outputs,
    Ready,
    Shutdown,
    ToCore,
    TokenOutput,
)
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.executor.loading import LoadedModel, Progress

CONFIG = EngineConfig(
    model="mock", block_size=4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64
)


class Front:
    """Speaks to a core that runs in a thread, and collects what it says."""

    def __init__(self, load_model: Callable[..., LoadedModel] = load) -> None:
        self.context = zmq.Context()
        base = f"inproc://{id(self)}"
        self.outbox, self.inbox = self.context.socket(zmq.PUSH), self.context.socket(zmq.PULL)
        for socket, address in zip((self.outbox, self.inbox), addresses(base), strict=True):
            socket.bind(address)
        self.raised: BaseException | None = None

        def run() -> None:
            try:
                serve(CONFIG, load_model, self.context, base)
            except EngineError as error:
                self.raised = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.last = Outputs([], EngineStats())

    def send(self, message: ToCore) -> None:
        self.outbox.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def receive(self) -> FromCore:
        assert self.inbox.poll(10_000), "the core is silent"
        message: FromCore = msgspec.msgpack.decode(self.inbox.recv(), type=FromCore)
        if isinstance(message, Outputs):
            self.last = message
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        return message

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 10, **params: Any) -> None:
        wish = SamplingParams(max_tokens=max_tokens, seed=0, **params)
        self.send(Add(request_id, pack_prompt(prompt, None), wish, end_token_ids=(END,)))

    def wait(self, *request_ids: str) -> list[TokenOutput]:
        """The last output of each of these requests, once they have all ended."""
        while not all(self.reason(i) for i in request_ids):
            self.receive()
        return [self.outputs[i][-1] for i in request_ids]

    def reason(self, request_id: str) -> str | None:
        outputs = self.outputs.get(request_id)
        return outputs[-1].finish_reason if outputs else None

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def close(self) -> None:
        with suppress(zmq.Again):  # it has ended
            self.send(Shutdown(drain=False))
        self.thread.join(10)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def front() -> Iterator[Front]:
    front = Front()
    ready = front.receive()
    assert isinstance(ready, Ready)
    assert (ready.info.vocab_size, ready.info.max_model_len) == (VOCAB_SIZE, 64)
    yield front
    front.close()


def test_requests_run_together_and_end_apart(front: Front) -> None:
    prompts = {f"r{i}": [1 + i, 2, 3] * (1 + i) for i in range(12)}
    for name, prompt in prompts.items():
        front.add(name, prompt)
    for name, last in zip(prompts, front.wait(*prompts), strict=True):
        assert front.tokens(name) == expected(prompts[name], 10)
        assert last.finish_reason in ("stop", "length")
    assert front.last.stats.kv_blocks_total == 4096


def test_an_abort_frees_the_blocks(front: Front) -> None:
    front.add("a", [1] * 10, 54)
    while not front.outputs.get("a"):
        front.receive()
    front.send(Abort(("a", "unknown")))
    assert front.wait("a")[0].finish_reason in ("abort", "length", "stop")
    while front.last.stats.kv_blocks_used or front.last.stats.running:
        front.receive()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least 1"), ([1] * 64, "at most 64"), ([1, NOT_FINITE_TOKEN], "not finite")],
)
def test_a_bad_request_ends_alone(front: Front, prompt: list[int], message: str) -> None:
    front.add("good", [1, 2, 3])
    front.add("bad", prompt)
    good, bad = front.wait("good", "bad")
    assert bad.finish_reason == "error"
    assert message in str(bad.error)
    assert good.finish_reason in ("stop", "length")
    assert front.tokens("good") == expected([1, 2, 3], 10)


def test_it_speaks_up_when_there_is_nothing_to_do(front: Front) -> None:
    for _ in range(2):
        message = front.receive()
        assert isinstance(message, Outputs)
        assert message.outputs == []


class HeldUp(MockRunner):
    """Its steps wait for `release`."""

    release = threading.Event()

    def step(self, batch: StepInput) -> StepOutput:
        self.release.wait(60)
        return super().step(batch)


def load_held_up(config: EngineConfig, progress: Progress) -> LoadedModel:
    loaded = load(config, progress)
    runner = HeldUp(loaded.info.block_size)
    runner.allocate_kv_cache(loaded.info.num_blocks)
    return replace(loaded, runner=runner)


def test_it_listens_and_speaks_up_during_a_long_step() -> None:
    front = Front(load_held_up)
    front.receive()
    front.add("a", [1, 2, 3])
    while not front.last.stats.running:
        front.receive()
    front.send(Abort(("a",)))
    assert front.wait("a")[0].finish_reason == "abort"
    assert front.last.stats.steps == 0, "told before the step is back"
    HeldUp.release.set()
    front.close()


def test_draining_finishes_what_is_there(front: Front) -> None:
    for name in "abcdefghijkl":
        front.add(name, [1, 2, 3], 20)
    front.send(Shutdown(drain=True))
    front.wait(*"abcdefghijkl")
    assert front.tokens("l") == expected([1, 2, 3], 20)
    front.thread.join(10)
    assert not front.thread.is_alive()
    assert front.raised is None


def test_when_the_runner_raises_everyone_is_told() -> None:
    front = Front()
    front.receive()
    front.add("good", [1, 2, 3], 50)
    front.add("bad", [CRASH_TOKEN])
    message = "the model runner failed: AssertionError: the runner crashed"
    while not isinstance(failed := front.receive(), Failed):
        pass
    assert failed == Failed("EngineError", message)
    front.close()
    assert str(front.raised) == message


def test_garbage_is_collected_again_once_the_model_is_there() -> None:
    """The engine's process does without while it imports and loads."""
    code = (
        "import gc; gc.disable()\n"
        "from weft.serving.executor.child_process import settle_garbage_collector\n"
        "settle_garbage_collector()\n"
        "assert gc.isenabled() and gc.get_freeze_count()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
