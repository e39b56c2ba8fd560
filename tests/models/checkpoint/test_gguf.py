"""GGUF files: the weights are those that they stand for, and bad files are refused by name."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import make_checkpoint
from support.gguf_files import ARCHITECTURE, write_gguf
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from weft.errors import ConfigError, ModelError
from weft.models.checkpoint.gguf_header import OTHER_TYPES, TYPES, _decimal, read_header
from weft.models.checkpoint.gguf_model import gguf_config, gguf_sampling
from weft.models.checkpoint.locate import (
    find_files,
    is_like_a_model,
    locate,
    model_name,
    read_spec,
    remote,
)
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import WHOLE, Layout
from weft.models.torch.cpu_model import CpuModel

SIZES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {"moe_intermediate_size": 64, "norm_topk_prob": True},  # as llama.cpp always does
    "smollm3": {"num_hidden_layers": 4},
}
"""Widths that are multiples of a block, so that these matrices are quantised, too; and layers of
each kind."""
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
Change = Callable[[gguf.GGUFWriter], None]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", "llama")


def assert_equal_weights(file: Path, plain: Path, layout: Layout = WHOLE) -> None:
    mine, theirs = read_spec(file), read_spec(plain)
    loaded = Weights(file, mine, layout=layout)
    written = Weights(plain, theirs, layout=layout)
    for one, other in zip(mine.weights, theirs.weights, strict=True):
        pairs = zip(loaded.read_each(one), written.read_each(other), strict=True)
        for got, wanted in pairs:
            assert torch.equal(got.float(), wanted.float()), one.name


@pytest.mark.parametrize("family", ARCHITECTURE)
@pytest.mark.parametrize("kind", [Type.Q8_0, Type.BF16], ids=lambda kind: kind.name)
def test_every_family_has_the_weights_that_the_file_stands_for(
    tmp_path: Path, family: str, kind: Type
) -> None:
    source = make_checkpoint(tmp_path / "source", family, **SIZES.get(family, {}))
    file, plain = write_gguf(source, tmp_path / "out", kind)
    mine, theirs = read_spec(file), read_spec(plain)
    assert replace(mine, dtype=theirs.dtype) == theirs
    assert_equal_weights(file, plain)


@given(st.floats(width=32))
def test_a_float32_is_its_shortest_decimal(number: float) -> None:
    found = _decimal(number)
    assert np.float32(found) == np.float32(number) or math.isnan(number)
    assert len(repr(found)) <= len(repr(number))
    assert _decimal(float(np.float32(0.95))) == 0.95


@pytest.mark.parametrize("name", [name for name, *_ in TYPES.values()])
def test_every_tensor_type_is_read(tmp_path: Path, name: str) -> None:
    source = make_checkpoint(
        tmp_path / "source", "llama", hidden_size=256, intermediate_size=512, head_dim=64
    )
    file, plain = write_gguf(source, tmp_path / "out", Type[name])
    assert {each.type for each in read_header(file).tensors.values()} == {name, "F32"}
    assert_equal_weights(file, plain)
    expected = {"F32": "float32", "F16": "float16"}.get(name, "bfloat16")
    assert read_spec(file).dtype == expected


def test_the_types_are_those_of_the_library() -> None:
    for kind in Type:
        if kind in TYPES:
            assert TYPES[kind] == (kind.name, *gguf.GGML_QUANT_SIZES[kind])
        else:
            assert OTHER_TYPES[kind] == kind.name


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_the_weights_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path / "source", family)
    file, plain = write_gguf(source, tmp_path / "out", Type.Q4_0)
    # Without from_pretrained(gguf_file=...), which needs the package accelerate.
    model = AutoModelForCausalLM.from_pretrained(plain)
    read = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    theirs, spec = read["tensors"], read_spec(file)
    weights, read_names = Weights(file, spec), set()
    for weight in spec.weights:
        place = weight.known_places[0]
        start = place.start[0] if place.start else 0
        wanted = theirs[place.name].float()[start : start + weight.shape[0]]
        assert torch.equal(weights.read(weight), wanted), weight.name
        read_names.add(place.name)
    assert theirs.keys() == read_names


@pytest.mark.parametrize("layout", [(2, 1, 0), (2, 1, 1), (4, 1, 3), (2, 2, 1)])
def test_each_rank_reads_its_part(tmp_path: Path, layout: tuple[int, int, int]) -> None:
    family = "qwen3_moe" if layout[1] > 1 else "llama"
    # Q4_K's blocks are wider than a rank's part of a row.
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    source = make_checkpoint(tmp_path / "source", family, **sizes)
    file, plain = write_gguf(source, tmp_path / "out", Type.Q4_K)
    tp, ep, rank = layout
    assert_equal_weights(file, plain, Layout(tp, ep, rank))


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_biases_of_llama_are_in_order(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path / "source", family, attention_bias=True, mlp_bias=True)
    file, plain = write_gguf(source, tmp_path / "out")
    assert gguf_config(file)["attention_bias"]
    assert_equal_weights(file, plain)


def test_a_file_without_an_lm_head_is_tied(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3", tie_word_embeddings=True)
    file, plain = write_gguf(source, tmp_path / "out")
    assert read_spec(file).lm_head is None
    assert_equal_weights(file, plain)


def _llama3_divisors() -> np.ndarray[Any, Any]:
    """Return the divisors as llama.cpp's converter computes them."""
    frequencies = 1.0 / (10_000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))
    old, low, high, factor = 64, 1.0, 4.0, 8.0
    divisors = []
    for frequency in frequencies:
        length = 2 * np.pi / float(frequency)
        if length < old / high:
            divisors.append(1.0)
        elif length > old / low:
            divisors.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def test_rope_freqs_are_the_scaling_of_llama_3(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", rope_parameters=LLAMA3)
    divisors = _llama3_divisors()
    file, plain = write_gguf(source, tmp_path / "out", extra={"rope_freqs.weight": divisors})
    assert_equal_weights(file, plain)
    for length in (32, 512):
        mine, theirs = (read_spec(each).for_context(length) for each in (file, plain))
        rope, wanted = (each.layers[0].attention.rope for each in (mine, theirs))
        found = rope.inverse_frequencies(16)
        np.testing.assert_allclose(found, wanted.inverse_frequencies(16), rtol=1e-6)
        assert rope.amplitude == 1.0
    assert len(set(divisors)) > 3  # so the middle of the scaling counts


def test_longrope_and_the_window_of_phi_3_are_read(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 6), np.linspace(2, 9, 6)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    rope |= {"short_factor": short.tolist(), "long_factor": long.tolist()}
    source = make_checkpoint(
        tmp_path / "source",
        "phi3",
        sliding_window=40,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters=rope,
    )
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    file, plain = write_gguf(
        source,
        tmp_path / "out",
        change=lambda writer: writer.add_rope_scaling_attn_factors(math.sqrt(1.5)),
        extra={name: values.astype(np.float32) for name, values in factors.items()},
    )
    assert_equal_weights(file, plain)
    for length in (32, 512):
        mine, theirs = (read_spec(each).for_context(length) for each in (file, plain))
        found, wanted = (each.layers[0].attention for each in (mine, theirs))
        assert found.sliding_window == wanted.sliding_window == 40
        assert (found.rope.dim, found.rope.original_max_len) == (12, 64)
        np.testing.assert_allclose(
            found.rope.inverse_frequencies(16), wanted.rope.inverse_frequencies(16), rtol=1e-6
        )
        assert found.rope.amplitude == pytest.approx(wanted.rope.amplitude)
        assert found.rope.amplitude > 1.2


def test_one_of_two_tables_of_divisors_is_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "phi3")
    extra = {"rope_factors_long.weight": np.ones(8, np.float32)}
    file, _ = write_gguf(source, tmp_path / "out", extra=extra)
    with pytest.raises(ModelError, match=r"has rope_factors_long.weight; supported is rope_freqs"):
        read_spec(file)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_in_several_files_is_loaded_from_the_first(tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path / "source", family)
    whole, plain = write_gguf(source, tmp_path / "whole")
    file, _ = write_gguf(source, tmp_path / "out", tensors_each=5)
    files = find_files(file)
    assert file.name == f"m-00001-of-0000{len(files)}.gguf"
    assert files == sorted(file.parent.glob("m-*.gguf"))
    assert len(files) > 3
    assert model_name(str(file)) == "m"
    assert gguf_config(file) == gguf_config(whole)
    assert_equal_weights(file, plain)


