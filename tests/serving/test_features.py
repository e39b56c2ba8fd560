"""Features of requests together, on each layout and with each format of weights.

Each request has several features, drawn so that all pairs occur. Its answer must be the one that it
gets alone, from one rank without a prefix cache: beside the other requests, after preemptions, with
a prefix in the cache, as a row of a batch, after a restart of the engine, and while it drains. Each
kind of request must have met each of these. docs/features.md takes its cells from the marks here.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_checkpoint
from support.engine import cores
from support.nodes import LOAD, TOKEN, agent
from support.quantized import FORMATS, quantize
from support.server import free_port

from weft.errors import EngineError
from weft.serving.api.app import build_app
from weft.serving.api.local import LocalApi
from weft.serving.api.state import ServerState
from weft.serving.batch.files import Inputs
from weft.serving.batch.job import Job
from weft.serving.batch.journal import Journal
from weft.serving.cli.batch import Feeder, _row_ids
from weft.serving.config.settings import EngineConfig
from weft.serving.engine.engine import AsyncEngine

DRAWN = ("grammar", "tools", "logprobs", "prompt_logprobs", "penalties", "n", "seed", "priority")
"""Features that a request for tokens may have."""
TOKENS = (
    "grammar", "tools", "logprobs", "prompt_logprobs", "penalties", "n", "seed", "priority",
    "prefix_cache", "preemption", "batches", "drain",
)  # fmt: skip
"""They, and what each such request meets."""

VECTORS = ("embeddings", "priority", "batches", "drain")
"""The same of requests for embeddings."""

SCORED = "prompt_logprobs"
"""Needs all of a prompt to be computed, and so takes no prefix from the cache."""
BLOCK = 4
PATTERN = "[a-e ]{3,5}"
CALL = '<tool_call>\n{"name": "f", "arguments": {'
SETTINGS: dict[str, Any] = {
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 32,
    "block_size": BLOCK,
    "threads": 1,
    "tp": 1,
}
COMMON = "the user asks the assistant for the weather"
NUMERIC = {"quantization", "kv_cache_dtype"}
"""Settings that change the numbers."""
LONG = 8
"""Tokens in an answer."""
ROUNDS = 20


@dataclass
class Asked:
    """A request.

    Attributes:
        features: drawn for it.
        path, body: what is posted.
        tokens: of the prompt, which no other request has; known once it was answered alone.
        answer: when it was alone.
        met: "prefix_cache" and "preemption", once it had them.
    """

    features: frozenset[str]
    path: str
    body: dict[str, Any]
    tokens: int = 0
    answer: Any = None
    met: set[str] = field(default_factory=set)

    @property
    def sequences(self) -> int:
        return int(self.body.get("n", 1))


def draw(rng: random.Random, at_once: int) -> list[frozenset[str]]:
    """Draw sets of `at_once` features until all pairs have occurred; each once without `SCORED`."""
    wanted = {frozenset(pair) for pair in combinations(DRAWN, 2)}
    wanted |= {frozenset({name, "cached"}) for name in DRAWN if name != SCORED}
    drawn = []
    while wanted:
        chosen = frozenset(rng.sample(DRAWN, at_once))
        with_more = chosen if SCORED in chosen else chosen | {"cached"}
        if found := {pair for pair in wanted if pair <= with_more}:
            drawn.append(chosen)
            wanted -= found
    return drawn


def request(number: int, features: frozenset[str], long: int) -> Asked:
    """Make a request; each number has a prompt with another length."""
    chat = "tools" in features or number % 2 == 0
    text = COMMON + "z" * (number if chat else number + 30)
    body: dict[str, Any] = {"max_tokens": long, "temperature": 0, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if "tools" in features:
        switch = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": switch}}
        choice = "auto" if "grammar" in features else "required"
        body |= {"tools": [tool], "tool_choice": choice, "max_tokens": 4 * long}
    if "grammar" in features:
        form = {"name": "x", "schema": {"enum": ["a", "bb"]}}
        body |= (
            {"response_format": {"type": "json_schema", "json_schema": form}}
            if "tools" in features
            else {"guided_regex": PATTERN}
        )
    if "logprobs" in features:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    if "prompt_logprobs" in features:
        body["prompt_logprobs"] = 1
    if "penalties" in features:
        penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
        body |= penalties
    if "n" in features:
        body["n"] = 2
    if "seed" in features:
        body |= {"temperature": 1.0, "seed": number}
    if "priority" in features:
        body["priority"] = 1 + number % 2  # the others come first
    return Asked(features, "/v1/chat/completions" if chat else "/v1/completions", body)


def requests(seed: str, *, few: bool) -> list[Asked]:
    """Draw requests for tokens, and add some for embeddings."""
    rng = random.Random(seed)
    asked = [
        request(i, features, LONG // 2 if few else LONG)
        for i, features in enumerate(draw(rng, 7 if few else 5))
    ]
    for i in range(2):
        text = COMMON + "z" * (60 + i)
        asked.append(
            Asked(frozenset({"embeddings"}), "/v1/embeddings", {"input": [text], "priority": i})
        )
    return asked


def check(asked: Asked, answer: Any) -> None:
    """Check that an answer shows its request's features."""
    if "embeddings" in asked.features:
        assert answer["data"][0]["embedding"]
        return
    choices = answer["choices"]
    assert len(choices) == asked.sequences
    for choice in choices:
        message = choice.get("message", {})
        text = choice.get("text", message.get("content"))
        if "tools" in asked.features:  # a call may be cut off
            begun = CALL.startswith(text or "") or (text or "").startswith(CALL)
            free = "grammar" in asked.features and text in ('"a"', '"bb"')
            assert message.get("tool_calls") or begun or free
        elif "grammar" in asked.features:
            assert re.fullmatch(PATTERN, text)
        assert ("logprobs" in asked.features) == (choice.get("logprobs") is not None)
    where = answer if "messages" in asked.body else choices[0]
    assert ("prompt_logprobs" in asked.features) == bool(where.get("prompt_logprobs"))


