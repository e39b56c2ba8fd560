"""Sampling on devices equals models/torch/sampler.py, row by row and draw by draw."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.models.interface import FINITE, NO_MASK, NOT_FINITE, SlotSampling, StepInput
from weft.models.jax import draw
from weft.models.jax.sampler import (
    MAX_TOP,
    Sampled,
    Settings,
    State,
    sample,
    set_masks,
    set_slot,
)
from weft.models.torch import draw as torch_draw
from weft.models.torch.draw import uniform
from weft.models.torch.logits import Logits
from weft.models.torch.sampler import Masks, SampledTokens, Sampler

ROWS, VOCAB = 8, 400

jitted, jitted_set_slot, jitted_set_masks = map(jax.jit, (sample, set_slot, set_masks))
jitted_share = jax.jit(
    lambda high, low, total: draw.share_of(draw.number_of(high, low), total),
)


def empty_state() -> State:
    marks = np.zeros((ROWS, VOCAB), np.int32)
    mask = np.zeros((ROWS, -(-VOCAB // 32)), np.int32)
    return State(np.zeros(ROWS, np.int32), marks, marks.astype(np.float32), mask)


def on_devices(
    logits: np.ndarray[Any, Any],
    slots: list[SlotSampling],
    index: list[int],
    masks: Masks | None = None,
) -> tuple[Sampled, State]:
    """Sample one row per slot, with fresh state."""
    settings = Settings(VOCAB, VOCAB, ROWS)
    state = empty_state()
    with jax.enable_x64(True):
        for slot in slots:
            if (marks := settings.set_slot(slot)) is not None:
                state = jitted_set_slot(state, np.int32(slot.slot), *marks)
        batch = _batch(len(slots), index, masks)
        for some, masked in settings.masks(batch):
            state = jitted_set_masks(state, some, masked)
        rows = settings.rows(batch, ROWS)
        padded = np.zeros((ROWS, VOCAB), logits.dtype)
        padded[: len(logits)] = logits
        return jitted(padded, rows, state)


def on_torch(
    logits: np.ndarray[Any, Any],
    slots: list[SlotSampling],
    index: list[int],
    masks: Masks | None = None,
) -> SampledTokens:
    sampler = Sampler(VOCAB, ROWS)
    sampler.set_slots(tuple(slots))
    slot = torch.arange(len(slots))
    return sampler.sample(Logits.whole(torch.tensor(logits)), slot, torch.tensor(index), masks)


def _batch(count: int, index: list[int], masks: Masks | None = None) -> StepInput:
    return StepInput(
        step=0,
        **dict.fromkeys(
            (
                "token_ids",
                "positions",
                "query_start",
                "context_len",
                "block_table",
                "slot",
                "sample_index",
            ),
            np.zeros(0, np.int32),
        ),
        sample_slot=np.arange(count, dtype=np.int32),
        output_index=np.array(index, np.int32),
        masked=np.array([] if masks is None else masks.rows, np.int32),
        token_mask=NO_MASK if masks is None else masks.bits.numpy(),
    )


slot_settings = st.builds(
    SlotSampling,
    slot=st.just(0),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 600]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 1e-30]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.25]),
    logit_bias=st.sampled_from([{}, {7: 5.0, 350: -100.0}]),
    min_tokens=st.sampled_from([0, 5]),
    end_token_ids=st.sampled_from([(), (3, 9, 10**6)]),
    logprobs=st.sampled_from([-1, 0, 4]),
    prompt_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=9),
    output_token_ids=st.lists(st.integers(0, 20), min_size=3, max_size=3),
)


@settings(max_examples=30, deadline=None)
@given(
    slots=st.lists(slot_settings, min_size=1, max_size=ROWS),
    data=st.integers(0, 2**31),
    ties=st.booleans(),
    masked=st.sets(st.integers(0, ROWS - 1)),
)
def test_rows_are_sampled_as_by_torch(
    slots: list[SlotSampling], data: int, ties: bool, masked: set[int]
) -> None:
    random = np.random.default_rng(data)
    logits = (random.standard_normal((len(slots), VOCAB)) * 3).astype(np.float32)
    if ties:
        logits = np.round(logits * 4) / 4
    slots = [replace(slot, slot=i) for i, slot in enumerate(slots)]
    index = [3 for _ in slots]
    rows = sorted(row for row in masked if row < len(slots))
    bits = random.integers(-(2**31), 2**31, (len(rows), -(-VOCAB // 32)), np.int32)
    masks = Masks(rows, torch.tensor(bits)) if rows else None
    ours, state = on_devices(logits, slots, index, masks)
    theirs = on_torch(logits, slots, index, masks)
    count = len(slots)
    assert np.asarray(ours.token_ids)[:count].tolist() == theirs.token_ids.tolist()
    assert np.asarray(ours.status)[:count].tolist() == [FINITE] * count
    assert np.asarray(state.newest)[:count].tolist() == theirs.token_ids.tolist()
    asked = [i for i, slot in enumerate(slots) if slot.logprobs >= 0]
    assert (theirs.logprobs is not None) == bool(asked)
    if theirs.logprobs is not None:
        top = theirs.logprobs.top.shape[1]
        scores = [np.asarray(part)[asked] for part in ours.scores]
        np.testing.assert_allclose(scores[0], theirs.logprobs.chosen[asked], atol=1e-5)
        np.testing.assert_array_equal(scores[1], theirs.logprobs.rank[asked])
        np.testing.assert_allclose(scores[3][:, :top], theirs.logprobs.top[asked], atol=1e-5)


def test_penalties_see_what_was_sampled_before() -> None:
    """A sampled token is less likely in the next step, without the host's help."""
    slot = SlotSampling(0, frequency_penalty=2.0)
    settings = Settings(VOCAB, VOCAB, ROWS)
    marks = settings.set_slot(slot)
    assert marks is not None
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[0, :3] = 3.0, 2.5, 1.5
    state = empty_state()
    tokens = []
    with jax.enable_x64(True):
        state = jitted_set_slot(state, np.int32(0), *marks)
        for i in range(5):
            out, state = jitted(logits, settings.rows(_batch(1, [i]), ROWS), state)
            tokens.append(int(out.token_ids[0]))
    assert tokens == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_fail_alone(temperature: float) -> None:
    logits = np.random.default_rng(0).standard_normal((5, VOCAB)).astype(np.float32)
    slots = [SlotSampling(i, temperature=temperature, seed=i) for i in range(5)]
    expected, _ = on_devices(logits, slots, [0] * 5)
    broken = logits.copy()
    broken[1, 7], broken[2], broken[3, 9] = np.nan, -np.inf, np.inf
    actual, _ = on_devices(broken, slots, [0] * 5)
    assert np.asarray(actual.status)[:5].tolist() == [FINITE, *[NOT_FINITE] * 3, FINITE]
    for row in (0, 4):
        assert int(actual.token_ids[row]) == int(expected.token_ids[row])
    assert all(0 <= token < VOCAB for token in np.asarray(actual.token_ids).tolist())


