"""A real (tiny, random) model from disk to answers, with settings that must not change them."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_checkpoint, make_tokenizer
from support.mock_ranks import RankRunner, batch

from weft.errors import ConfigError, ModelError
from weft.kernels.cpu import native
from weft.models.checkpoint.locate import read_spec
from weft.serving.config.settings import EngineConfig, Replica
from weft.serving.engine.engine import AsyncEngine
from weft.serving.engine.protocol import EngineStats
from weft.serving.engine.sampling_params import SamplingParams
from weft.serving.executor.loading import (
    RankContext,
    SlowRunner,
    _threads,
    check_ranks,
    load_model,
    show_progress,
)

PROMPTS = [[3 + i % 5, 7, 11, 13] * (1 + i % 4) for i in range(8)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")
    make_tokenizer(path)
    return EngineConfig(model=str(path), max_model_len=64, block_size=8, threads=1)


async def answers(config: EngineConfig) -> tuple[list[list[int]], EngineStats]:
    """Answer all prompts at once, twice; every other request is greedy."""
    engine = await AsyncEngine.start(config, in_process=True)

    async def answer(i: int) -> list[int]:
        wish = SamplingParams(max_tokens=24, ignore_eos=True, seed=i, temperature=i % 2)
        return [
            t
            async for delta in engine.generate(engine.validate(PROMPTS[i], wish))
            for t in delta.token_ids
        ]

    found = await asyncio.gather(*map(answer, range(len(PROMPTS))))
    again = await asyncio.gather(*map(answer, range(len(PROMPTS))))
    assert again == found
    stats = engine.stats
    await engine.shutdown()
    return found, stats


async def test_answers_do_not_depend_on_batching_caching_or_preemption(
    config: EngineConfig,
) -> None:
    want, stats = await answers(config)
    assert stats.prefix_hits > 0
    alone = replace(config, prefix_caching=False, max_num_seqs=1)
    in_pieces = replace(config, max_num_batched_tokens=9, block_size=4)
    for other in (alone, in_pieces):
        assert (await answers(other))[0] == want
    blocks = 12
    tight = replace(config, kv_cache_memory=blocks * 8 * 2 * 2 * 2 * 16 * 4)
    found, stats = await answers(tight)
    assert stats.kv_blocks_total == blocks
    assert stats.preemptions > 0
    assert found == want


def test_the_ledger_and_the_progress_are_shown(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    seen: list[tuple[int, int]] = []
    loaded = load_model(config, lambda done, total: seen.append((done, total)))
    model = loaded.info
    assert seen[-1][0] == seen[-1][1] > 0
    assert (model.max_model_len, model.vocab_size, model.dtype) == (64, 320, "float32")
    assert f"{model.num_blocks:,} blocks of 8 tokens" in caplog.text
    loaded.runner.close()


def test_the_cache_gets_the_memory_that_compression_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.supports(torch.bfloat16):
        pytest.skip("no compiled kernels here")
    # With matrix units, oneDNN's products come first, and they are not compressed.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    path = make_checkpoint(tmp_path, "llama", dtype="bfloat16", hidden_size=256, vocab_size=4096)
    config = EngineConfig(
        model=str(path),
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=1024,
        replica=Replica(memory=20 << 20),
    )
    plain, compressed = (
        load_model(replace(config, compress_weights=on), lambda done, total: None)
        for on in (False, True)
    )
    spec = read_spec(path)
    weights = spec.weight_bytes() - 2 * spec.embedding.size  # its rows are read from the file
    gained = compressed.info.num_blocks - plain.info.num_blocks
    each = compressed.runner.bytes_per_block
    assert 0.2 * weights < gained * each < 0.25 * weights, "at most 12 of 16 bits remain"


def test_a_context_above_the_models_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is 513; .* has a context of 512"):
        load_model(replace(config, max_model_len=513), lambda done, total: None)


def test_a_context_of_several_chunks_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama4_text", attention_chunk_size=32)
    config = EngineConfig(model=str(path), max_model_len=33)
    refused = r"--max-model-len is 33; .* has a context of 32 tokens \(attention_chunk_size\)"
    with pytest.raises(ConfigError, match=refused):
        load_model(config, lambda done, total: None)


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint at"):
        load_model(EngineConfig(model=str(tmp_path / "none")), lambda done, total: None)


async def test_the_process_says_what_is_wrong(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        await AsyncEngine.start(replace(config, kv_cache_memory=1))


def test_quick_progress_leaves_no_line_in_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress("loading") as progress:
        progress(1, 2)
        progress(2, 2)
    assert capsys.readouterr().err == ""


def test_slow_progress_says_of_how_much(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serving.executor.loading.LINE_EVERY", 0.0)
    with show_progress("loading") as progress:
        progress(2**9, 2**11)
        progress(2**31, 2**32)
    assert capsys.readouterr().err == "loading: 25% of 2.0 KiB\nloading: 50% of 4.00 GiB\n"


def test_a_slow_runner_says_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    runner = SlowRunner(RankRunner(EngineConfig(), RankContext()))
    runner.warm_up()
    assert "warm after" in caplog.text
    runner.step(batch(1, tokens=5))
    assert "so far" not in caplog.text
    monkeypatch.setattr("weft.serving.executor.loading.LINE_EVERY", 0.0)
    runner.step(batch(2, tokens=3))
    assert "step 2: 8 tokens so far" in caplog.text


def test_ranks_share_the_threads() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [_threads(threads, 1) for threads in (None, 5)] == [None, 5]
    assert [_threads(threads, 2) for threads in (None, 5, 1)] == [max(1, cores // 2), 2, 1]


def test_overlapped_kernels_on_amd_need_a_newer_triton(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("triton.__version__", "3.7.1")
    with pytest.raises(ConfigError) as caught:
        check_ranks(replace(config, kernels="overlapped"))
    assert str(caught.value) == (
        "--kernels is overlapped; AMD's GPUs need Triton 3.8 or newer; 3.7.1 is installed"
    )
    monkeypatch.setattr("triton.__version__", "3.8.0")
    check_ranks(replace(config, kernels="overlapped"))
