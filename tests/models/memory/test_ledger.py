"""The memory ledger: its sums, its refusals, and its advice, which works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError
from weft.models.checkpoint.locate import read_spec
from weft.models.memory.activations import LargestStep, cpu_activations, triton_activations
from weft.models.memory.ledger import GIB, MIB, Ledger, human_bytes
from weft.models.memory.plan import RECORDING, MemoryPlan, Recordings, copies_bytes
from weft.models.spec.build import build_spec
from weft.models.spec.layout import Layout
from weft.models.spec.spec import DTYPE_BYTES, FP8_CACHE, MoeSpec

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SPEC = build_spec(QWEN, Path("config.json"))
KV_BYTES_PER_TOKEN = 2 * 24 * 2 * 64 * 2


def plan(**changes: Any) -> Ledger:
    arguments: dict[str, Any] = {
        "dtype": "auto",
        "available": 16 * GIB,
        "memory_fraction": 0.8,
        "kv_cache_memory": None,
        "block_size": 32,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "max_model_len": SPEC.max_model_len,
    }
    return MemoryPlan(spec=SPEC, **(arguments | changes)).ledger()


def test_blocks_that_another_rank_has_no_room_for_are_left() -> None:
    own = plan()
    least = own.with_blocks(own.num_blocks - 7)
    assert least.num_blocks == own.num_blocks - 7
    assert least.left - own.left == 7 * own.kv_cache // own.num_blocks
    assert f"{least.num_blocks:,} blocks of 32 tokens" in least.render()


def test_a_cache_in_fp8_has_twice_the_tokens() -> None:
    sixteen, eight = (plan(kv_dtype=kind, kv_cache_memory=GIB) for kind in (None, FP8_CACHE))
    each = sixteen.kv_cache // sixteen.num_blocks
    assert eight.kv_cache // eight.num_blocks * 2 == each == 32 * KV_BYTES_PER_TOKEN
    assert abs(eight.num_blocks - 2 * sixteen.num_blocks) <= 1
    assert eight.weights == sixteen.weights


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_stages_share_weights_and_cache(quantization: str) -> None:
    stages = [Layout(rank=rank, pp=3).local(SPEC) for rank in range(3)]
    table = 2 * SPEC.embedding.size
    weights = [stage.weight_bytes("auto", quantization) for stage in stages]
    width = SPEC.hidden_size
    rows = {"none": 2 * width, "int8": width + 2, "int4": width // 32 * 18}
    last = SPEC.vocab_size * rows[quantization]
    # The table is on the first stage, for embedding tokens, and on the last, as the LM head.
    assert sum(weights) == SPEC.weight_bytes("auto", quantization) + table
    norm = 2 * SPEC.hidden_size
    assert weights[0] - table == weights[1] == weights[2] - last - norm
    assert {stage.kv_bytes_per_token() for stage in stages} == {KV_BYTES_PER_TOKEN // 3}
    first, middle, end = (cpu_activations(s, "auto", LargestStep(64, 64, 512)) for s in stages)
    assert first == middle < end == cpu_activations(SPEC, "auto", LargestStep(64, 64, 512))


def test_everything_is_accounted_for() -> None:
    ledger = plan()
    assert ledger.weights == 494_032_768 * 2
    assert ledger.budget == int(16 * GIB * 0.8)
    assert ledger.kv_cache == ledger.tokens * KV_BYTES_PER_TOKEN
    parts = ledger.weights + ledger.activations + ledger.kv_cache + ledger.left
    assert parts == ledger.budget


def test_the_cache_stops_at_what_requests_can_use() -> None:
    ledger = plan(max_model_len=1000, max_num_seqs=4)
    assert ledger.num_blocks == 4 * 32
    assert ledger.left > 8 * GIB
    assert plan(max_model_len=1000, max_num_seqs=4, kv_cache_memory=8 * GIB).num_blocks == 4 * 32


def test_the_cache_takes_what_is_left() -> None:
    ledger = plan(max_num_seqs=1000)
    assert 0 <= ledger.left < 32 * KV_BYTES_PER_TOKEN


def test_a_given_size_is_kept() -> None:
    ledger = plan(kv_cache_memory=GIB)
    assert ledger.num_blocks == GIB // (32 * KV_BYTES_PER_TOKEN)


def test_ranks_share_the_blocks_of_a_request() -> None:
    ledger, alone = plan(cp=4, max_num_seqs=4), plan(max_num_seqs=4)
    assert (ledger.block_size, alone.block_size) == (128, 32)
    assert ledger.tokens == alone.tokens == 4 * 32768
    assert ledger.kv_cache == alone.kv_cache // 4
    assert "of 128 tokens: 131,072 tokens" in ledger.render()
    assert plan(cp=4, kv_cache_memory=100 * MIB).tokens >= 32768  # a refusal of one rank alone


def test_float32_takes_twice_as_much() -> None:
    assert plan(dtype="float32").weights == 2 * plan().weights


def test_the_table_is_aligned() -> None:
    lines = plan(max_num_seqs=200).render().splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        *("weights", "activations", "KV cache", "in all"),
    ]
    assert all(re.fullmatch(r"[ \d.]{6} [KMG]iB", line[12:22]) for line in lines)
    assert "a step of 2048 tokens, 200 requests" in lines[1]
    assert re.search(r"blocks of 32 tokens: [\d,]+ tokens$", lines[2])


REFUSED: list[dict[str, Any]] = [
    {"available": 3 * GIB // 2},
    {"available": 5 * GIB // 4, "max_num_seqs": 1000},
    {"available": 3 * GIB, "dtype": "float32"},
    {"memory_fraction": 0.07},
    {"available": 5 * GIB // 2, "max_num_seqs": 4000},
    {"available": 4 * GIB, "max_num_batched_tokens": 65536, "max_num_seqs": 64},
    {"kv_cache_memory": 100 * MIB},
    {"kv_cache_memory": 1},
    {"kv_cache_memory": 20 * GIB, "max_num_seqs": 1000},
]


@pytest.mark.parametrize("changes", REFUSED, ids=str)
def test_every_advice_works(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan(**changes)
    advice = str(refusal.value).rpartition("; set ")[2].split(", or ")
    assert advice
    for change in advice:
        better = dict(changes)
        flags = re.findall(r"--([a-z-]+) ([\d.]+)(M?)", change)
        assert flags, change
        for flag, number, unit in flags:
            value = float(number) if "." in number else int(number)
            better[flag.replace("-", "_")] = value * MIB if unit else value
        assert plan(**better).left >= 0


def test_the_refusal_has_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"weights 942\.3 MiB, activations") as refusal:
        plan(available=3 * GIB // 2)
    assert "384.0 MiB for one request of 32,768 tokens" in str(refusal.value)
    assert "1.20 GiB that weft may take (0.8 of the 1.50 GiB that are free)" in str(refusal.value)
    with pytest.raises(ConfigError, match=r"--kv-cache-memory is 100\.0 MiB, too little for one"):
        plan(kv_cache_memory=100 * MIB)


def test_no_setting_helps_a_model_that_is_too_large() -> None:
    with pytest.raises(ConfigError, match="free some memory or choose a smaller model"):
        plan(available=GIB // 2)


@settings(max_examples=80, deadline=None)
@given(
    available=st.integers(0, 32 * GIB),
    memory_fraction=st.floats(0.01, 1.0),
    kv_cache_memory=st.none() | st.integers(1, 32 * GIB),
    block_size=st.sampled_from([1, 16, 32, 100]),
    max_num_seqs=st.integers(1, 1000),
    max_num_batched_tokens=st.integers(1, 10_000),
    max_model_len=st.integers(1, 200_000),
)
def test_a_plan_fits_or_is_refused(**changes: Any) -> None:
    length = changes["max_model_len"]
    try:
        ledger = plan(**changes)
    except ConfigError:
        return
    assert ledger.left >= 0
    assert length <= ledger.tokens
    blocks_per_request = -(-length // changes["block_size"])
    assert ledger.num_blocks <= changes["max_num_seqs"] * blocks_per_request
    if changes["kv_cache_memory"]:
        assert ledger.kv_cache <= changes["kv_cache_memory"]


def test_human_bytes() -> None:
    sizes = [0, 1023, 1024, MIB - 1, 3 * MIB // 2, GIB, 10 * GIB]
    readable = [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1024.0 KiB",
        "1.5 MiB",
        "1.00 GiB",
        "10.00 GiB",
    ]
    assert [human_bytes(size) for size in sizes] == readable


def test_copies_of_experts_are_weights(tmp_path: Path) -> None:
    spec = Layout(ep=4).local(read_spec(make_checkpoint(tmp_path, "qwen3_moe")))
    (moe, _) = (layer.feed_forward for layer in spec.layers)
    assert isinstance(moe, MoeSpec)
    expert = sum(weight.size for weight in (moe.gate, moe.up, moe.down)) // 2
    # Three copies in two layers, and a buffer for a weight of two experts and three copies.
    expected = 4 * (2 * 3 * expert + 5 * moe.gate.size // 2)
    assert copies_bytes(spec, "float32", 3) == expected
    assert copies_bytes(spec, "float32", 0) == copies_bytes(SPEC, "float32", 3) == 0
    assert plan(copies=expected).weights == plan().weights + expected


def test_buffers_and_recorded_steps_take_from_the_cache() -> None:
    alone = plan(count_activations=triton_activations, max_num_seqs=200)
    on_gpu = {"count_activations": triton_activations, "recordings": Recordings((8, 100, 200))}
    shared = plan(max_num_seqs=200, buffers=3 * MIB, **on_gpu)
    tensors = shared.graphs - 3 * RECORDING
    assert 0 < tensors < shared.activations
    padded = plan(max_num_seqs=197, **on_gpu)
    assert padded.graphs == shared.graphs  # a recorded step is run with all its rows
    fewer = plan(max_num_seqs=100, **on_gpu)
    assert shared.graphs - fewer.graphs > RECORDING + tensors / 3
    shorter = plan(max_num_seqs=200, max_num_batched_tokens=100, **on_gpu)
    assert shorter.graphs == fewer.graphs  # no step has 200 requests
    logits = 200 * SPEC.vocab_size * DTYPE_BYTES[SPEC.compute_dtype("auto")]
    assert tensors >= 2 * logits  # those of the model, and where all sizes leave them
    longer = plan(max_num_seqs=200, max_model_len=SPEC.max_model_len + 320, **on_gpu)
    assert longer.graphs - shared.graphs == 4 * 200 * 320 // 32
    assert shared.buffers == 3 * MIB
    mixed = {"recordings": Recordings((8, 100, 200), (16, 512))}
    more = plan(max_num_seqs=200, buffers=3 * MIB, **(on_gpu | mixed))
    assert more.graphs >= shared.graphs + 2 * RECORDING
    only = plan(max_num_seqs=200, **(on_gpu | {"recordings": Recordings((), (512,))}))
    assert only.graphs - RECORDING >= 512 * SPEC.hidden_size * 4
    for ledger in (alone, shared):
        parts = (ledger.weights, ledger.activations, ledger.buffers, ledger.graphs)
        assert sum(parts) + ledger.kv_cache + ledger.left == ledger.budget
    assert "buffers" not in alone.render()
    assert "buffers 3.0 MiB for exchanges between ranks" in " ".join(shared.render().split())
    assert "CUDA graphs" in shared.render()
    with pytest.raises(ConfigError, match=r"activations .*, buffers 1024\.00 GiB and KV cache"):
        plan(count_activations=triton_activations, buffers=2**40)