def test_uniform_numbers_are_those_of_torch() -> None:
    seeds, index = [0, -1, 5, 2**63, 2**64 - 1, -(2**63)], [0, 1, 2, 1000, 2**31 - 1, 7]
    ours = draw.uniform(np.array([seed % 2**64 for seed in seeds], np.uint64), np.array(index))
    np.testing.assert_array_equal(ours * 2.0**-48, uniform(seeds, index).numpy())


@given(st.integers(0, draw.ONE), st.integers(0, 2**63 - 1))
def test_shares_are_exact(share: int, total: int) -> None:
    """Without float64, which TPUs lack."""
    with jax.enable_x64(True):
        high, low = draw.digits_of(np.array([share], np.uint64))
        ours = jitted_share(high, low, np.array([total]))
    theirs = torch_draw.share_of(torch.tensor([share]), torch.tensor([total]))
    assert ours.tolist() == theirs.tolist() == [share * total >> 48]


def test_a_tpu_has_all_types() -> None:
    settings = Settings(VOCAB, VOCAB, ROWS)
    with jax.enable_x64(True):
        rows = settings.rows(_batch(ROWS, [0] * ROWS), ROWS)
        text = jitted.lower(np.zeros((ROWS, VOCAB), np.float32), rows, empty_state()).as_text()
    assert "xi64>" in text
    assert "xf64>" not in text  # Python numbers are, and are folded


def test_too_many_log_probabilities_are_refused() -> None:
    with pytest.raises(ValueError, match=f"logprobs is 21; it must be at most {MAX_TOP}"):
        Settings(VOCAB, VOCAB, ROWS).set_slot(SlotSampling(0, logprobs=21))