def same(one: Any, other: Any, name: str = "") -> bool:
    """Compare answers; numbers are close, and ids and times may differ."""
    if name in ("id", "created", "usage", "cached_tokens"):
        return True
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k], k) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3, abs_tol=1e-3)
    return bool(one == other)


class Served:
    """An engine with the HTTP API's routes, which answers requests."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.state = ServerState("m", engine=engine, tool_parser="hermes", page=False)
        self.api = LocalApi(build_app(self.state))
        self.queued = 0

    async def ask(self, asked: Asked) -> Any:
        """Answer a request.

        Raises:
            EngineError: the engine failed meanwhile.
        """

        async def admitted() -> None:
            self.queued += 1

        body = json.dumps(asked.body | {"model": "m"}).encode()
        status, answer = await self.api.post(asked.path, body, admitted)
        if status == 500:
            raise EngineError(answer.decode())
        assert status == 200, (asked, answer)
        return json.loads(answer)

    async def round(self, some: Iterable[Asked]) -> None:
        """Answer requests at once, and compare the answers."""
        began, some = time.monotonic(), list(some)
        answers = await asyncio.gather(*map(self.ask, some))
        for asked, answer in zip(some, answers, strict=True):
            compare(asked, answer)
            usage = answer["usage"].get("prompt_tokens_details") or {}
            if usage.get("cached_tokens"):
                asked.met.add("prefix_cache")
        by_length = {asked.tokens: asked for asked in some}
        for timeline in self.engine.timelines.since(began):
            if [phase for phase, _ in timeline.phases].count("queued") > 1:
                by_length[timeline.prompt_tokens].met.add("preemption")

    async def batch(self, some: list[Asked], folder: Path) -> None:
        """Answer requests as the rows of a batch, and compare the answers."""
        rows = [
            {"custom_id": str(i), "method": "POST", "url": each.path, "body": each.body}
            for i, each in enumerate(some)
        ]
        source, output = folder / "in.jsonl", folder / "out.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        inputs = Inputs([source])
        with closing(Journal(folder / "state", [output])) as journal:
            journal.begin({}, _row_ids(inputs, "m"))
            journal.open()
            job = Job(inputs, journal, model="m", seed=0)
            await job.run(Feeder(self.state, self.engine, 8).post, 8)
        lines = list(map(json.loads, output.read_text().splitlines()))
        assert len(lines) == len(some)
        for line in lines:
            compare(some[int(line["custom_id"])], line["response"]["body"])

    async def restart(self, some: list[Asked]) -> None:
        """Kill a core while it answers; those not lost, and all afterwards, are as before."""
        tasks = [asyncio.create_task(self.ask(asked)) for asked in some]
        while not self.engine.stats.running:
            await asyncio.sleep(0.01)
        cores()[0].kill()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for asked, answer in zip(some, answers, strict=True):
            if isinstance(answer, BaseException):
                assert isinstance(answer, EngineError)
            else:
                compare(asked, answer)
        assert any(isinstance(answer, EngineError) for answer in answers)
        while self.engine.restarts < 1 or self.engine.serving < self.engine.config.dp:
            assert self.engine.failure is None
            await asyncio.sleep(0.05)
        await self.round(some)

    async def drain(self, some: list[Asked]) -> None:
        """Shut down once all requests are queued; each is answered to its end."""
        self.queued, last = 0, sum(asked.sequences for asked in some)
        tasks = [asyncio.create_task(self.ask(asked)) for asked in some]
        while self.queued < last:
            await asyncio.sleep(0)
        assert self.engine.live
        await self.engine.shutdown(drain=True, timeout=120)
        for asked, task in zip(some, tasks, strict=True):
            compare(asked, await task)


def compare(asked: Asked, answer: Any) -> None:
    """Compare an answer with the one that the request got alone."""
    assert same(answer, asked.answer), f"{sorted(asked.features)}: {answer} != {asked.answer}"


@asynccontextmanager
async def serving(
    model: Path, *, processes: bool = False, **settings: Any
) -> AsyncIterator[Served]:
    config = EngineConfig(model=str(model), **(SETTINGS | settings))
    engine = await AsyncEngine.start(config, in_process=not processes, restart=processes)
    try:
        yield Served(engine)
    finally:
        if engine.status != "draining":
            await engine.shutdown(drain=False)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small mixture of experts, and the same one quantised."""
    folder = tmp_path_factory.mktemp("models")
    plain = make_checkpoint(folder / "plain", "qwen3_moe", num_hidden_layers=2)
    (folder / "fp8").mkdir()
    quantized, _ = quantize(plain, folder / "fp8", FORMATS["fp8, blocks"])
    return {"plain": plain, "quantised": quantized}