def _swap(files: list[Path]) -> None:
    one, two = files[1].read_bytes(), files[2].read_bytes()
    files[1].write_bytes(two)
    files[2].write_bytes(one)


def _rename(files: list[Path]) -> None:
    for i, part in enumerate(files):
        part.rename(part.with_name(f"part-{i}.gguf"))


@pytest.mark.parametrize(
    ("damage", "first", "message"),
    [
        (lambda files: files[2].unlink(), None, "lacks m-00003-of-00005.gguf; get all 5 files"),
        (lambda files: [each.unlink() for each in files[1:]], None, "00004-of-.* and others; get"),
        (lambda files: None, 1, "is part 2 of 5; give the first: .*m-00001-of-00005.gguf"),
        (_swap, None, "m-00002-of-00005.gguf is not part 2 of 5, by its metadata"),
        (_rename, "part-0.gguf", "is part 1 of 5; name it part-0-00001-of-00005.gguf"),
        (
            lambda files: files[0].write_bytes(
                files[0].read_bytes().replace(b"split.tensors.count", b"split.tensors.tnuoc")
            ),
            None,
            None,
        ),
        (lambda files: files[3].write_bytes(b"GGUF"), None, "m-00004-of-00005.gguf is cut short"),
    ],
)
def test_damaged_parts_are_refused_by_name(
    tmp_path: Path,
    source: Path,
    damage: Callable[[list[Path]], Any],
    first: int | str | None,
    message: str | None,
) -> None:
    file, _ = write_gguf(source, tmp_path / "out", tensors_each=5)
    files = find_files(file)
    damage(files)
    given = files[first or 0] if not isinstance(first, str) else file.with_name(first)
    if message is None:
        assert len(find_files(given)) == len(files)
        return
    with pytest.raises(ModelError, match=message):
        read_spec(given)


