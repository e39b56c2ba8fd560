"""Loading: missing and unexpected tensors, and the memory that loading takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import make_checkpoint
from transformers import AutoModelForCausalLM

from weft.errors import ModelError
from weft.models.checkpoint.locate import INDEX_FILE, SINGLE_FILE, read_spec
from weft.models.checkpoint.weights import Weights
from weft.models.spec.layout import WHOLE, Layout
from weft.models.spec.spec import MlpSpec, MoeSpec

Tensors = dict[str, torch.Tensor]
NOBODY = 65534
EMBEDDING = "model.embed_tokens.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint in one file."""
    return make_checkpoint(tmp_path, "llama")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A checkpoint in several files."""
    path = make_checkpoint(tmp_path, "llama", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def _edit(path: Path, change: Callable[[Tensors], object], file: str = SINGLE_FILE) -> Path:
    """Rewrite one file of a checkpoint after changing its tensors."""
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file)
    return path


def _load(path: Path) -> Weights:
    return Weights(path, read_spec(path))


def test_every_tensor_is_read_as_it_was_written(path: Path) -> None:
    weights, spec = _load(path), read_spec(path)
    written = load_file(path / SINGLE_FILE)
    for weight in spec.weights:
        assert torch.equal(weights.read(weight), written.pop(weight.name))
    assert not written


def test_shards_are_read_like_one_file(sharded: Path) -> None:
    weights, spec = _load(sharded), read_spec(sharded)
    written: Tensors = {}
    for file in sharded.glob("*.safetensors"):
        written |= load_file(file)
    for weight in spec.weights:
        assert torch.equal(weights.read(weight), written[weight.name])


def test_experts_come_in_order(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "mixtral", max_shard_size="50KB")
    moe = read_spec(path).layers[0].feed_forward
    assert isinstance(moe, MoeSpec)
    experts = list(_load(path).read_each(moe.up))
    assert (len(experts), *experts[0].shape) == moe.up.shape
    written: Tensors = {}
    for file in path.glob("*.safetensors"):
        written |= load_file(file)
    for i, expert in enumerate(experts):
        name = f"model.layers.0.block_sparse_moe.experts.{i}.w3.weight"
        assert torch.equal(expert, written[name])


def test_progress_ends_at_the_total(path: Path) -> None:
    spec = read_spec(path)
    calls: list[tuple[int, int]] = []
    weights = Weights(path, spec, lambda done, total: calls.append((done, total)))
    for weight in (*spec.weights, spec.embedding):
        weights.read(weight)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (spec.weight_bytes(), spec.weight_bytes())


def test_declared_extras_are_skipped_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    _edit(
        path,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
                "model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(8),
                "mtp.fc.weight": torch.zeros(8, 25, dtype=torch.int8),
                "v_head.summary.weight": torch.zeros(1, 64),
                "visual.merger.mlp.0.weight": torch.zeros(3, 4),
            }
        ),
    )
    caplog.set_level("INFO", "weft")
    assert _load(path)
    named = "*.rotary_emb.inv_freq, mtp.*, v_head.*, visual.*"
    assert caplog.messages == [f"skipped tensors: 5, 568 bytes: {named}"]
    caplog.clear()
    Weights(path, read_spec(path), layout=Layout(tp=2, rank=1))
    assert caplog.messages == []


def test_a_tied_table_may_be_the_head_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(path / SINGLE_FILE)["model.embed_tokens.weight"]
    _edit(path, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))
    assert torch.equal(_load(path).read(read_spec(path).embedding), embedding)
    untied = {"tie_word_embeddings": False}
    config = json.loads((path / "config.json").read_text()) | untied
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=f"lacks {EMBEDDING}"):
        _load(path)


@pytest.mark.parametrize(
    "family",
    ["qwen3_moe", "mixtral", "glm4_moe", "minimax_m2", "hy_v3", "ernie4_5_moe", "granitemoe"],
)
@pytest.mark.parametrize("layout", [WHOLE, Layout(tp=2, rank=1), Layout(ep=2, rank=1)])
def test_fused_experts_are_those_of_separate_tensors(
    tmp_path: Path, family: str, layout: Layout
) -> None:
    path = make_checkpoint(tmp_path / "separate", family)
    fused = _fused(path, tmp_path / "fused")
    names = load_file(fused / SINGLE_FILE)
    block = "block_sparse_moe" if family == "granitemoe" else "mlp"
    assert f"model.layers.1.{block}.experts.gate_up_proj" in names
    spec, calls = read_spec(path), list[tuple[int, int]]()
    assert read_spec(fused) == spec
    one = Weights(path, spec, layout=layout)
    other = Weights(fused, spec, lambda *call: calls.append(call), layout)
    for weight in spec.weights:
        pairs = zip(one.read_each(weight), other.read_each(weight), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)
    done, total = calls[-1]
    assert done == total == 4 * layout.local(spec).parameters


@pytest.mark.parametrize("layout", [WHOLE, Layout(tp=2, rank=1)])
def test_projections_in_one_tensor_are_cut_apart(tmp_path: Path, layout: Layout) -> None:
    """Phi-3: queries, keys and values are one tensor; so are gate and up."""
    path = make_checkpoint(tmp_path, "phi3")
    spec = read_spec(path)
    tensors, weights = load_file(path / SINGLE_FILE), Weights(path, spec, layout=layout)
    attention, mlp = spec.layers[1].attention, spec.layers[1].feed_forward
    assert isinstance(mlp, MlpSpec)
    for name, parts in {
        "self_attn.qkv_proj": (attention.q, attention.k, attention.v),
        "mlp.gate_up_proj": (mlp.gate, mlp.up),
    }.items():
        whole = tensors[f"model.layers.1.{name}.weight"]
        for part, rows in zip(
            parts, whole.split([each.weight.shape[0] for each in parts]), strict=True
        ):
            own = rows[weights.parts(part.weight)[0]]
            assert torch.equal(weights.read(part.weight), own)


@pytest.mark.parametrize("layout", [WHOLE, Layout(tp=2, rank=1)])
def test_heads_are_sorted_so_that_rotated_pairs_are_half_a_head_apart(
    tmp_path: Path, layout: Layout
) -> None:
    """GLM-4 rotates neighbours in the first half of a head: (0, 1), (2, 3), ... of 16."""
    path = make_checkpoint(tmp_path, "glm")
    spec = read_spec(path)
    weights, attention = Weights(path, spec, layout=layout), spec.layers[0].attention
    order = [0, 2, 4, 6, 8, 9, 10, 11, 1, 3, 5, 7, 12, 13, 14, 15]
    for linear in (attention.k, attention.q):
        for weight in filter(None, (linear.weight, linear.bias)):
            own = load_file(path / SINGLE_FILE)[weight.name][weights.parts(weight)[0]]
            by_head = own.unflatten(0, (-1, spec.head_dim))
            assert torch.equal(weights.read(weight), by_head[:, order].flatten(0, 1))
    inverse = attention.rope.inverse_frequencies(spec.head_dim)
    assert (inverse[:4] > 0).all()
    assert (inverse[4:] == 0).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", [WHOLE, Layout(tp=2, rank=1)])
def test_multipliers_are_in_the_weights(tmp_path: Path, layout: Layout, tied: bool) -> None:
    """Granite: products are in float32, before they are rounded."""
    sizes = {"mlp_bias": True, "tie_word_embeddings": tied}
    path = make_checkpoint(tmp_path, "granite", dtype="bfloat16", **sizes)
    spec, tensors = read_spec(path), load_file(path / SINGLE_FILE)
    weights = Weights(path, spec, layout=layout)
    scales = {"model.embed_tokens.weight": 12.0}
    scales |= {"model.norm.weight": 1 / 96} if tied else {"lm_head.weight": 1 / 8}
    for i in range(2):
        scales[f"model.layers.{i}.self_attn.o_proj.weight"] = 0.22
        scales[f"model.layers.{i}.mlp.down_proj.weight"] = 0.22
        scales[f"model.layers.{i}.mlp.down_proj.bias"] = 0.22
    assert set(scales) < {weight.name for weight in spec.weights}
    for weight in spec.weights:
        expected = tensors[weight.name][weights.parts(weight)]
        if (scale := scales.get(weight.name)) is not None:
            expected = expected.float() * scale
        assert torch.equal(weights.read(weight), expected), weight.name


def test_transposed_experts_are_turned(tmp_path: Path) -> None:
    """Qwen3-VL publishes experts as [experts, hidden, 2 x width] and [experts, width, hidden]."""
    path = make_checkpoint(tmp_path, "qwen3_vl_moe")
    moe = read_spec(path).layers[0].feed_forward
    assert isinstance(moe, MoeSpec)
    before = [list(_load(path).read_each(each)) for each in (moe.gate, moe.up, moe.down)]

    def turn(tensors: Tensors) -> None:
        names = [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]
        experts = [name for name in names if ".experts." in name]
        assert len(experts) == 4
        for name in experts:
            tensors[name] = tensors[name].mT.contiguous()

    _edit(path, turn)
    after = [list(_load(path).read_each(each)) for each in (moe.gate, moe.up, moe.down)]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("family", ["glm4_moe", "bailing_moe"])
def test_layers_that_predict_more_tokens_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    path = make_checkpoint(tmp_path, family)
    name = "model.layers.2.eh_proj.weight"
    _edit(path, lambda tensors: tensors.update({name: torch.zeros(2, 3)}))
    caplog.set_level("INFO", "weft")
    assert _load(path)
    assert caplog.messages == ["skipped tensors: 1, 24 bytes: model.layers.2.*"]
    _edit(path, lambda tensors: tensors.update({name.replace("2", "3"): torch.zeros(2)}))
    with pytest.raises(
        ModelError, match=r"has model\.layers\.3\.eh_proj\.weight, which is no part of"
    ):
        _load(path)


def _fused(path: Path, into: Path) -> Path:
    """Save a checkpoint in transformers 5's in-memory form."""
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(into, save_original_format=False)
    return into


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_damaged_fused_experts_are_named(tmp_path: Path, family: str) -> None:
    path = _fused(make_checkpoint(tmp_path / "separate", family), tmp_path / "fused")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    whole = load_file(path / SINGLE_FILE)[name]
    shape = re.escape(str(tuple(whole[:, 1:].shape)))
    _edit(path, lambda tensors: tensors.update({name: whole[:, 1:].contiguous()}))
    with pytest.raises(ModelError, match=rf"{name} has shape {shape}; by config.json it is "):
        _load(path)
    whole[-1, -1, -1] = torch.nan
    _edit(path, lambda tensors: tensors.update({name: whole}))
    moe = read_spec(path).layers[1].feed_forward
    assert isinstance(moe, MoeSpec)
    weights = _load(path)
    assert len(list(weights.read_each(moe.gate))) == moe.gate.shape[0]
    with pytest.raises(ModelError, match=rf"{name} holds nan; the file is damaged"):
        list(weights.read_each(moe.up))
    _edit(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\..*experts\.0\."):
        _load(path)


@pytest.mark.parametrize("row", [0, -1])
def test_a_tied_model_with_another_lm_head_is_refused(tmp_path: Path, row: int) -> None:
    path = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def change(tensors: Tensors) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row, 0] += 1
        tensors["lm_head.weight"] = head

    _edit(path, change)
    message = "lm_head.weight differs from model.embed_tokens.weight, but tie_"
    with pytest.raises(ModelError, match=message):
        _load(path)
    for other in (torch.zeros(3), torch.zeros(3, dtype=torch.float8_e4m3fn)):
        _edit(path, lambda tensors, other=other: tensors.update({"lm_head.weight": other}))
        with pytest.raises(ModelError, match=message):
            _load(path)


