"""Grammars hold in several engines, through preemptions, and in the rows of a batch file."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import make_checkpoint
from support.engine import FAST, PROMPT, collect, mock_config, params

from weft.errors import EngineError, RequestError
from weft.serving.cli.batch import run
from weft.serving.config.settings import EngineConfig, ServerConfig
from weft.serving.engine import core_client
from weft.serving.engine import engine as engine_module
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.grammar import matcher
from weft.serving.engine.grammar.matcher import GrammarMatchers
from weft.serving.engine.protocol import Compiled
from weft.serving.engine.sampling_params import Grammar, SamplingParams

PATTERN = "[ab]{20}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", "llama")
    return EngineConfig(model=str(path), max_model_len=64, block_size=8, threads=1)


async def texts(engine: AsyncEngine) -> list[str]:
    """Of eight requests at once."""

    async def text(i: int) -> str:
        wish = SamplingParams(grammar=Grammar("regex", PATTERN), temperature=2.0, seed=i)
        prompt = [3 + i % 5, 7, 11, 13] * (1 + i % 4)
        return "".join(
            [delta.text async for delta in engine.generate(engine.validate(prompt, wish))]
        )

    found = await asyncio.gather(*map(text, range(8)))
    assert all(re.fullmatch(PATTERN, each) for each in found), found
    return found


@pytest.mark.features("grammar", "dp")
@pytest.mark.features("grammar", "preemption")
async def test_several_engines_and_preemptions(config: EngineConfig) -> None:
    engine = await AsyncEngine.start(replace(config, dp=2), in_process=True)
    try:
        want = await texts(engine)
        assert all(core.stats.steps for core in engine._supervisor.cores), "each has served some"
    finally:
        await engine.shutdown()
    blocks = 12
    tight = replace(config, kv_cache_memory=blocks * 8 * 2 * 2 * 2 * 16 * 4)
    engine = await AsyncEngine.start(tight, in_process=True)
    try:
        assert await texts(engine) == want
        assert engine.stats.preemptions > 0
    finally:
        await engine.shutdown()


async def test_grammars_that_have_no_room_are_sent_again(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API process knows which grammars the core has dropped; each side has room for one."""
    for module in (core_client, matcher):
        monkeypatch.setattr(module, "ROOM", 1)
    sent: list[int] = []
    keep = GrammarMatchers.keep

    def noted(self: GrammarMatchers, message: Compiled) -> None:
        sent.append(message.size)
        keep(self, message)

    monkeypatch.setattr(GrammarMatchers, "keep", noted)
    engine = await AsyncEngine.start(config, in_process=True)

    async def text(pattern: str) -> str:
        wish = SamplingParams(grammar=Grammar("regex", pattern), temperature=2.0, seed=1)
        return "".join(
            [delta.text async for delta in engine.generate(engine.validate([3, 7, 11], wish))]
        )

    try:
        for pattern in ("a{3}", "a{3}", "(ab){2}", "a{3}"):
            assert re.fullmatch(pattern, await text(pattern))
        assert len(sent) == 3
        patterns = [f"[ab]{{{1 + i % 3}}}" for i in range(9)]
        for _ in range(2):  # as they are compiled, then in turns
            found = await asyncio.gather(*map(text, patterns))
            assert all(map(re.fullmatch, patterns, found))
        assert len(sent) > 3 + 2 * 3
    finally:
        await engine.shutdown()


async def test_what_may_become_of_a_request_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = params(grammar=Grammar("regex", "a*", "regex"))
    mock = mock_config(tmp_path, monkeypatch)
    engine = await AsyncEngine.start(mock, in_process=True, runner_factory=FAST)
    try:
        with pytest.raises(RequestError) as late:  # the compiler's process is not even there
            await collect(engine, PROMPT, wish, deadline=time.monotonic() + 0.01)
        assert (late.value.status, late.value.code) == (504, "request_timeout")
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "LIVE_GRAMMARS", 1)
            with pytest.raises(RequestError) as full:
                await collect(engine, PROMPT, wish)
        assert full.value.status == 429
        assert (full.value.retry_after or 0) >= 1
        other = params(grammar=Grammar("regex", "b*", "regex"))
        compiling = asyncio.create_task(collect(engine, PROMPT, other))
        await asyncio.sleep(0)
    finally:
        await engine.shutdown(drain=True)
    with pytest.raises(EngineError, match="shutting down"):
        await compiling


@pytest.mark.features("grammar", "batches")
def test_rows_of_a_batch(config: EngineConfig, tmp_path: Path) -> None:
    rows = [
        {"prompt": "x", "max_tokens": 60, "guided_regex": PATTERN},
        {"prompt": "x", "max_tokens": 60, "guided_regex": "(a"},
        {"messages": [{"role": "user", "content": "x"}], "guided_choice": ["yes", "no"]},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(config, max_model_len=256)
    assert run(config, ServerConfig(), [source], output) == 0
    lines = {line["index"]: line for line in map(json.loads, output.read_text().splitlines())}
    assert re.fullmatch(PATTERN, lines[0]["text"])
    assert "guided_regex cannot be compiled" in lines[1]["error"]["message"]
    assert lines[2]["text"] in ("yes", "no")
