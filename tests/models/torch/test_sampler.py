"""The sampler against its oracle, transformers' processors, and its own promises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import compiled_kernels
from torch import Tensor
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from weft.kernels.reference import sampling_distribution
from weft.models.interface import FINITE, NOT_FINITE, SlotSampling
from weft.models.torch import draw as draw_module
from weft.models.torch import sampler as sampler_module
from weft.models.torch.draw import uniform
from weft.models.torch.logits import Logits
from weft.models.torch.sampler import Masks, SampledTokens, Sampler, score

SHAPES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 2},
    {"temperature": 1.7, "top_k": 5},
    {"top_k": 1},
    {"top_p": 0.7},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"temperature": 1.3, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 10**9, "top_p": 0.999999},
]


def run(
    logits: Tensor,
    slots: list[SlotSampling],
    output_index: list[int] | None = None,
    masks: Masks | None = None,
) -> SampledTokens:
    """Sample one row per slot with a fresh sampler."""
    sampler = Sampler(logits.shape[1], len(slots))
    slots = [replace(s, slot=i) for i, s in enumerate(slots)]
    sampler.set_slots(tuple(slots))
    index = torch.tensor(output_index or [0] * len(slots))
    return sampler.sample(Logits.whole(logits), torch.arange(len(slots)), index, masks)


def mask_of(rows: dict[int, list[int]], vocab_size: int) -> Masks:
    """Make masks from a map of rows to their allowed tokens."""
    allowed = np.zeros((len(rows), -(-vocab_size // 32) * 32), np.uint8)
    for mask, tokens in zip(allowed, rows.values(), strict=True):
        mask[tokens] = 1
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return Masks(list(rows), torch.tensor(bits))


def expected_token(logits: Tensor, slot: SlotSampling, index: int) -> set[int]:
    """Return the oracle's token for the row's random number, allowing for rounding."""
    cdf = sampling_distribution(
        logits,
        temperature=slot.temperature,
        top_k=slot.top_k,
        top_p=slot.top_p,
        min_p=slot.min_p,
    ).cumsum(0)
    u = uniform([slot.seed], [index]).item()
    ends = torch.tensor([u - 1e-6, u, u + 1e-6], dtype=torch.float64).clamp(0, 1 - 1e-12)
    return set(torch.searchsorted(cdf, ends, right=True).tolist())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_frequencies_follow_the_oracle(shape: dict[str, Any]) -> None:
    draws = 20_000
    row = torch.randn(60, generator=torch.Generator().manual_seed(5)) * 2
    slots = [SlotSampling(i, seed=i, **{"temperature": 1.0, **shape}) for i in range(draws)]
    counts = np.bincount(run(row.expand(draws, -1), slots).token_ids, minlength=60)
    probs = sampling_distribution(row, **shape).numpy()
    assert counts[probs == 0].sum() == 0
    # Rare tokens are pooled, because the statistic needs five expected draws per cell.
    rare = probs * draws < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    want = np.append(probs[~rare], probs[rare].sum()) * draws
    seen, want = seen[want > 0], want[want > 0]
    statistic = ((seen - want) ** 2 / want).sum()
    freedom = len(want) - 1
    # Mean + 5 standard deviations of chi-square.
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5


slot_settings = st.builds(
    SlotSampling,
    slot=st.just(0),
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3, 40, 600, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.lists(slot_settings, min_size=1, max_size=6),
    vocab=st.sampled_from([1, 2, 511, 512, 1500]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    data=st.integers(0, 2**31),
    first=st.integers(0, 1000),
)
def test_each_row_is_the_inverse_cdf_of_the_oracle(
    slots: list[SlotSampling], vocab: int, dtype: torch.dtype, data: int, first: int
) -> None:
    # bfloat16 makes ties, also at the k-th token.
    generator = torch.Generator().manual_seed(data)
    logits = (torch.randn(len(slots), vocab, generator=generator) * 3).to(dtype)
    index = [first + i for i in range(len(slots))]
    out = run(logits, slots, index)
    for i, slot in enumerate(slots):
        assert int(out.token_ids[i]) in expected_token(logits[i].float(), slot, index[i])
    assert out.status.tolist() == [FINITE] * len(slots)
    assert out.logprobs is None


@settings(max_examples=40, deadline=None)
@given(
    slots=st.lists(slot_settings, min_size=2, max_size=8),
    data=st.integers(0, 2**31),
    order=st.randoms(use_true_random=False),
)
def test_a_row_does_not_depend_on_its_batch(
    slots: list[SlotSampling], data: int, order: Any
) -> None:
    generator = torch.Generator().manual_seed(data)
    logits = (torch.randn(len(slots), 3000, generator=generator) * 2).bfloat16()
    together = run(logits, slots).token_ids.tolist()
    shuffled = list(range(len(slots)))
    order.shuffle(shuffled)
    moved = run(logits[shuffled], [slots[i] for i in shuffled]).token_ids.tolist()
    assert moved == [together[i] for i in shuffled]
    alone = [int(run(logits[i : i + 1], slots[i : i + 1]).token_ids) for i in range(len(slots))]
    assert alone == together


@settings(max_examples=60, deadline=None)
@given(
    share=st.floats(0.0, 1.0, exclude_min=True),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 8.0, 1e30]),
    columns=st.sampled_from([1, 300, 5000]),
    seed=st.integers(0, 2**31),
)
def test_floors(share: float, spread: float, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = -torch.randn(3, columns, generator=generator).abs() * spread
    x[1] = x[1].round()
    x[2, ::3] = -torch.inf
    mass = torch.randint(0, 1 << 40, x.shape, generator=generator)
    mass[:, 0] += 1
    targets = (mass.sum(-1) * share).ceil().long().clamp(min=1).minimum(mass.sum(-1))
    ordered, order = x.sort(dim=-1, descending=True)
    nth = torch.searchsorted(mass.gather(1, order).cumsum(-1), targets[:, None])
    want = ordered.gather(1, nth).flatten()
    assert torch.equal(draw_module._floors(x, mass, targets, Logits.whole(x)), want)


def test_ties_at_the_kth_token_beyond_the_cut_are_all_kept() -> None:
    logits = torch.zeros(1, 5000)
    tokens = {
        int(run(logits, [SlotSampling(0, temperature=1.0, top_k=3, seed=s)]).token_ids)
        for s in range(50)
    }
    assert len(tokens) > 40


def test_rows_of_every_kind_in_one_batch() -> None:
    """A row with more ties than its cut is drawn after the others, and its token stays the same."""
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(8))
    logits[0] = 0.0
    logits[4] = logits[4].round()
    kinds = [{"top_k": 3}, {}, {"top_k": 300}, {"top_k": 4000}, {"top_k": 20}, {"top_k": 40}]
    slots = [
        SlotSampling(i, temperature=1.0, seed=i, **kind)  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    out = run(logits, slots)
    for i, slot in enumerate(slots):
        assert int(out.token_ids[i]) in expected_token(logits[i], slot, 0)


def test_seed_and_index_name_the_number() -> None:
    # SplitMix64's published first outputs for seed 0: the finaliser of 1, 2, 3 x gamma.
    gamma = torch.tensor([1, 2, 3]) * draw_module._SPLITMIX_GAMMA
    assert [hex(z % 2**64) for z in draw_module._mix(gamma).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
    assert uniform([3], [5]) == uniform([9, 3], [0, 5])[1]
    assert uniform([-1], [0]) == uniform([2**64 - 1], [0])
    numbers = torch.stack([uniform([seed] * 500, range(500)) for seed in range(40)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert len(numbers.unique()) == numbers.numel()
    assert abs(numbers.mean() - 0.5) < 0.01
    # Numbers are uncorrelated, along a stream and across seeds.
    for a, b in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.03


PROMPT = [3, 3, 8, 1]
OUTPUT = [8, 5, 5, 5, 2]


def penalised(logits: Tensor, **penalties: Any) -> Tensor:
    """Return the logits after processing a request with PROMPT and OUTPUT."""
    sampler = Sampler(logits.shape[1], 2)
    slot = SlotSampling(
        1, prompt_token_ids=tuple(PROMPT), output_token_ids=tuple(OUTPUT), **penalties
    )
    sampler.set_slots((slot,))
    out = logits.clone()
    edits = sampler._edits(range(logits.shape[1]), [slot], [len(OUTPUT)])
    edits.apply(out.view(-1), edits.columns)
    return out


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    oracle = RepetitionPenaltyLogitsProcessor(penalty=1.4)(
        torch.tensor([PROMPT + OUTPUT]), logits.clone()
    )
    torch.testing.assert_close(penalised(logits, repetition_penalty=1.4), oracle)


def test_presence_and_frequency_count_the_output_only() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    got = penalised(logits, presence_penalty=0.5, frequency_penalty=0.25)
    for token in range(12):
        count = OUTPUT.count(token)
        want = logits[0, token] - 0.5 * (count > 0) - 0.25 * count
        torch.testing.assert_close(got[0, token], want)


def test_repetition_comes_before_the_others() -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(2))
    got = penalised(logits, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.25)
    repeated = penalised(logits, repetition_penalty=1.4)
    want = repeated - logits + penalised(logits, presence_penalty=0.5, frequency_penalty=0.25)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("width", [0, 300], ids=["short", "longer than the first buffer"])
def test_history_follows_the_sampled_tokens(width: int) -> None:
    """A penalised request samples the same tokens as with its full history sent again."""
    generator = torch.Generator().manual_seed(4)
    slot = SlotSampling(
        1,
        temperature=0.8,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=11,
        prompt_token_ids=tuple(range(width)),
    )
    sampler = Sampler(400, 3)
    sampler.set_slots((SlotSampling(0, temperature=1.0), slot))
    produced: list[int] = []
    for step in range(30):
        logits = torch.randn(2, 400, generator=generator)
        token = sampler.sample(
            Logits.whole(logits), torch.tensor([0, 1]), torch.tensor([9, step])
        ).token_ids[1]
        resumed = Sampler(400, 3)
        resumed.set_slots((replace(slot, slot=2, output_token_ids=tuple(produced)),))
        again = resumed.sample(
            Logits.whole(logits[1:]), torch.tensor([2]), torch.tensor([step])
        ).token_ids[0]
        assert token == again
        produced.append(int(token))


def test_without_penalties_nothing_is_remembered() -> None:
    sampler = Sampler(100, 4)
    sampler.set_slots((SlotSampling(0, temperature=1.0, prompt_token_ids=(1, 2)),))
    sampler.sample(Logits.whole(torch.randn(1, 100)), torch.tensor([0]), torch.tensor([0]))
    assert sampler._history.numel() == 0


@pytest.mark.parametrize(
    ("warper", "shape"),
    [
        (TopKLogitsWarper(7), {"top_k": 7}),
        (TopPLogitsWarper(0.6), {"top_p": 0.6}),
        (MinPLogitsWarper(0.15), {"min_p": 0.15}),
    ],
)
def test_the_tokens_kept_are_those_of_transformers(warper: Any, shape: dict[str, Any]) -> None:
    row = torch.randn(1, 40, generator=torch.Generator().manual_seed(3)) * 1.5
    kept = warper(torch.zeros(1, 0, dtype=torch.long), row.clone()).isfinite()[0]
    slots = [SlotSampling(i, temperature=1.0, seed=i, **shape) for i in range(5000)]
    seen = torch.zeros(40, dtype=torch.bool)
    seen[run(row.expand(5000, -1), slots).token_ids] = True
    assert seen.tolist() == kept.tolist()


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3))
    ends = logits[0].topk(3).indices.tolist()
    oracle = MinNewTokensLengthLogitsProcessor(0, 4, ends, device="cpu")
    slot = SlotSampling(0, min_tokens=4, end_token_ids=(*ends, 20, -1))
    for index in range(6):
        want = oracle(torch.zeros(1, index, dtype=torch.long), logits).argmax()
        assert run(logits, [slot], [index]).token_ids == want


def test_suppressing_every_token_hurts_nobody() -> None:
    logits = torch.randn(2, 20)
    slots = [
        SlotSampling(0, temperature=1.0, min_tokens=4, end_token_ids=tuple(range(20))),
        SlotSampling(0),
    ]
    out = run(logits, slots)
    assert 0 <= out.token_ids[0] < 20
    assert out.token_ids[1] == logits[1].argmax()


def test_logit_bias() -> None:
    logits = torch.randn(3, 20)
    slots = [SlotSampling(0, logit_bias={4: 100.0, 5: -100.0}), SlotSampling(0), SlotSampling(0)]
    before = logits.clone()
    assert run(logits, slots).token_ids.tolist() == [4, *logits[1:].argmax(-1).tolist()]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_broken_row_fails_alone(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 700).to(dtype)
    slots = [SlotSampling(0, temperature=float(i % 2), top_k=3 * (i > 3), seed=i) for i in range(6)]
    clean = run(logits, slots).token_ids
    for rows in ([0], [1, 4], [0, 1, 2, 3, 4, 5]):
        for poison in (float("nan"), float("inf"), None):
            bad = logits.clone()
            if poison is None:
                bad[rows] = -torch.inf
            else:
                bad[rows, 13] = poison
            out = run(bad, slots)
            assert out.status.tolist() == [NOT_FINITE if i in rows else FINITE for i in range(6)]
            good = [i for i in range(6) if i not in rows]
            assert torch.equal(out.token_ids[good], clean[good])
            assert ((out.token_ids >= 0) & (out.token_ids < 700)).all()


@pytest.mark.parametrize("pieces", [False, True])
def test_logprobs(pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr(sampler_module, "CHUNK_LOGITS", {"cpu": 100})
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(6)).bfloat16()
    slots = [
        SlotSampling(0, temperature=2.0, top_k=2, logprobs=3),
        SlotSampling(0),
        SlotSampling(0, temperature=1.0, logit_bias={7: 50.0}, logprobs=0),
        SlotSampling(0, logprobs=1),
    ]
    out = run(logits, slots)
    assert out.logprobs is not None
    oracle = logits.double().log_softmax(-1)
    for row in (0, 2, 3):
        token = int(out.token_ids[row])
        assert out.logprobs.chosen[row] == pytest.approx(oracle[row, token].item(), abs=1e-5)
        assert out.logprobs.rank[row] == (oracle[row] > oracle[row, token]).sum() + 1
        np.testing.assert_allclose(out.logprobs.top[row], oracle[row].topk(3).values, atol=1e-5)
        np.testing.assert_array_equal(
            logits[row, out.logprobs.top_ids[row]].float(), logits[row].topk(3).values.float()
        )
    assert out.logprobs.rank[1] == 0
    assert out.logprobs.rank[3] == 1


def test_prompt_logprobs() -> None:
    logits = torch.randn(5, 50)
    targets = torch.tensor([0, 49, 7, 7, 3])
    got = score(Logits.whole(logits), targets, 0)
    oracle = logits.log_softmax(-1)
    np.testing.assert_allclose(got.chosen, oracle[torch.arange(5), targets], atol=1e-5)
    assert got.top_ids.shape == got.top.shape == (5, 0)
    assert score(Logits.whole(logits[:0]), targets[:0], 2).top.shape == (0, 2)
    with pytest.raises(ValueError, match="top is 51"):
        score(Logits.whole(logits), targets, 51)


def test_wrong_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="31 columns, not 30"):
        Sampler(30, 1).sample(
            Logits.whole(torch.zeros(1, 31)), torch.tensor([0]), torch.tensor([0])
        )


@settings(max_examples=40, deadline=None)
@given(
    kinds=st.lists(slot_settings, min_size=1, max_size=6),
    vocab_size=st.sampled_from([31, 32, 33, 100, 1000]),
    data=st.data(),
)
def test_a_masked_row_is_sampled_from_its_tokens_and_no_other_row_changes(
    kinds: list[SlotSampling], vocab_size: int, data: st.DataObject
) -> None:
    slots = [replace(kind, min_tokens=0, logit_bias={}) for kind in kinds]
    slots = [replace(slot, prompt_token_ids=(1,), output_token_ids=()) for slot in slots]
    logits = torch.randn(len(slots), vocab_size, generator=torch.Generator().manual_seed(3))
    some = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=5)
    rows = data.draw(st.dictionaries(st.integers(0, len(slots) - 1), some, min_size=1))
    free = run(logits, slots).token_ids.tolist()
    got = run(logits, slots, masks=mask_of(rows, vocab_size)).token_ids.tolist()
    for row, token in enumerate(got):
        if row in rows:
            assert token in rows[row]
        else:
            assert token == free[row]
    # As if the other tokens had never been likely: masked tokens leave no trace.
    for row, tokens in rows.items():
        only = torch.full_like(logits[row], -torch.inf)
        only[tokens] = logits[row, tokens]
        (alone,) = run(only[None], [slots[row]]).token_ids.tolist()
        assert got[row] == alone


def test_a_row_whose_tokens_are_all_impossible_gets_some_token() -> None:
    logits = torch.zeros(2, 40)
    logits[:, :8] = -torch.inf
    slots = [SlotSampling(0), SlotSampling(1, temperature=1.0)]
    sampled = run(logits, slots, masks=mask_of({0: [3], 1: [4]}, 40))
    assert sampled.status.tolist() == [FINITE, FINITE]
    assert all(0 <= token < 40 for token in sampled.token_ids.tolist())


# Compiled kernels draw in place (kernels/cpu/csrc/draw.cpp); torch's operators are their oracle.

TEMPERATURES = st.sampled_from([1e-3, 0.3, 1.0, 2.0, 100.0])
TOP_K = st.sampled_from([0, 1, 3, 50, 700, 10**9])
TOP_P = st.sampled_from([1.0, 0.999999, 0.95, 0.5, 1e-9])
MIN_P = st.sampled_from([0.0, 0.05, 0.9, 1.0])


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.tuples(TEMPERATURES, TOP_K, TOP_P, MIN_P), min_size=1, max_size=6),
    columns=st.sampled_from([1, 2, 63, 64, 65, 1000, 9000, 20_000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 60.0]),
    impossible=st.sampled_from([0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_compiled_kernels_draw_the_tokens_of_torchs_operators(
    shapes: list[tuple[float, int, float, float]],
    columns: int,
    spread: float,
    impossible: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Flat, equal, peaked and impossible logits; nuclei of a few tokens, and of nearly all."""
    torch.manual_seed(seed)
    local = (spread * torch.randn(len(shapes), columns)).to(dtype)
    local[torch.rand(local.shape) < impossible] = -torch.inf
    slots = [
        SlotSampling(i, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        for i, (temperature, top_k, top_p, min_p) in enumerate(shapes)
    ]
    u = torch.rand(len(shapes), dtype=torch.float64)
    u[0] = (0.0, 1 - 2.0**-48)[seed % 2]
    with compiled_kernels(True):
        logits = Logits.whole(local)
        assert draw_module.draws_in_place(logits)
        got = draw_module.draw_in_place(logits, range(len(shapes)), slots, u)
    with pytest.MonkeyPatch.context() as patch:  # with the compiled weights, in another order
        patch.setattr(draw_module, "draws_in_place", lambda logits: False)
        expected = draw_module.draw(Logits.whole(local.float()), slots, u)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("compiled", [True, False])
def test_compiled_kernels_copy_no_row_that_is_finite(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with NaN are copied; without compiled kernels, also those with changes or at random."""
    torch.manual_seed(0)
    logits = torch.randn(6, 300).bfloat16()
    logits[5, 7] = torch.nan
    slots = [
        SlotSampling(0, temperature=1.0, seed=1),
        SlotSampling(1, temperature=1.0, seed=2, frequency_penalty=0.5),
        SlotSampling(2, temperature=0.0),
        SlotSampling(3, temperature=1.0, seed=3, top_k=20),
        SlotSampling(4, temperature=1.0, seed=4, logit_bias={9: 50.0}),
        SlotSampling(5, temperature=1.0, seed=5),
    ]
    masks = mask_of({3: [4]}, 300)
    copied: list[int] = []
    choose = Sampler._choose_from_copy

    def noting(self: Sampler, logits: Logits, *rest: Any) -> Tensor:
        copied.append(len(logits))
        return choose(self, logits, *rest)

    monkeypatch.setattr(Sampler, "_choose_from_copy", noting)
    with compiled_kernels(compiled):
        sampled = run(logits, slots, masks=masks)
    assert copied == [1 if compiled else 5]
    assert sampled.token_ids[2:5].tolist() == [int(logits[2].argmax()), 4, 9]
    assert sampled.status.tolist() == [FINITE] * 5 + [NOT_FINITE]
    alone = run(logits[:1].float(), slots[:1])
    assert sampled.token_ids[0] == alone.token_ids[0]


TOKENS = st.lists(st.integers(0, 39), max_size=12)


@st.composite
def changed_slots(draw: st.DrawFn) -> list[SlotSampling]:
    """Requests with penalties, biases and end tokens; some prompts and outputs share tokens."""
    return [
        SlotSampling(
            i,
            temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 3.0])),
            top_k=draw(TOP_K),
            top_p=draw(TOP_P),
            seed=i,
            repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
            presence_penalty=draw(st.sampled_from([0.0, 0.5, -2.0])),
            frequency_penalty=draw(st.sampled_from([0.0, 0.25, -1.0])),
            logit_bias=draw(st.dictionaries(st.integers(0, 39), st.sampled_from([-100, 0.5, 9]))),
            min_tokens=draw(st.sampled_from([0, 20])),
            end_token_ids=tuple(draw(TOKENS)),
            prompt_token_ids=tuple(draw(TOKENS)),
            output_token_ids=tuple(draw(TOKENS)),
        )
        for i in range(draw(st.integers(1, 5)))
    ]


@settings(max_examples=150, deadline=None)
@given(
    slots=changed_slots(),
    masked=st.dictionaries(st.integers(0, 4), st.lists(st.integers(0, 39), min_size=1), max_size=3),
    columns=st.sampled_from([40, 64, 65, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_compiled_kernels_change_logits_as_torchs_operators(
    slots: list[SlotSampling],
    masked: dict[int, list[int]],
    columns: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Also tokens that several settings change, and rows that share a batch with unchanged ones."""
    torch.manual_seed(seed)
    local = (2 * torch.randn(len(slots), columns)).to(dtype)
    local[torch.rand(local.shape) < 0.1] = -torch.inf
    before, index = local.clone(), [len(slot.output_token_ids) for slot in slots]
    masks = mask_of({row: masked[row] for row in masked if row < len(slots)}, columns)
    given = masks if masks.rows else None
    with compiled_kernels(True):
        got = run(local, slots, index, given)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler_module, "draws_in_place", lambda logits: False)
        expected = run(local, slots, index, given)
    assert got.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(local, before)
