"""JaxRunner: tokens, steps dispatched ahead, failing rows, prompt scores; against TorchRunner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.steps import Driver, Request
from support.switches import shard_tokens

from weft.models.checkpoint import weights
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import FINITE, NOT_FINITE, DispatchingRunner, ModelRunner
from weft.models.jax.runner import JaxRunner
from weft.models.spec.layout import Layout
from weft.models.torch.runner import TorchRunner

BLOCK_SIZE, NUM_BLOCKS = 4, 64
POISON = 7
"""A token whose embedding is NaN."""

SIZES = {
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 128,
}
MIXED: dict[str, Any] = {
    "temperature": 0.7,
    "seed": 7,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.2,
    "logit_bias": {5: 3.0},
    "min_tokens": 4,
    "end_token_ids": (1, 2, 9999),
    "prompt_token_ids": (9, 10),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with one token that makes NaN of every token that sees it.

    As from damage in memory: in a file it would be found at load, which is switched off here.
    """
    path = make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", norm_topk_prob=True)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_check_finite", lambda tensor, entry: None)
        yield path


@pytest.fixture(scope="module")
def runner(path: Path) -> JaxRunner:
    """A runner on two devices; tests share its cache, and none relies on its contents.

    It shards the tokens in its largest steps.
    """
    told: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        shard_tokens(patch)
        runner = JaxRunner.load(
            *(path, read_spec(path)),
            devices=jax.devices(),
            layout=Layout(tp=2, ep=2),
            progress=lambda done, total: told.append((done, total)),
            **SIZES,
        )
    assert told[-1][0] == told[-1][1]
    runner.allocate_kv_cache(NUM_BLOCKS)
    runner.warm_up()
    return runner


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(POISON + 1, VOCAB_SIZE, length).tolist()


def _driver(runner: ModelRunner) -> Driver:
    if isinstance(runner, JaxRunner) and runner._counter is not None:
        runner._counter.take()  # of other tests
    return Driver(runner, BLOCK_SIZE, NUM_BLOCKS)


def _generate(driver: Driver, request: Request, count: int) -> list[int]:
    driver.step((request, len(request.tokens)))
    for _ in range(count - 1):
        driver.step((request, 1))
    return request.output


def test_torch_and_jax_give_the_same_tokens_and_log_probabilities(
    path: Path, runner: JaxRunner
) -> None:
    """Greedy and with seeds, in chunks among others, with tokens that the host does not know."""
    theirs = TorchRunner.load(path, read_spec(path), threads=1, **SIZES)
    theirs.allocate_kv_cache(NUM_BLOCKS)
    outputs, steps = [], []
    for one in (runner, theirs):
        driver = _driver(one)
        greedy = driver.add(_prompt(11), 32, logprobs=5)
        nucleus = driver.add(_prompt(70, 1), 96, temperature=1.0, seed=5, top_p=0.9, logprobs=0)
        mixed = driver.add(_prompt(9, 2), 32, **MIXED)
        told = [driver.step((greedy, 11), (nucleus, 50), prompt_logprobs=3)]
        told.append(driver.step((greedy, 1), (nucleus, 20), (mixed, 9)))
        for _ in range(12):
            told.append(driver.step((greedy, 1), (nucleus, 1), (mixed, 1), unknown=True))
        outputs.append([greedy.output, nucleus.output, mixed.output])
        steps.append(told)
    assert outputs[0] == outputs[1]
    for ours, torchs in zip(*steps, strict=True):
        for a, b in (
            (ours.logprobs, torchs.logprobs),
            (ours.prompt_logprobs, torchs.prompt_logprobs),
        ):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                np.testing.assert_allclose(a.chosen, b.chosen, atol=1e-4)
                np.testing.assert_allclose(a.top, b.top, atol=1e-4)
                np.testing.assert_array_equal(a.top_ids, b.top_ids)
                np.testing.assert_array_equal(a.rank, b.rank)
        assert ours.token_ids.dtype == ours.status.dtype == np.int32
        assert ours.seconds > 0
        assert ours.compilations == torchs.compilations == 0


