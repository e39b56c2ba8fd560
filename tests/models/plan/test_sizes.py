"""Blocks hide the start of copies; steps are padded to the fewest sizes with cheap padding."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tpu_steps import LLAMA_8B

from weft.kernels.devices import DEVICES
from weft.models.checkpoint.locate import locate, read_spec
from weft.models.plan.batch import Batch
from weft.models.plan.hardware import read_slice
from weft.models.plan.sizes import (
    BLOCK_UNIT,
    DECODE_PADDING,
    TABLE_BYTES,
    block_size,
    candidates,
    fewest_sizes,
    step_sizes,
    table_width,
)
from weft.models.plan.step import Precision
from weft.models.plan.times import Engine
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

DEMO = read_spec(locate("weft-demo"))
FEW = {"max_num_seqs": 64, "max_model_len": 8192}


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("llama")
    config = LLAMA_8B | {"num_hidden_layers": 32, "max_position_embeddings": 131_072}
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(folder)


@pytest.mark.parametrize("name", ["cpu", "cpu-amx", "H100", "MI300X"])
def test_devices_that_read_rows_have_the_smallest_blocks(spec: ModelSpec, name: str) -> None:
    long = {"max_num_seqs": 1024, "max_model_len": 131_072}
    assert block_size(spec, DEVICES[name], "bfloat16", **long).value == BLOCK_UNIT


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_tpu_reads_a_block_while_the_next_copy_starts(
    spec: ModelSpec, name: str, tp: int
) -> None:
    device, local = DEVICES[name], Layout(tp).local(spec)
    block = block_size(local, device, "bfloat16", **FEW).value
    seconds = 2 * 2 * local.num_kv_heads * local.head_dim / device.bandwidth  # for a token
    assert block * seconds >= device.copy
    assert block == BLOCK_UNIT or block // 2 * seconds < device.copy


@given(seqs=st.integers(1, 2048), length=st.integers(1, 1 << 20))
def test_all_block_tables_fit_scalar_memory(seqs: int, length: int) -> None:
    found = block_size(
        DEMO, DEVICES["v5e"], "bfloat16", max_num_seqs=seqs, max_model_len=length
    ).value
    assert found < 2 * max(length, BLOCK_UNIT), "no block is larger than a request"
    whole = found >= length  # one block for each request
    assert whole or 4 * seqs * table_width(length, found) <= TABLE_BYTES


def test_a_context_of_a_million_tokens_has_larger_blocks(spec: ModelSpec) -> None:
    found = block_size(spec, DEVICES["v5e"], "bfloat16", max_num_seqs=128, max_model_len=1 << 20)
    assert found.value == 1024
    assert "128 block tables fit scalar memory" in found.reason


@given(
    rates=st.lists(st.floats(0, 3), min_size=1, max_size=60),
    first=st.floats(0.1, 10),
    padding=st.sampled_from([0.1, 0.25, 1.0]),
)
def test_sizes_are_the_fewest_with_cheap_padding(
    rates: list[float], first: float, padding: float
) -> None:
    """The fewest: each chosen size but the largest is too cheap for the next one."""
    costs = [first]
    for rate in rates:
        costs.append(costs[-1] + rate)
    chosen = fewest_sizes(costs.__getitem__, range(len(costs)), padding)
    assert chosen[-1] == len(costs) - 1
    for size, cost in enumerate(costs):
        padded = next(each for each in chosen if each >= size)
        assert costs[padded] <= (1 + padding) * cost
    for size, larger in pairwise(chosen):
        assert costs[larger] > (1 + padding) * costs[size]


@given(most=st.integers(1, 5000), unit=st.sampled_from([8, 32]), tp=st.integers(1, 64))
def test_candidates_reach_the_most_and_can_be_cut(most: int, unit: int, tp: int) -> None:
    found = candidates(most, unit, 2 * tp)
    assert found == sorted(set(found))
    assert all(size % unit == 0 for size in found)
    assert found[-1] >= most
    assert len(found) == 1 or found[-2] < most
    first = next((i for i, size in enumerate(found) if size % (2 * tp) == 0), len(found))
    assert all(size % (2 * tp) == 0 for size in found[first:])


@pytest.mark.parametrize("slice_name", ["v5e:2x4", "v6e:1x1"])
def test_padded_steps_take_little_longer(spec: ModelSpec, slice_name: str) -> None:
    place = read_slice(slice_name)
    layout = Layout(place.devices)
    decodes, others = step_sizes(
        *(spec, layout, place, "bfloat16"),
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        parts=2 * layout.tp,
    )
    assert (decodes[-1], others[-1]) == (128, 2048)
    assert len(decodes) + len(others) < 11, "powers of 4 and 2 are ten"
    engine = Engine(spec, layout, place, Precision(), overlapped=layout.tp > 1)
    for tokens in (1, 3, 17, 100, 127):
        padded = next(size for size in decodes if size >= tokens)
        multiple = -(-tokens // 8) * 8
        ratio = engine.seconds(Batch(padded)) / engine.seconds(Batch(multiple))
        assert ratio <= 1 + DECODE_PADDING