KNOWN: dict[str, list[Asked]] = {}


async def answered(model: Path, settings: dict[str, Any], *, few: bool) -> list[Asked]:
    """Return requests with the answers that they get alone, from one rank."""
    if (key := f"{model} {settings} {few}") not in KNOWN:
        KNOWN[key] = requests(f"{model.name} {settings}", few=few)
        async with serving(model, prefix_caching=False, **settings) as served:
            for each in KNOWN[key]:
                each.answer = await served.ask(each)
                check(each, each.answer)
                each.tokens = each.answer["usage"]["prompt_tokens"]
    assert len({each.tokens for each in KNOWN[key]}) == len(KNOWN[key])
    return [replace(each, met=set()) for each in KNOWN[key]]


@pytest.mark.parametrize(
    ("model", "settings", "restart"),
    [
        pytest.param(
            *("plain", {}, False),
            marks=[
                pytest.mark.features("cpu", *TOKENS),
                pytest.mark.features("cpu", *VECTORS),
            ],
            id="one rank",
        ),
        pytest.param(
            *("quantised", {"tp": 2, "ep": 2}, False),
            marks=[
                pytest.mark.features("cpu", "tp", "ep", "quantised", *TOKENS),
                pytest.mark.features("cpu", "tp", "ep", "quantised", *VECTORS),
            ],
            id="tp 2, ep 2",
        ),
        pytest.param(
            *("plain", {"cp": 2, "ep": 2}, False),
            marks=[
                pytest.mark.features("cpu", "cp", "ep", *TOKENS),
                pytest.mark.features("cpu", "cp", "ep", *VECTORS),
                pytest.mark.slow,
            ],
            id="cp 2, ep 2",
        ),
        pytest.param(
            *("plain", {"pp": 2, "quantization": "int8"}, False),
            marks=[
                pytest.mark.features("cpu", "pp", "int8", *TOKENS),
                pytest.mark.features("cpu", "pp", "int8", *VECTORS),
                pytest.mark.slow,
            ],
            id="pp 2, int8",
        ),
        pytest.param(
            *("plain", {"dp": 2, "quantization": "int8"}, False),
            marks=[
                pytest.mark.features("cpu", "dp", "int8", *TOKENS),
                pytest.mark.features("cpu", "dp", "int8", *VECTORS),
                pytest.mark.slow,
            ],
            id="dp 2, int8",
        ),
        pytest.param(
            *("quantised", {"dp": 2, "tp": 2}, True),
            marks=[
                pytest.mark.features("dp", "tp", "quantised", "restart", *TOKENS),
                pytest.mark.features("dp", "tp", "quantised", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="dp 2, tp 2",
        ),
        pytest.param(
            *("plain", {"dp": 2, "ep": 2, "quantization": "int8"}, True),
            marks=[
                pytest.mark.features("dp", "ep", "int8", "restart", *TOKENS),
                pytest.mark.features("dp", "ep", "int8", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="dp 2, ep 2",
        ),
        pytest.param(
            *("quantised", {"dp": 2, "cp": 2}, True),
            marks=[
                pytest.mark.features("dp", "cp", "quantised", "restart", *TOKENS),
                pytest.mark.features("dp", "cp", "quantised", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="dp 2, cp 2",
        ),
        pytest.param(
            *("quantised", {"dp": 2, "pp": 2}, True),
            marks=[
                pytest.mark.features("dp", "pp", "quantised", "restart", *TOKENS),
                pytest.mark.features("dp", "pp", "quantised", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="dp 2, pp 2",
        ),
        pytest.param(
            *("quantised", {"nodes": 2, "tp": 2}, False),
            marks=[
                pytest.mark.features("nodes", "cpu", "tp", "quantised", *TOKENS),
                pytest.mark.features("nodes", "cpu", "tp", "quantised", *VECTORS),
                pytest.mark.slow,
            ],
            id="two nodes, tp 2",
        ),
        pytest.param(
            *("plain", {"nodes": 2, "ep": 2, "quantization": "int8"}, False),
            marks=[
                pytest.mark.features("nodes", "cpu", "ep", "int8", *TOKENS),
                pytest.mark.features("nodes", "cpu", "ep", "int8", *VECTORS),
                pytest.mark.slow,
            ],
            id="two nodes, ep 2",
        ),
        pytest.param(
            *("plain", {"nodes": 2, "cp": 2}, False),
            marks=[
                pytest.mark.features("nodes", "cpu", "cp", *TOKENS),
                pytest.mark.features("nodes", "cpu", "cp", *VECTORS),
                pytest.mark.slow,
            ],
            id="two nodes, cp 2",
        ),
        pytest.param(
            *("plain", {"nodes": 2, "pp": 2}, True),
            marks=[
                pytest.mark.features("nodes", "cpu", "pp", "restart", *TOKENS),
                pytest.mark.features("nodes", "cpu", "pp", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="two nodes, pp 2",
        ),
        pytest.param(
            *("quantised", {"kernels": "overlapped", "dp": 2}, True),
            marks=[
                pytest.mark.features(
                    "gpu", "overlapped", "graphs", "dp", "quantised", "restart", *TOKENS
                ),
                pytest.mark.features(
                    "gpu", "overlapped", "graphs", "dp", "quantised", "restart", *VECTORS
                ),
                pytest.mark.slow,
            ],
            id="interpreted, dp 2",
        ),
        pytest.param(
            *(
                "quantised",
                {"kernels": "overlapped", "kv_cache_dtype": "fp8", "dp": 2, "nodes": 2},
                True,
            ),
            marks=[
                pytest.mark.features(
                    "gpu",
                    "fp8_cache",
                    "overlapped",
                    "graphs",
                    "dp",
                    "nodes",
                    "quantised",
                    "restart",
                    *TOKENS,
                ),
                pytest.mark.features(
                    "gpu",
                    "fp8_cache",
                    "overlapped",
                    "graphs",
                    "dp",
                    "nodes",
                    "quantised",
                    "restart",
                    *VECTORS,
                ),
                pytest.mark.slow,
            ],
            id="interpreted, fp8 cache",
        ),
        pytest.param(
            *("quantised", {"backend": "jax", "dp": 2}, True),
            marks=[
                pytest.mark.features("tpu", "dp", "quantised", "restart", *TOKENS),
                pytest.mark.features("tpu", "dp", "quantised", "restart", *VECTORS),
                pytest.mark.slow,
            ],
            id="jax",
        ),
    ],
)
async def test_requests_get_the_answers_that_they_get_alone(
    model: str, settings: dict[str, Any], restart: bool, models: dict[str, Path], tmp_path: Path
) -> None:
    alone = {name: settings[name] for name in NUMERIC & settings.keys()}
    if "kv_cache_dtype" in alone:
        alone["kernels"] = "overlapped"
    asked = await answered(models[model], alone, few="kernels" in settings)  # which are slow
    # A token's keys and values take 2 x 2 layers x 2 heads x 16 numbers on all ranks.
    memory = 24 * BLOCK * 2 * 2 * 2 * 16 * (1 if "kv_cache_dtype" in settings else 4)
    memory //= math.prod(settings.get(name, 1) for name in ("tp", "cp", "pp"))
    with ExitStack() as stack:
        if "nodes" in settings:
            port = free_port()
            stack.enter_context(agent(port, tmp_path / "agent", load_model=LOAD))
            settings = settings | {"node_port": port, "node_token": TOKEN}
        settings = settings | {"kv_cache_memory": memory, "processes": restart}
        async with serving(models[model], **settings) as served:
            await until_all_is_met(served, asked)
            await served.batch(asked, tmp_path)
            if restart:
                await served.restart(asked)
            await served.drain(asked)


async def until_all_is_met(served: Served, asked: list[Asked]) -> None:
    """Repeat rounds, in different orders, until each feature met preemptions and cached prefixes.

    Each KV cache has its copy of the requests. A request that is repeated alone finds its own
    prefix, at the latest on its second engine.
    """
    rng = random.Random(0)
    config = served.engine.config
    copies = asked * (config.dp * config.attention_groups)
    for _ in range(ROUNDS):
        await served.round(rng.sample(copies, len(copies)))
        for each in asked:
            wanted = each.features.intersection(DRAWN) - with_(asked, "prefix_cache")
            if wanted and SCORED not in each.features:
                for _ in range(3):
                    await served.round([each])
        cached, preempted = with_(asked, "prefix_cache"), with_(asked, "preemption")
        assert cached >= set(DRAWN) - {SCORED}
        if preempted >= set(DRAWN):
            return
    pytest.fail(f"never preempted: {sorted(set(DRAWN) - preempted)}")


def with_(asked: list[Asked], met: str) -> set[str]:
    """Return the features that met something."""
    return {feature for each in asked for feature in each.features if met in each.met}
