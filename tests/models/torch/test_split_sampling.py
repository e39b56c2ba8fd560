"""Ranks that share a vocabulary sample the same tokens as one rank, with little communication.
GPUs sample the same tokens as CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.split import Sampling, running, sample_parts

from weft.models.interface import NOT_FINITE, Logprobs, SlotSampling
from weft.models.torch.group import ALONE

RANKS = 4
Ask = Callable[[int, Sampling], list[tuple[list[Any], int]]]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Let ranks sample; return each rank's result, and the bytes that it received."""
    with running(RANKS, sample_parts, RANKS) as pipes:

        def asked(ranks: int, sampling: Sampling) -> list[tuple[list[Any], int]]:
            for pipe in pipes[:ranks]:
                pipe.send((ranks, sampling))
            return [pipe.recv() for pipe in pipes[:ranks]]

        yield asked
        for pipe in pipes:
            pipe.send(None)


def slot(columns: int) -> st.SearchStrategy[SlotSampling]:
    tokens = st.lists(st.integers(0, columns - 1), max_size=12).map(tuple)
    return st.builds(
        SlotSampling,
        slot=st.just(0),
        temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
        top_k=st.sampled_from([0, 0, 1, 3, 40, 600, 10_000]),
        top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 1e-9]),
        min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 1e-300]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, -0.5]),
        seed=st.integers(-(2**63), 2**64 - 1),
        logit_bias=st.dictionaries(
            st.integers(0, columns - 1), st.floats(-100, 100, width=32), max_size=5
        ),
        logprobs=st.integers(-1, min(3, columns)),
        min_tokens=st.integers(0, 6),
        end_token_ids=tokens,
        prompt_token_ids=tokens,
        output_token_ids=tokens,
    )


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    columns = draw(st.sampled_from([4, 5, 127, 700, 3001]))
    slots = draw(st.lists(slot(columns), min_size=1, max_size=6))
    return Sampling(
        columns,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),  # bfloat16 makes ties
        spread=draw(st.sampled_from([0.0, 0.1, 3.0, 30.0])),
        seed=draw(st.integers(0, 2**31)),
        strange=draw(st.booleans()),
        slots=tuple(replace(s, slot=i) for i, s in enumerate(slots)),
        masked=draw(st.booleans()),
        top=draw(st.integers(-1, min(3, columns))),
    )


def same_scores(found: Logprobs | None, wanted: Logprobs | None, finite: Any) -> None:
    """Compare, except for a sum's rounding, and for the choice among tied tokens."""
    if found is None or wanted is None:
        assert found is wanted
        return
    np.testing.assert_array_equal(found.rank[finite], wanted.rank[finite])
    np.testing.assert_allclose(found.chosen[finite], wanted.chosen[finite], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.top[finite], wanted.top[finite], rtol=1e-5, atol=1e-5)
    apart = wanted.top[:, :-1] > wanted.top[:, 1:] + 1e-4
    untied = np.zeros_like(wanted.top, dtype=bool)
    untied[:, :-1] = apart & finite[:, None]
    untied[:, 1:-1] &= apart[:, :-1]  # the last one may tie with what is not named
    np.testing.assert_array_equal(found.top_ids[untied], wanted.top_ids[untied])


WIDE = Sampling(  # nuclei and ties that are not among the likeliest few, k above what is listed
    3001,
    torch.bfloat16,
    spread=0.1,
    seed=1,
    strange=False,
    slots=tuple(
        SlotSampling(i, temperature=1.0, seed=i, top_k=k, top_p=p, min_p=m)
        for i, (k, p, m) in enumerate(
            [(0, 0.9, 0.0), (900, 0.9, 0.0), (40, 1.0, 0.0), (2000, 1.0, 0.9), (0, 1.0, 0.9)]
        )
    ),
)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(sampling=samplings())
@example(sampling=WIDE)
def test_every_rank_samples_what_one_alone_does(ranks: int, sampling: Sampling, ask: Ask) -> None:
    wanted = sampling.run(ALONE.tensor)
    for found, _ in ask(ranks, sampling):
        for i in range(0, 3 * sampling.steps, 3):
            np.testing.assert_array_equal(found[i], wanted[i])
            assert ((found[i] >= 0) & (found[i] < sampling.columns)).all()
            np.testing.assert_array_equal(found[i + 1], wanted[i + 1])
            same_scores(found[i + 2], wanted[i + 2], wanted[i + 1] != NOT_FINITE)
        if sampling.top >= 0:
            same_scores(found[-1], wanted[-1], wanted[1] != NOT_FINITE)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@settings(max_examples=12, deadline=None)
@given(sampling=samplings())
@example(sampling=WIDE)
def test_gpus_sample_the_cpus_tokens(ranks: int, sampling: Sampling, ask: Ask) -> None:
    wanted = sampling.run(ALONE.tensor)
    on_gpus = replace(sampling, gpu=True)
    outputs = [on_gpus.run(ALONE.tensor)] if ranks == 1 else [o for o, _ in ask(ranks, on_gpus)]
    for found in outputs:
        finite = np.ones(len(sampling.slots), bool)  # a request that has failed ends
        for i in range(0, 3 * sampling.steps, 3):
            np.testing.assert_array_equal(found[i], outputs[0][i])
            np.testing.assert_array_equal(found[i + 1], wanted[i + 1])
            finite &= wanted[i + 1] != NOT_FINITE
            np.testing.assert_array_equal(found[i][finite], wanted[i][finite])
            assert ((found[i] >= 0) & (found[i] < sampling.columns)).all()
            same_scores(found[i + 2], wanted[i + 2], finite)
        if sampling.top >= 0:
            same_scores(found[-1], wanted[-1], finite & (wanted[1] != NOT_FINITE))


def test_gpus_deal_out_whole_rows(ask: Ask) -> None:
    """Each rank receives its share of the rows, and draws from these only."""
    rows, columns = 8, 1000
    slots = tuple(SlotSampling(i, temperature=1.0, seed=i) for i in range(rows))
    sampling = Sampling(columns, torch.bfloat16, 3.0, 0, False, slots, steps=1, gpu=True)
    share = 3 * (rows // 4) * (columns // 4) * 2  # from each of the others
    for _, told in ask(4, sampling):
        assert share <= told <= share + 100 * rows


@pytest.mark.parametrize(
    ("most", "kind"),
    [
        (50, SlotSampling(0)),
        (120, SlotSampling(0, temperature=1.0)),
        (100, SlotSampling(0, repetition_penalty=1.2, logit_bias={7: 1.0})),
        (3200, SlotSampling(0, temperature=0.8, top_k=50, top_p=0.95)),
        (6300, SlotSampling(0, temperature=0.3, top_p=0.95)),
        (40_000, SlotSampling(0, temperature=1.0, top_p=0.95)),  # the nucleus is wide
        (250, SlotSampling(0, logprobs=5)),
    ],
    ids=["greedy", "seeded", "penalised", "top-k", "top-p", "wide top-p", "logprobs"],
)
def test_what_is_exchanged(most: int, kind: SlotSampling, ask: Ask) -> None:
    """Bytes that a rank of 4 receives for a row of 151,936 logits; the row itself is 600 KB."""
    rows = 4
    slots = tuple(replace(kind, slot=i, seed=i) for i in range(rows))
    sampling = Sampling(151_936, torch.float32, 3.0, 0, False, slots, steps=1)
    wanted = sampling.run(ALONE.tensor)
    for found, told in ask(4, sampling):
        np.testing.assert_array_equal(found[0], wanted[0])
        assert told / rows <= most
