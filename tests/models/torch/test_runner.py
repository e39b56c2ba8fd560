"""TorchRunner: tokens, unknown tokens, failing rows, prompt scores, and its cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.checkpoints import VOCAB_SIZE, make_checkpoint
from support.kernels import compiled_kernels
from support.steps import Driver, Request

from weft.models.checkpoint import weights
from weft.models.checkpoint.locate import read_spec
from weft.models.interface import FINITE, NOT_FINITE, ModelRunner
from weft.models.spec.layout import WHOLE
from weft.models.torch.cpu_model import CpuModel
from weft.models.torch.pipe import Pipe
from weft.models.torch.runner import PROMPT_LOGPROB_ROWS, TorchRunner

BLOCK_SIZE, NUM_BLOCKS = 4, 64
POISON = 7
"""A token whose embedding is NaN in the `poisoned` checkpoint."""


def _load(path: Path, **overrides: Any) -> TorchRunner:
    sizes = {
        "dtype": "auto",
        "block_size": BLOCK_SIZE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "max_model_len": 256,
        "threads": 1,
    }
    runner = TorchRunner.load(path, read_spec(path), **(sizes | overrides))
    runner.allocate_kv_cache(NUM_BLOCKS)
    return runner


def _driver(runner: ModelRunner) -> Driver:
    return Driver(runner, BLOCK_SIZE, NUM_BLOCKS)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(POISON + 1, VOCAB_SIZE, length).tolist()


def _generate(driver: Driver, request: Request, count: int, **options: Any) -> list[int]:
    """Prefill, then decode one token at a time."""
    driver.step((request, len(request.tokens)), **options)
    for _ in range(count - 1):
        driver.step((request, 1), **options)
    return request.output


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def runner(path: Path) -> ModelRunner:
    """A runner for it; tests share its cache, and none relies on its contents."""
    return _load(path)


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with one token that makes NaN of every token that sees it.

    As from damage in memory: in a file it would be found at load, which is switched off here.
    """
    path = make_checkpoint(tmp_path_factory.mktemp("poisoned"), "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_check_finite", lambda tensor, entry: None)
        yield path


def test_a_step_does_not_count_what_it_waits_for_other_stages(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, pipe, call = _load(path), Pipe(WHOLE), CpuModel.__call__

    def wait(model: CpuModel, *args: Any) -> torch.Tensor:
        pipe._waited += 1000.0
        return call(model, *args)

    monkeypatch.setattr(runner, "_pipe", pipe)
    monkeypatch.setattr(CpuModel, "__call__", wait)
    driver = _driver(runner)
    output = driver.step((driver.add(_prompt(5), 8), 5))
    assert -1000.0 < output.seconds < -900.0


def test_greedy_tokens_are_those_of_transformers(path: Path, runner: ModelRunner) -> None:
    from transformers import AutoModelForCausalLM

    prompt = _prompt(11)
    driver = _driver(runner)
    tokens = _generate(driver, driver.add(prompt, 31), 20)
    model = AutoModelForCausalLM.from_pretrained(path)
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None
    )
    assert tokens == expected[0, len(prompt) :].tolist()


