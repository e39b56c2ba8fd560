"""What `weft compile` prints; what it compiles is in tests/models/jax/test_aot.py."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tpu_steps import LLAMA_8B, QWEN3_MOE

from weft.errors import ConfigError
from weft.models.checkpoint.locate import read_spec
from weft.models.jax.aot import Compiled
from weft.models.jax.overlap import Collective
from weft.models.plan.choices import Limits, choices
from weft.models.plan.hardware import read_slice
from weft.serving.cli import compile
from weft.serving.config.settings import EngineConfig

CONFIG = EngineConfig(
    model="m", backend="jax", max_num_seqs=8, max_num_batched_tokens=256, max_model_len=2048
)


def test_the_report_tells_traffic_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    rings = [Collective("all_gather_matmul", 2**20, 1), Collective("all_gather_matmul", 2**20, 1)]
    step = Compiled(
        *("512 tokens, 64 pages each", 2**30, 2**20, 3.0),
        collectives=[*rings, Collective("all-reduce", 2**20, 0)],
        kernels={"write_pages": 2, "all_gather_matmul": 2},
    )
    plain = Compiled("8 decodes, 64 pages each", 2**30, 2**10, 1.0, [], {})
    compile._print_report({"weights": 2**30, "left": 2**29}, [step, plain], 4096, 2**34)
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].split()[-3:] == ["3.0", "MiB", "67%"]
    assert lines[6].split()[-1] == "-"
    assert lines[8:] == [
        "512 tokens, 64 pages each",
        "  2 x all_gather_matmul, 2.0 MiB, 2 of them beside a product",
        "  1 x all-reduce, 1.0 MiB, 0 of them beside a product",
        "  kernels: 2 x all_gather_matmul, 2 x write_pages",
        "",
        "compiled in 4.0 s",
    ]


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (LLAMA_8B, "v5e:1x1, with --tp 1"),
        (LLAMA_8B | {"intermediate_size": 48 * 14336}, "v5e:2x2, with --tp 4"),
        (QWEN3_MOE | {"num_hidden_layers": 48}, "v5e:2x4, with --tp 8"),
    ],
)
def test_the_smallest_slice_that_fits_is_named(
    tmp_path: Path, model: dict[str, object], says: str
) -> None:
    """One size smaller, a chip's ledger refuses the model."""
    (tmp_path / "config.json").write_text(json.dumps(model))
    spec = read_spec(tmp_path)
    told = compile._slice_that_fits(CONFIG, spec, "bfloat16", "v5e")
    assert told == f"it would fit on {says}"
    tp = int(says.rpartition(" ")[2])
    config = replace(CONFIG, tp=tp)
    assert compile._ledger(config, spec, "bfloat16", 16, 2048, "v5e").tokens >= 2048
    if tp > 1:
        config = replace(CONFIG, tp=tp // 2)
        with pytest.raises(ConfigError):
            compile._ledger(config, spec, "bfloat16", 16, 2048, "v5e")


def test_the_planner_divides_a_chip_as_the_compiler_does(tmp_path: Path) -> None:
    """The sampler's state has its memory in both."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    spec = read_spec(tmp_path)
    config = replace(CONFIG, tp=4, max_num_seqs=4096, max_num_batched_tokens=4096)
    limits = Limits(
        max_model_len=8192,
        max_num_seqs=4096,
        max_num_batched_tokens=4096,
        block_size=64,
        memory_fraction=config.capacity.memory_fraction,
    )
    found = choices(spec, read_slice("v5e:2x2"), limits, dtype="bfloat16")
    (four,) = (choice for choice in found if choice.layout.tp == 4)
    assert four.ledger == compile._ledger(config, spec, "bfloat16", 64, 8192, "v5e")
    assert four.ledger.tokens < 4096 * 8192


def test_no_slice_is_named_for_a_model_that_does_not_divide(tmp_path: Path) -> None:
    large = LLAMA_8B | {"intermediate_size": 48 * 14336, "num_attention_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(large | {"num_key_value_heads": 1}))
    told = compile._slice_that_fits(CONFIG, read_spec(tmp_path), "bfloat16", "v5e")
    assert told == "no v5e slice over which it can be split is large enough"


def test_memory_for_the_cache_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    config = replace(CONFIG, kv_cache_memory=30 << 30, max_num_seqs=4096)
    told = compile._slice_that_fits(config, read_spec(tmp_path), "bfloat16", "v5e")
    assert "1x1" not in told