def test_tensors_of_parts_are_counted(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out", tensors_each=5)
    edit = _after(b"split.tensors.count", "I", 9, 4)
    file.write_bytes(edit(file.read_bytes()))
    with pytest.raises(ModelError, match=r"split.tensors.count is 9; all 5 files have 21"):
        read_spec(file)


def test_sampling_defaults_are_read(tmp_path: Path, source: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_min_p(0.05)
        writer.add_sampling_penalty_repeat(1.05)
        writer.add_sampling_mirostat(2)

    file, _ = write_gguf(source, tmp_path / "out", change=change)
    assert gguf_sampling(file) == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.05,
        "general.sampling.mirostat": 2,
    }


def test_yarn_is_read(tmp_path: Path, source: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)

    file, _ = write_gguf(source, tmp_path / "out", change=change)
    rope = read_spec(file).layers[0].attention.rope
    assert (rope.scaling, rope.factor, rope.original_max_len) == ("yarn", 4.0, 128)


def test_all_tokens_that_end_an_answer_are_named(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out", change=lambda writer: writer.add_eot_token_id(9))
    assert gguf_config(file)["eos_token_id"] == [2, 9, 0]


def test_a_file_is_named_like_a_model(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    assert locate(str(file)) == file
    assert find_files(file) == [file]
    assert model_name(str(file)) == "m"
    assert is_like_a_model(str(file))
    assert remote("models/absent.gguf") is None
    with pytest.raises(ModelError, match=r"no checkpoint at models/absent.gguf: give .* a GGUF"):
        locate("models/absent.gguf")
    with pytest.raises(ConfigError, match=r"--revision is v1; .* is a GGUF file on this machine"):
        locate(str(file), "v1")


def test_a_file_in_the_hubs_cache_has_its_own_name(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    blob = file.rename(tmp_path / "0a1b2c3d")
    (snapshot / "m-Q8_0.gguf").symlink_to(blob)
    assert model_name(str(snapshot / "m-Q8_0.gguf")) == "m-Q8_0"


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.BF16], ids=lambda kind: kind.name)
def test_only_plain_rows_stay_in_the_file(tmp_path: Path, source: Path, kind: Type) -> None:
    """A dequantised embedding takes memory, in the compute dtype."""
    file, _ = write_gguf(source, tmp_path / "out", kind)
    spec = read_spec(file)
    weights = Weights(file, spec)
    stays = kind is Type.BF16
    assert weights.stays_in_file(spec.embedding) == stays
    model = CpuModel(spec, weights, torch.float32)
    assert model.saved_bytes == (spec.embedding.size * 4 if stays else 0)


def test_without_a_base_the_rotary_embedding_has_llama_cpps(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "mixtral")
    file, _ = write_gguf(source, tmp_path / "out")
    data = file.read_bytes()
    assert data.count(b"llama.rope.freq_base") == 1
    file.write_bytes(data.replace(b"llama.rope.freq_base", b"other.rope.freq_base"))
    assert read_spec(file).layers[0].attention.rope.theta == 10_000.0


def test_a_factor_of_1_without_scaling_has_no_effect(tmp_path: Path, source: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("llama.rope.scaling.factor", 1.0)

    file, _ = write_gguf(source, tmp_path / "out", change=change)
    assert read_spec(file).layers[0].attention.rope.scaling == "none"


def test_the_missing_package_is_named(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    monkeypatch.setattr("weft.models.checkpoint.gguf_header.find_spec", lambda name: None)
    for needs in (find_files, lambda file: Weights(file, read_spec(file))):
        with pytest.raises(ModelError, match=r"pip install 'weft\[gguf\]'"):
            needs(file)


def _at(offset: int, form: str, *values: Any) -> Callable[[bytes], bytes]:
    """Overwrite bytes."""

    def edit(data: bytes) -> bytes:
        new = struct.pack(f"<{form}", *values)
        return data[:offset] + new + data[offset + len(new) :]

    return edit


def _after(text: bytes, form: str, value: int, skip: int = 0) -> Callable[[bytes], bytes]:
    """Overwrite bytes after a name in the header."""
    return lambda data: _at(data.index(text) + len(text) + skip, form, value)(data)


Q = b"blk.1.attn_q.weight"
TOKENS = b"tokenizer.ggml.tokens"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: b"", "m.gguf is empty"),
        (_at(0, "4s", b"GGML"), "is not a GGUF file: it begins with b'GGML'"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1", "git lfs pull"),
        (_at(4, "I", 1), "has GGUF version 1; supported is 2 or 3"),
        (_at(4, "I", 4), "has GGUF version 4; supported is 2 or 3"),
        (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], "is a big-endian GGUF file"),
        (lambda data: data[:20], "is cut short within its header"),
        (lambda data: data[:2000], "is cut short within its header"),
        (lambda data: data[:-4000], "is cut short within output_norm.weight|within token_embd|cut"),
        (_at(8, "Q", 2**60), "is cut short within its header|has 0 axes|not UTF-8"),
        (_at(16, "Q", 2**60), "is cut short within its header|is not UTF-8|unknown type"),
        (_after(TOKENS, "Q", 2**62, 8), "a length there is wrong: tokenizer.ggml.tokens ends"),
        (_after(TOKENS, "I", 9, 4), "tokenizer.ggml.tokens is an array of the unknown type 9"),
        (_after(TOKENS, "I", 77), "tokenizer.ggml.tokens has the unknown type 77"),
        (_after(Q, "I", 99), "blk.1.attn_q.weight has 99 axes"),
        (_after(Q, "Q", 65, 4), "blk.1.attn_q.weight has shape .* multiples of 32"),
        (_after(Q, "Q", 0, 4), "blk.1.attn_q.weight has shape"),
        (_after(Q, "Q", 2**63, 4), "is cut short within blk.1.attn_q.weight"),
        (_after(Q, "I", 16, 20), "blk.1.attn_q.weight is IQ2_XXS; supported is F32, F16, Q4_0"),
        (_after(Q, "I", 1000, 20), "blk.1.attn_q.weight is type 1000; supported is F32"),
        (_after(Q, "Q", 2**50, 24), "is cut short within blk.1.attn_q.weight"),
        (_after(Q, "Q", 2**50 + 1, 24), "blk.1.attn_q.weight begins at byte"),
        (_after(Q, "Q", 0, 24), "begins at byte .*, within"),
        (lambda data: data.replace(b"blk.1.attn_q.w", b"blk.1.attn_k.w"), "blk.1.attn_k.* twice"),
        (
            lambda data: data.replace(b"llama.block_count", b"llama.block_tnuoc"),
            "llama.block_count is missing in the metadata",
        ),
        (
            lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_z.weight"),
            "has blk.1.attn_z.weight, which is no part of LlamaForCausalLM: .* its metadata",
        ),
        (
            lambda data: data.replace(b"blk.1.attn_q.weight", b"blk.7.attn_q.weight"),
            "has model.layers.7.self_attn.q_proj.weight, which is no part",
        ),
        (
            _after(b"llama.embedding_length", "I", 128, 4),
            "token_embd.weight has shape .* by its metadata it is",
        ),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, source: Path, edit: Callable[[bytes], bytes], message: str
) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    Weights(file, read_spec(file))
    bad = tmp_path / "bad" / "m.gguf"
    bad.parent.mkdir()
    bad.write_bytes(edit(file.read_bytes()))
    with pytest.raises(ModelError, match=message) as raised:
        Weights(bad, read_spec(bad))
    assert str(bad) in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_uint16("split.count", 3), "split.no is missing in the metadata"),
        (lambda w: w.add_string("general.type", "adapter"), "general.type is 'adapter'"),
        (lambda w: w.add_uint32("general.alignment", 12), "general.alignment is 12"),
        (lambda w: w.add_uint32("llama.expert_used_count", 2), "expert_used_count is 2; supported"),
        (lambda w: w.add_float32("llama.logit_scale", 2.0), "llama.logit_scale is 2.0; weft does"),
        (lambda w: w.add_uint32("llama.attention.sliding_window", 8), "sliding_window is 8"),
        (lambda w: w.add_string("llama.rope.scaling.type", "longrope"), "type is 'longrope'"),
        (lambda w: w.add_float32("llama.rope.scaling.factor", 2.0), "scaling.factor is 2.0"),
    ],
)
def test_metadata_that_weft_does_not_follow_is_refused(
    tmp_path: Path, source: Path, change: Change, message: str
) -> None:
    file, _ = write_gguf(source, tmp_path / "out", change=change)
    with pytest.raises(ModelError, match=message):
        read_spec(file)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"llama", b"gemma", "general.architecture is 'gemma'; supported is llama, qwen2"),
        (b"llama", b"lama,", "general.architecture is 'lama,'; supported is llama, qwen2"),
        (b"llama", b"qwen3", "lacks|no part of Qwen3"),
    ],
)
def test_another_architecture_is_refused(
    tmp_path: Path, source: Path, old: bytes, new: bytes, message: str
) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    file.write_bytes(file.read_bytes().replace(old, new))
    with pytest.raises(ModelError, match=message):
        Weights(file, read_spec(file))


