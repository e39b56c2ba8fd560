"""Every number in a model is on a rank, and on no more ranks than the layout says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import make_checkpoint

from weft.errors import ConfigError
from weft.models.checkpoint.locate import read_spec
from weft.models.spec.layout import Layout, check_layout
from weft.models.spec.spec import ModelSpec

LAYOUTS = [  # tp, ep, cp
    *((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (2, 4, 1), (4, 2, 1)),
    *((1, 1, 2), (1, 1, 4), (2, 1, 2), (1, 2, 2), (1, 4, 2), (1, 2, 4), (2, 2, 2)),
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSpec]:
    return {
        family: read_spec(make_checkpoint(tmp_path_factory.mktemp(family), family))
        for family in ("llama", "qwen3_moe")
    }


def holders(axis: str, tp: int, ep: int, cp: int, kv_heads: int) -> int:
    """Count the ranks with the same part of an axis, if only that axis is cut."""
    parts = {
        "hidden": 1,
        "head_dim": 1,
        "choice": 1,
        "kv_heads": min(tp, kv_heads),
        "expert": ep,
        "moe_intermediate": max(1, tp * cp // ep),
    }.get(axis, tp * cp)
    return max(tp * cp, ep) // parts


@pytest.mark.parametrize(
    ("family", "tp", "ep", "cp"),
    [
        (family, tp, ep, cp)
        for family in ("llama", "qwen3_moe")
        for tp, ep, cp in LAYOUTS
        if family != "llama" or ep == 1
    ],
)
def test_the_parts_make_up_every_weight(
    family: str, tp: int, ep: int, cp: int, specs: dict[str, ModelSpec]
) -> None:
    spec = specs[family]
    check_layout(spec, tp, ep, cp)
    ranks = [Layout(tp, ep, rank, cp) for rank in range(max(tp * cp, ep))]
    for weight in spec.weights:
        count = np.zeros(weight.shape, np.int32)
        for layout in ranks:
            count[layout.parts(spec, weight)] += 1
        if "expert" in weight.axes and "moe_intermediate" in weight.axes:
            expected = 1 if tp * cp >= ep else holders("expert", tp, ep, cp, 0)
        else:
            cut = (holders(axis, tp, ep, cp, spec.num_kv_heads) for axis in weight.axes)
            expected = min(cut)
        assert (count == expected).all(), weight.name


def test_the_heads_of_a_rank_are_those_of_its_weights(specs: dict[str, ModelSpec]) -> None:
    spec = specs["llama"]  # 4 heads, 2 KV heads
    for rank in range(4):
        local = Layout(tp=4, rank=rank).local(spec)
        assert (local.num_heads, local.num_kv_heads) == (1, 1)
        attention = local.layers[0].attention
        assert attention.q.weight.shape == (spec.head_dim, spec.hidden_size)
        assert attention.k.weight.shape == (spec.head_dim, spec.hidden_size)
        assert attention.o.weight.shape == (spec.hidden_size, spec.head_dim)
    parts = [Layout(4, 1, r).parts(spec, spec.layers[0].attention.k.weight)[0] for r in range(4)]
    assert [part.start // spec.head_dim for part in parts] == [0, 0, 1, 1]


def test_ranks_that_share_positions_have_the_same_kv_heads(specs: dict[str, ModelSpec]) -> None:
    spec = specs["llama"]  # 4 heads, 2 KV heads
    ranks = [Layout(tp=2, cp=2, rank=rank) for rank in range(4)]
    assert [layout.context for layout in ranks] == [0, 1, 0, 1]
    local = ranks[0].local(spec)
    assert (local.num_heads, local.num_kv_heads) == (1, 1)
    attention = spec.layers[0].attention
    for weight, heads in ((attention.k, [0, 0, 1, 1]), (attention.q, [0, 1, 2, 3])):
        parts = [layout.parts(spec, weight.weight)[0] for layout in ranks]
        assert [part.start // spec.head_dim for part in parts] == heads


def test_a_vocabulary_that_does_not_divide_is_cut_all_the_same(
    specs: dict[str, ModelSpec],
) -> None:
    spec = specs["llama"]  # 320 tokens
    layouts = [Layout(tp=3, rank=rank) for rank in range(3)]
    parts = [layout.part(spec, "vocab", spec.vocab_size) for layout in layouts]
    assert [(part.start, part.stop) for part in parts] == [(0, 107), (107, 214), (214, 320)]


@pytest.mark.parametrize(
    ("family", "tp", "ep", "message"),
    [
        (
            "llama",
            3,
            1,
            "--tp is 3; it must divide the model's 4 heads. These sizes work: 1, 2, 4",
        ),
        ("llama", 1, 2, "--ep is 2; the model has no experts. These sizes of --ep work: 1"),
        (
            "qwen3_moe",
            1,
            3,
            "--ep is 3; it must divide the model's 8 experts. These sizes of --ep work: 1, 2, 4, 8",
        ),
        (
            "qwen3_moe",
            4,
            3,
            "--ep is 3 with --tp 4; one of the two must be a multiple of the other. "
            "These sizes of --ep work: 1, 2, 4, 8",
        ),
    ],
)
def test_what_does_not_divide_is_refused_with_what_does(
    family: str, tp: int, ep: int, message: str, specs: dict[str, ModelSpec]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(specs[family], tp, ep)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("family", "tp", "ep", "cp", "message"),
    [
        (
            "llama",
            1,
            1,
            3,
            "--cp is 3; tp x cp, 3, must divide the model's 4 heads. These sizes work: 1, 2, 4",
        ),
        (
            "llama",
            2,
            1,
            4,
            "--cp is 4 with --tp 2; tp x cp, 8, must divide the model's 4 heads. "
            "These sizes work: 1, 2",
        ),
        (
            "qwen3_moe",
            2,
            3,
            2,
            "--ep is 3 with --tp 2 and --cp 2; one of it and tp x cp must be a multiple of the "
            "other. These sizes of --ep work: 1, 2, 4, 8",
        ),
    ],
)
def test_context_parts_that_do_not_divide_are_refused(
    family: str, tp: int, ep: int, cp: int, message: str, specs: dict[str, ModelSpec]
) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(specs[family], tp, ep, cp)
    assert str(raised.value) == message


def test_overlapped_kernels_have_experts_on_as_many_ranks_as_attention_or_attention_whole(
    specs: dict[str, ModelSpec],
) -> None:
    spec = specs["qwen3_moe"]
    check_layout(spec, 2, 4)
    check_layout(spec, 1, 4, overlapped=True)
    check_layout(spec, 4, 2, overlapped=True)
    with pytest.raises(ConfigError) as raised:
        check_layout(spec, 1, 4, 2, overlapped=True)
    assert str(raised.value) == (
        "--ep is 4 with --cp 2; with --kernels overlapped it must be at most 2"
    )


def test_more_copies_than_experts_are_refused(specs: dict[str, ModelSpec]) -> None:
    check_layout(specs["qwen3_moe"], 1, 4, redundant_experts=8)
    for family, experts in (("qwen3_moe", 8), ("llama", 0)):
        with pytest.raises(ConfigError) as raised:
            check_layout(specs[family], 1, 4 if experts else 1, redundant_experts=12)
        assert str(raised.value) == (
            f"--redundant-experts is 12; it must be at most the model's {experts} experts"
        )


def test_only_experts_that_are_cut_must_divide(tmp_path: Path) -> None:
    spec = read_spec(
        make_checkpoint(tmp_path, "qwen3_moe", num_attention_heads=8, moe_intermediate_size=20)
    )
    check_layout(spec, 8, 8)
    check_layout(spec, 8, 2)  # four parts of 20
    with pytest.raises(ConfigError) as raised:
        check_layout(spec, 8, 1)
    assert str(raised.value) == (
        "--tp is 8; tp / ep, 8, must divide the experts' width of 20. These sizes work: 1, 2, 4"
    )
    with pytest.raises(ConfigError) as raised:
        check_layout(spec, 3, 8)
    assert str(raised.value).endswith("These sizes work: 1, 2, 4, 8")
    with pytest.raises(ConfigError) as raised:
        check_layout(spec, 1, 1, 8)
    assert str(raised.value) == (
        "--cp is 8; tp x cp / ep, 8, must divide the experts' width of 20. "
        "These sizes work: 1, 2, 4"
    )


def test_kv_heads_that_are_neither_divisor_nor_multiple(tmp_path: Path) -> None:
    spec = read_spec(
        make_checkpoint(
            tmp_path, "llama", num_attention_heads=12, num_key_value_heads=3, hidden_size=96
        )
    )
    with pytest.raises(ConfigError, match=r"3 KV heads or be a multiple of them.*: 1, 3, 6, 12"):
        check_layout(spec, 2, 1)


def test_a_vocabulary_of_which_a_rank_would_have_nothing(tmp_path: Path) -> None:
    spec = read_spec(make_checkpoint(tmp_path, "llama", vocab_size=9))
    with pytest.raises(ConfigError, match=r"without any of the 9 tokens .* sizes work: 1, 2$"):
        check_layout(spec, 4, 1)


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_all_layers_and_only_the_ends_have_tables(
    pp: int, tied: bool, tmp_path: Path
) -> None:
    spec = read_spec(
        make_checkpoint(tmp_path, "llama", num_hidden_layers=4, tie_word_embeddings=tied)
    )
    check_layout(spec, 2, 1, pp=pp)
    layouts = [Layout(tp=2, rank=rank, pp=pp) for rank in range(2 * pp)]
    stages = [layout.of_stage(spec) for layout in layouts]
    assert stages[0::2] == stages[1::2]
    assert sum((stage.layers for stage in stages[::2]), ()) == spec.layers
    sizes = [len(stage.layers) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    for stage in stages:
        first, last = stage is stages[0] or stage is stages[1], stage in stages[-2:]
        names = {weight.name for weight in stage.weights}
        assert ("model.embed_tokens.weight" in names) == (first or (last and tied))
        assert ("model.norm.weight" in names) == last
        assert ("lm_head.weight" in names) == (last and not tied)
    everything = {weight.name for weight in spec.weights}
    assert {weight.name for stage in stages for weight in stage.weights} == everything
    local = layouts[-1].local(spec)
    assert local.num_heads == 2
    assert len(local.layers) == sizes[-1]
    assert local.kv_bytes_per_token() == spec.kv_bytes_per_token() // 2 * sizes[-1] // 4


def test_more_stages_than_layers_are_refused(specs: dict[str, ModelSpec]) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(specs["llama"], 1, 1, pp=3)
    assert str(raised.value) == "--pp is 3; the model has 2 layers. These sizes work: 1, 2"