def test_unknown_tokens_are_those_sampled_last(runner: ModelRunner) -> None:
    tokens = []
    for unknown in (False, True):
        driver = _driver(runner)
        requests = [driver.add(_prompt(6, seed), 20) for seed in range(3)]
        for request in requests:
            driver.step((request, 6), unknown=unknown)
        for _ in range(8):
            driver.step(*((request, 1) for request in requests), unknown=unknown)
        tokens.append([request.output for request in requests])
    assert tokens[0] == tokens[1]


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_tokens_do_not_depend_on_how_steps_are_cut(
    runner: ModelRunner, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 24), min_size=1, max_size=5), label="lengths")
    driver = _driver(runner)
    requests = [driver.add(_prompt(length, i), length + 4) for i, length in enumerate(lengths)]
    while unfinished := [request for request in requests if len(request.output) < 4]:
        chosen = data.draw(
            st.lists(st.sampled_from(range(len(unfinished))), min_size=1, unique=True),
            label="requests",
        )
        left = [len(unfinished[i].tokens) - unfinished[i].done for i in chosen]
        sizes = [data.draw(st.integers(1, most), label="tokens") for most in left]
        driver.step(*((unfinished[i], size) for i, size in zip(chosen, sizes, strict=True)))
    for i, request in enumerate(requests):
        alone = _driver(runner)
        assert request.output == _generate(alone, alone.add(_prompt(lengths[i], i), 40), 4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_compiled_kernels_give_the_same_bits_however_steps_are_cut(
    tmp_path: Path, family: str
) -> None:
    """Alone and at once, or in chunks among others: bfloat16 logprobs agree bit by bit."""
    with compiled_kernels(True):
        runner = _load(make_checkpoint(tmp_path, family), dtype="bfloat16")
        alone, among = _driver(runner), _driver(runner)
        one = alone.add(_prompt(30), 40, logprobs=2)
        expected = [alone.step((one, size)).logprobs for size in (30, 1, 1, 1, 1)]

        other = among.add(_prompt(30), 40, logprobs=2)
        company = [among.add(_prompt(n, n), n + 10) for n in (3, 25, 14)]
        among.step((company[0], 3), (other, 11), (company[1], 20))
        among.step((other, 1), (company[1], 5))
        got = [among.step((company[2], 14), (company[0], 1), (other, 18)).logprobs]
        got.append(among.step((other, 1)).logprobs)
        for size in (2, 3, 1):
            got.append(among.step(*((r, 1) for r in company[:size]), (other, 1)).logprobs)
    assert other.output == one.output
    for mine, theirs in zip(expected, got, strict=True):
        assert mine is not None
        assert theirs is not None
        np.testing.assert_array_equal(mine.top[-1], theirs.top[-1])
        np.testing.assert_array_equal(mine.chosen[-1], theirs.chosen[-1])


def test_a_step_that_samples_nothing(runner: ModelRunner) -> None:
    driver = _driver(runner)
    out = driver.step((driver.add(_prompt(9), 12), 5))
    assert out.token_ids.dtype == np.int32
    assert out.token_ids.shape == out.status.shape == (0,)
    assert out.logprobs is None
    assert out.prompt_logprobs is None
    assert out.seconds > 0


def test_what_comes_back_is_of_the_types_agreed(runner: ModelRunner) -> None:
    driver = _driver(runner)
    plain, scored = driver.add(_prompt(3), 8), driver.add(_prompt(4, 1), 8, logprobs=2)
    out = driver.step((plain, 3), (scored, 4))
    assert out.token_ids.dtype == out.status.dtype == np.int32
    assert out.status.tolist() == [FINITE, FINITE]
    assert out.logprobs is not None
    assert out.logprobs.top.shape == (2, 2)
    assert out.logprobs.top_ids[1, 0] == out.token_ids[1]


@pytest.mark.parametrize("length", [2, PROMPT_LOGPROB_ROWS + 1, PROMPT_LOGPROB_ROWS + 20])
def test_prompt_logprobs_are_those_of_transformers(
    path: Path, runner: ModelRunner, length: int
) -> None:
    from transformers import AutoModelForCausalLM

    prompt = _prompt(length)
    driver = _driver(runner)
    scores = driver.step((driver.add(prompt, 100), length), prompt_logprobs=3).prompt_logprobs
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert scores is not None
    chosen = expected[torch.arange(length - 1), torch.tensor(prompt[1:])]
    np.testing.assert_allclose(scores.chosen, chosen, atol=1e-4)
    best = expected.topk(3)
    np.testing.assert_allclose(scores.top, best.values, atol=1e-4)
    np.testing.assert_array_equal(scores.top_ids, best.indices)
    np.testing.assert_array_equal(scores.rank, 1 + (expected > chosen[:, None]).sum(-1))


def test_prompt_logprobs_across_chunks(runner: ModelRunner) -> None:
    prompt = _prompt(20)
    driver = _driver(runner)
    whole, cut = driver.add(prompt, 24), driver.add(prompt, 24)
    expected = driver.step((whole, 20), prompt_logprobs=0).prompt_logprobs
    parts = [driver.step((cut, size), prompt_logprobs=0).prompt_logprobs for size in (7, 1, 12)]
    assert expected is not None
    actual = np.concatenate([part.chosen for part in parts if part is not None])
    np.testing.assert_allclose(actual, expected.chosen, atol=1e-5)


def test_a_request_that_fails_leaves_the_others_as_they_were(poisoned: Path) -> None:
    outputs = []
    for bad_token in (POISON + 1, POISON):
        driver = _driver(_load(poisoned))
        good, bad, other = (driver.add(_prompt(6, seed), 12, logprobs=5) for seed in range(3))
        bad.tokens[2] = bad_token
        first = driver.step((good, 6), (bad, 6), (other, 6))
        second = driver.step((good, 1), (bad, 1), (other, 1))
        failed = [NOT_FINITE] * 2 if bad_token == POISON else [FINITE] * 2
        assert bad.status == failed
        assert all(0 <= token < VOCAB_SIZE for token in bad.output)
        assert good.status == other.status == [FINITE] * 2
        scores = [out.logprobs for out in (first, second) if out.logprobs is not None]
        outputs.append(
            (
                good.output,
                other.output,
                b"".join(score.top[row].tobytes() for score in scores for row in (0, 2)),
            )
        )
    assert outputs[0] == outputs[1]


def test_blocks_of_a_failed_request_can_be_used_again(poisoned: Path) -> None:
    driver = _driver(_load(poisoned))
    bad = driver.add([POISON] * 9, 12)
    driver.step((bad, 9))
    assert bad.status == [NOT_FINITE]
    driver.finish(bad)
    good = driver.add(_prompt(6), 12)
    assert set(good.blocks) <= set(bad.blocks)
    tokens = _generate(driver, good, 4)
    fresh = _driver(_load(poisoned))
    assert tokens == _generate(fresh, fresh.add(_prompt(6), 12), 4)
    assert good.status == [FINITE] * 4


@pytest.mark.parametrize(
    ("stored", "asked", "used"),
    [
        ("float32", "auto", torch.float32),
        ("bfloat16", "auto", torch.bfloat16),
        ("float16", "auto", torch.bfloat16),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_the_type_to_compute_in(tmp_path: Path, stored: str, asked: str, used: torch.dtype) -> None:
    path = make_checkpoint(tmp_path, "qwen2", dtype=stored, tie_word_embeddings=True)
    spec, runner = read_spec(path), _load(path, dtype=asked)
    assert runner.bytes_per_block == BLOCK_SIZE * spec.kv_bytes_per_token(asked)
    assert runner.bytes_per_block == 2 * 2 * BLOCK_SIZE * 2 * 16 * used.itemsize
    driver = _driver(runner)
    request = driver.add(_prompt(5), 12)
    _generate(driver, request, 3)
    assert request.status == [FINITE] * 3


@pytest.mark.parametrize("limits", [{}, {"block_size": 1}, {"max_model_len": 1}])
def test_warming_up_leaves_no_trace(path: Path, limits: dict[str, int]) -> None:
    runner = _load(path, **limits)
    runner.warm_up()
    if not limits:
        driver, cold = _driver(runner), _driver(_load(path))
        assert _generate(driver, driver.add(_prompt(9), 16), 5) == _generate(
            cold, cold.add(_prompt(9), 16), 5
        )


@pytest.mark.parametrize(("rounded", "tolerance"), [("int8", 0.1), ("int4", 1.0)])
def test_rounded_weights_give_nearly_the_same_probabilities(
    rounded: str, tolerance: float, path: Path
) -> None:
    prompt = _prompt(40)
    chosen = []
    for quantization in ("none", rounded):
        driver = _driver(_load(path, quantization=quantization))
        scores = driver.step((driver.add(prompt, 41), 40), prompt_logprobs=0).prompt_logprobs
        assert scores is not None
        chosen.append(scores.chosen)
    assert not np.array_equal(*chosen)
    np.testing.assert_allclose(*chosen, atol=tolerance)


def test_loading_reports_progress(path: Path) -> None:
    calls: list[tuple[int, int]] = []
    _load(path, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (read_spec(path).weight_bytes(),) * 2


def test_closing_releases_the_weights(path: Path) -> None:
    runner = _load(path)
    runner.warm_up()
    model = weakref.ref(runner._model)
    runner.close()
    gc.collect()
    assert model() is None


def test_sums_of_hidden_states(poisoned: Path) -> None:
    """In chunks, beside a sampled request; non-finite numbers stay in their own sum."""
    from transformers import AutoModel

    prompts = [_prompt(9, 1), _prompt(6, 2), [3, POISON, 4]]
    model = AutoModel.from_pretrained(poisoned)
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    driver = _driver(_load(poisoned))
    one, two, bad = pooled = [driver.add(ids, 12) for ids in prompts]
    sampled = driver.add(_prompt(5), 12)
    first = driver.step((sampled, 3), (one, 4), (bad, 3), pooled=pooled)
    second = driver.step((sampled, 2), (one, 5), (two, 6), pooled=pooled)
    third = driver.step((sampled, 1))
    assert [len(request.output) for request in (*pooled, sampled)] == [0, 0, 0, 2]
    assert first.pooled.dtype == np.float32
    np.testing.assert_allclose(first.pooled[0], states[0][:4].sum(0), atol=1e-4)
    assert np.isnan(first.pooled[1]).all()
    np.testing.assert_allclose(second.pooled[0], states[0][4:].sum(0), atol=1e-4)
    np.testing.assert_allclose(second.pooled[1], states[1].sum(0), atol=1e-4)
    assert not third.pooled.size
