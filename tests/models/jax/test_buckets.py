"""Every step fits a shape; on a TPU, no shape leaves the attention kernel."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpu_steps import LLAMA_8B

from weft.kernels.devices import DEVICES
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.interface import StepInput
from weft.models.jax.buckets import Buckets
from weft.models.jax.mesh import make_mesh
from weft.models.jax.platform import described_devices
from weft.models.plan.sizes import TABLE_BYTES, block_size
from weft.models.spec.layout import Layout

NONE = np.zeros(0, np.int32)


def step(counts: list[int], width: int) -> StepInput:
    """A step of requests with these numbers of new tokens, and block tables of a width."""
    tokens, requests = sum(counts), len(counts)
    return StepInput(
        step=0,
        token_ids=np.arange(tokens, dtype=np.int32),
        positions=np.arange(tokens, dtype=np.int32),
        query_start=np.cumsum([0, *counts], dtype=np.int32),
        context_len=np.array(counts, np.int32),
        block_table=np.ones((requests, width), np.int32),
        slot=np.arange(requests, dtype=np.int32),
        sample_index=NONE,
        sample_slot=NONE,
        output_index=NONE,
    )


@given(
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 9]), min_size=1, max_size=20),
    width=st.integers(1, 32),
)
def test_a_step_is_padded_to_the_smallest_shape_in_which_it_fits(
    counts: list[int], width: int
) -> None:
    buckets = Buckets(
        *(read_spec(locate("weft-demo")), Layout(1), make_mesh(jax.devices(), 1, 1), "float32"),
        max_num_seqs=20,
        max_num_batched_tokens=180,
        max_model_len=256,
        block_size=8,
    )
    given = step(counts, width)
    chosen = buckets.choose(given)
    fitting = [
        each
        for each in buckets.all()
        if each.decodes == (max(counts) == 1) and each.tokens >= sum(counts) and each.pages >= width
    ]
    assert chosen == min(fitting)
    assert chosen.rows >= len(counts)
    padded = buckets.pad(given, chosen)
    assert padded.tokens.shape == (chosen.tokens,)
    assert padded.tables.shape == (chosen.rows, chosen.pages)
    assert (padded.tables[: len(counts), :width] == 1).all()
    assert padded.tables.sum() == len(counts) * width
    assert padded.context_len.sum() == sum(counts)


@pytest.mark.parametrize("length", [8192, 131_072, 1 << 20])
def test_without_a_block_size_no_shape_leaves_the_attention_kernel(
    length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": length}))
    spec, layout = read_spec(path), Layout(4)
    limits = {"max_num_seqs": 128, "max_model_len": length}
    found = block_size(layout.local(spec), DEVICES["v5e"], "bfloat16", **limits)
    mesh = make_mesh(described_devices("v5e:2x2"), 4, 1)
    whole = {**limits, "max_num_batched_tokens": 2048}
    buckets = Buckets(spec, layout, mesh, "bfloat16", block_size=found.value, **whole)
    assert all(4 * each.rows * each.pages <= TABLE_BYTES for each in buckets.all())
    assert len({each.pages for each in buckets.all()}) == 1
    small = Buckets(spec, layout, mesh, "bfloat16", block_size=16, **whole).all()
    widths = {4 * each.rows * each.pages <= TABLE_BYTES for each in small if each.tokens == 2048}
    assert widths == ({True} if length == 8192 else {True, False}), "short requests stay in it"