def test_a_program_that_is_compiled_in_a_step_is_counted(
    runner: JaxRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = runner._rows

    def compiling(*args: Any) -> Any:
        jax.jit(lambda x: x + 41)(np.zeros(7)).block_until_ready()
        return rows(*args)

    driver = _driver(runner)
    sampled = driver.add(_prompt(5), 12)
    assert driver.step((sampled, 5)).compilations == 0
    monkeypatch.setattr(runner, "_rows", compiling)
    assert driver.step((sampled, 1)).compilations == 1
    monkeypatch.undo()
    assert driver.step((sampled, 1)).compilations == 0


def test_steps_are_dispatched_before_the_last_one_is_read(runner: JaxRunner) -> None:
    """Eight decodes are in flight at once; none has been waited for."""
    expected = _generate(driver := _driver(runner), driver.add(_prompt(6), 20), 9)
    driver = _driver(runner)
    request = driver.add(_prompt(6), 20)
    driver.step((request, 6), unknown=True)
    assert isinstance(runner, DispatchingRunner)
    pending = []
    for _ in range(8):
        pending.append(runner.dispatch(driver._build(((request, 1),), -1)))
        request.done += 1
        request.output.append(-1)
        request.tokens.append(-1 - request.sampling.slot)
    assert [int(finish().token_ids[0]) for finish in pending] == expected[1:]


def test_a_step_that_samples_nothing(runner: JaxRunner) -> None:
    driver = _driver(runner)
    out = driver.step((driver.add(_prompt(9), 12), 5))
    assert out.token_ids.shape == out.status.shape == (0,)
    assert out.logprobs is None
    assert out.prompt_logprobs is None


def test_a_request_that_fails_leaves_the_others_as_they_were(runner: JaxRunner) -> None:
    outputs = []
    for bad_token in (POISON + 1, POISON):
        driver = _driver(runner)
        good, bad, other = (driver.add(_prompt(6, seed), 12, logprobs=5) for seed in range(3))
        bad.tokens[2] = bad_token
        first = driver.step((good, 6), (bad, 6), (other, 6))
        second = driver.step((good, 1), (bad, 1), (other, 1))
        assert bad.status == ([NOT_FINITE] * 2 if bad_token == POISON else [FINITE] * 2)
        assert all(0 <= token < VOCAB_SIZE for token in bad.output)
        assert good.status == other.status == [FINITE] * 2
        scores = [out.logprobs for out in (first, second) if out.logprobs is not None]
        rows = b"".join(score.top[row].tobytes() for score in scores for row in (0, 2))
        outputs.append((good.output, other.output, rows))
        driver.finish(bad)
        again = driver.add(_prompt(6), 12)
        assert set(again.blocks) <= set(bad.blocks)
        assert _generate(driver, again, 2) == good.output
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16(path: Path) -> None:
    runner = JaxRunner.load(
        *(path, read_spec(path)),
        devices=jax.devices(),
        layout=Layout(),
        **(SIZES | {"dtype": "bfloat16", "max_num_batched_tokens": 8}),
    )
    runner.allocate_kv_cache(NUM_BLOCKS)
    runner.warm_up()
    driver = _driver(runner)
    request = driver.add(_prompt(5), 12)
    _generate(driver, request, 3)
    assert request.status == [FINITE] * 3
    assert {leaf.dtype.name for leaf in jax.tree.leaves(runner._params)} == {"bfloat16"}
    assert runner.bytes_per_block == BLOCK_SIZE * read_spec(path).kv_bytes_per_token("bfloat16")
    runner.close()


def test_sums_of_hidden_states(path: Path, runner: JaxRunner) -> None:
    """For one token, for chunks, and for enough tokens that the mesh shards them."""
    theirs = TorchRunner.load(path, read_spec(path), threads=1, **SIZES)
    theirs.allocate_kv_cache(NUM_BLOCKS)
    found: list[list[Any]] = []
    for one in (runner, theirs):
        driver = _driver(one)
        sampled = driver.add(_prompt(5), 12)
        prompts = (_prompt(60, 1), _prompt(6, 2), [3, POISON, 4])
        long, short, bad = pooled = [driver.add(ids, 64) for ids in prompts]
        steps = [
            driver.step((sampled, 5), (long, 50), (short, 5), (bad, 3), pooled=pooled),
            driver.step((sampled, 1), (long, 9), pooled=pooled),
            driver.step((sampled, 1), (short, 1), (long, 1), pooled=pooled),
        ]
        assert len(sampled.output) == 3
        assert not short.output
        found.append([step.pooled for step in steps])
        assert not any(step.compilations for step in steps)
    assert np.isnan(found[0][0][2]).all()
    assert np.isfinite(found[0][0][:2]).all()
    for ours, torchs in zip(*found, strict=True):
        assert ours.dtype == np.float32
        np.testing.assert_allclose(ours, torchs, atol=1e-4)