def test_nan_in_a_tied_embedding_is_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "llama", tie_word_embeddings=True)

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][0, 0] = torch.nan
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    _edit(path, change)
    with pytest.raises(ModelError, match=r"model.embed_tokens.weight holds nan"):
        _load(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_not_finite_is_found(path: Path, value: float, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE] = tensors[GATE].to(dtype)
        tensors[GATE][-1, -1] = value

    _edit(path, change)
    weights = _load(path)
    by_name = {weight.name: weight for weight in read_spec(path).weights}
    for name in by_name.keys() - {GATE}:
        weights.read(by_name[name])
    with pytest.raises(ModelError, match=f"{SINGLE_FILE}: {GATE} holds {value}; the file is dam"):
        weights.read(by_name[GATE])


def test_a_sum_that_overflows_is_fine(path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[GATE] = torch.full_like(tensors[GATE], 60_000.0).half()

    _edit(path, change)
    (gate,) = (weight for weight in read_spec(path).weights if weight.name == GATE)
    assert _load(path).read(gate).sum() == float("inf")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"lacks {GATE}"),
        (lambda tensors: tensors.clear(), "lacks model.embed_tokens.weight, .* and 18 more"),
        (
            lambda tensors: tensors.update(x=torch.zeros(1)),
            f"{SINGLE_FILE} has x, which is no part of LlamaForCausalLM: remove it, or correct",
        ),
        (
            lambda tensors: tensors.update({"a.qweight": torch.zeros(1), "b": torch.zeros(1)}),
            f"{SINGLE_FILE} has a.qweight, b, which are part of a quantized weight; config.json",
        ),
        (
            lambda tensors: tensors.update({GATE: tensors[GATE].T.contiguous()}),
            rf"{SINGLE_FILE}: {GATE} has shape \(64, 96\); by config.json it is \(96, 64\)",
        ),
        (
            lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.int8)}),
            rf"{SINGLE_FILE}: {GATE} is I8; supported is F32, BF16, F16",
        ),
        (
            lambda tensors: tensors.update({GATE: tensors[GATE].to(torch.float8_e4m3fn)}),
            rf"{SINGLE_FILE}: {GATE} is F8_E4M3; .* as quantization_config in config.json desc",
        ),
    ],
)
def test_a_wrong_tensor_is_named(
    path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    _edit(path, change)
    with pytest.raises(ModelError, match=message):
        _load(path)


def test_a_file_that_one_may_not_read_is_said_to_be_so() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = make_checkpoint(Path(folder), "llama")
        spec = read_spec(path)
        path.chmod(0o755)
        file = path / SINGLE_FILE
        file.chmod(0o600 if os.geteuid() == 0 else 0)
        refused = pytest.raises(ModelError, match=f"cannot read {file}: Permission denied")
        with _as_nobody(), refused:
            Weights(path, spec)


@contextmanager
def _as_nobody() -> Iterator[None]:
    """Root may read anything."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_mixed_types_are_fine(path: Path) -> None:
    _edit(path, lambda tensors: tensors.update({GATE: tensors[GATE].half()}))
    assert _load(path)


def test_a_bias_that_config_does_not_know_is_not_dropped(path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    _edit(path, lambda tensors: tensors.update({name: torch.zeros(64)}))
    with pytest.raises(ModelError, match=f"has {name}, which"):
        _load(path)


@pytest.mark.parametrize("keep", [0, 4, 100, 5_000, -1])
def test_a_truncated_file_is_named(sharded: Path, keep: int) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=f"{re.escape(str(file))} is truncated"):
        _load(sharded)


def test_bytes_after_the_last_tensor_are_counted(sharded: Path) -> None:
    file = min(sharded.glob("*.safetensors"))
    file.write_bytes(file.read_bytes() + bytes(1234))
    with pytest.raises(ModelError, match=f"{file} has 1,234 bytes after its last tensor; get the"):
        _load(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", "a Git LFS pointer"),
        (bytes(range(256)) * 4, "not a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_said(sharded: Path, content: bytes, message: str) -> None:
    file = min(sharded.glob("*.safetensors"))
    file.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        _load(sharded)


def test_the_first_truncated_tensor_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    by_place = sorted(header, key=lambda name: header[name]["data_offsets"])
    for cut in by_place:
        begin, end = header[cut]["data_offsets"]
        file.write_bytes(content[: 8 + length + (begin + end) // 2])
        with pytest.raises(ModelError, match=f"is truncated within {re.escape(cut)}: "):
            _load(sharded)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    file.unlink()
    with pytest.raises(ModelError, match=f"{re.escape(str(file))} is missing"):
        _load(sharded)


def test_a_tensor_in_two_shards_is_an_error(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    _edit(sharded, lambda tensors: tensors.update({name: tensor}), second.name)
    with pytest.raises(ModelError, match=f"both have {name}"):
        _load(sharded)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "is not JSON"),
        ({}, "has no weight_map"),
        ({"weight_map": {}}, "has no weight_map"),
        ({"weight_map": ["a"]}, "has no weight_map"),
        ({"weight_map": {"a": "../secret.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"a": 3}}, "3 is missing"),
    ],
)
def test_a_broken_index_is_named(sharded: Path, index: object, message: str) -> None:
    text = index if isinstance(index, str) else json.dumps(index)
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(ModelError, match=message):
        _load(sharded)


def test_a_checkpoint_without_safetensors_is_an_error(path: Path) -> None:
    (path / SINGLE_FILE).rename(path / "pytorch_model.bin")
    message = f"has neither {SINGLE_FILE} nor {INDEX_FILE}; it has pytorch_model.bin, pickled"
    with pytest.raises(ModelError, match=message):
        _load(path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-q4.gguf", "it has model-q4.gguf, in llama.cpp's format: give the path of one"),
        ("adapter_model.safetensors", "an adapter without its model: merge it into the model"),
        ("weights.safetensors", "under another name: if that is the whole model, rename it to mod"),
        ("model-00001-of-00002.safetensors", f"which only an index joins: get {INDEX_FILE}, too"),
        ("README.md", f"nor {INDEX_FILE}$"),
    ],
)
def test_other_weights_are_named(path: Path, name: str, message: str) -> None:
    (path / SINGLE_FILE).rename(path / name)
    with pytest.raises(ModelError, match=message):
        _load(path)


def test_a_link_that_leads_nowhere_is_named(path: Path) -> None:
    """As in a hub's cache from which somebody removed the files."""
    (path / SINGLE_FILE).unlink()
    (path / SINGLE_FILE).symlink_to("../../blobs/abc")
    with pytest.raises(ModelError, match=r"is a link to ../../blobs/abc, which does not exist"):
        _load(path)


MEASURE = """
import sys
from pathlib import Path
from weft.models.checkpoint.locate import read_spec
from weft.models.torch.runner import TorchRunner

def memory(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def load(path):
    return TorchRunner.load(
        path, read_spec(path), dtype="auto", threads=1,
        block_size=8, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=8)

tiny, large = map(Path, sys.argv[1:])
load(tiny)
before = memory("VmRSS")
runner = load(large)
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_tensors_do_not_keep_their_files_open(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3_moe")
    spec = read_spec(path)
    weights = Weights(path, spec)
    before = len(list(Path("/proc/self/fd").iterdir()))
    held = [tensor for weight in spec.weights for tensor in weights.read_each(weight)]
    assert len(held) > 50
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_loading_takes_the_model_and_one_tensor(tmp_path: Path) -> None:
    """Peak and resting memory, in a separate process; the tied table is held once."""
    tiny = make_checkpoint(tmp_path / "tiny", "llama", dtype="bfloat16")
    large = tmp_path / "large"
    large.mkdir()
    config = json.loads((tiny / "config.json").read_text()) | {
        "vocab_size": 40_000,
        "hidden_size": 512,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "tie_word_embeddings": True,
    }
    (large / "config.json").write_text(json.dumps(config))
    spec = read_spec(large)
    save_file(
        {weight.name: torch.zeros(weight.shape, dtype=torch.bfloat16) for weight in spec.weights},
        large / SINGLE_FILE,
    )
    model, table = spec.weight_bytes(), 2 * spec.embedding.size
    assert model > 100e6
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tiny), str(large)],
        capture_output=True,
        text=True,
        check=True,
        timeout=400,
    )
    peak, rest = map(int, result.stdout.split())
    slack = 36e6  # less than the table, which must not be held twice
    assert peak < model + table + slack
    assert rest < model + slack
