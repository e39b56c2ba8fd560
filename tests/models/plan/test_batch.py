"""The work in a step: counts and contexts equal those of its tokens, one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.models.interface import NONE, NOTHING, StepInput
from weft.models.plan.batch import Batch

# Tokens in this step, and tokens before it.
REQUESTS = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 5000)), max_size=8)


def step(requests: list[tuple[int, int]]) -> StepInput:
    counts = [tokens for tokens, _ in requests]
    rows = np.arange(len(requests), dtype=np.int32)
    return StepInput(
        0,
        token_ids=np.zeros(sum(counts), np.int32),
        positions=np.array(
            [before + i for tokens, before in requests for i in range(tokens)], np.int32
        ),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_len=np.array([tokens + before for tokens, before in requests], np.int32),
        block_table=np.zeros((len(requests), 1), np.int32),
        slot=rows,
        sample_index=NONE,
        sample_slot=NONE,
        output_index=NONE,
    )


@given(REQUESTS)
def test_contexts_are_means_over_the_tokens(requests: list[tuple[int, int]]) -> None:
    decodes = [before + 1 for tokens, before in requests if tokens == 1]
    prompts = [before + i + 1 for tokens, before in requests if tokens > 1 for i in range(tokens)]
    batch = Batch.of([step(requests)])
    assert (batch.decodes, batch.prefill_tokens) == (len(decodes), len(prompts))
    assert batch.requests == len(requests)
    assert batch.decode_context == pytest.approx(np.mean(decodes) if decodes else 0)
    assert batch.prefill_context == pytest.approx(np.mean(prompts) if prompts else 0)


def test_attention_groups_are_added_up() -> None:
    one, other = [(1, 10), (30, 0)], [(1, 20), (7, 100)]
    assert Batch.of([step(one), step(other)]) == Batch.of([step(one + other)])
    assert Batch.of([step(one), NOTHING]) == Batch.of([step(one)])
    assert Batch.of([]) == Batch()