def test_nan_in_a_scale_is_refused(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    info = read_header(file).tensors["blk.0.ffn_up.weight"]
    data = bytearray(file.read_bytes())
    data[info.start : info.start + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(data)
    spec = read_spec(file)
    up = next(weight for weight in spec.weights if weight.name.endswith("0.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"blk.0.ffn_up.weight holds nan; the file is damaged"):
        Weights(file, spec).read(up)


def test_experts_that_the_metadata_does_not_have_are_refused(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe")
    file, _ = write_gguf(source, tmp_path / "out")
    file.write_bytes(_after(b"qwen3moe.expert_count", "I", 4, 4)(file.read_bytes()))
    with pytest.raises(
        ModelError, match=r"blk.0.ffn_\w+_exps.weight has 8 experts; its metadata 4"
    ):
        Weights(file, read_spec(file))


def test_a_changed_file_is_read_again(tmp_path: Path, source: Path) -> None:
    file, _ = write_gguf(source, tmp_path / "out")
    assert gguf_config(file)["num_hidden_layers"] == 2
    file.write_bytes(_after(b"llama.block_count", "I", 1, 4)(file.read_bytes()) + b"\0")
    assert gguf_config(file)["num_hidden_layers"] == 1


def test_the_config_has_fields_that_families_read(tmp_path: Path, source: Path) -> None:
    from weft.models.spec.build import unread_fields

    file, _ = write_gguf(source, tmp_path / "out")
    config = gguf_config(file)
    assert not unread_fields(config)
