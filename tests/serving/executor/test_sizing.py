"""The default tensor-parallel size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tpu_steps

from weft.errors import ModelError
from weft.serving.config.settings import EngineConfig
from weft.serving.executor.placement import Inventory, decided

GIB = 2**30
LLAMA_8B = tpu_steps.LLAMA_8B | {"num_hidden_layers": 32}
"""16.1 GB of weights."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama-8b")
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(folder)


def size(*nodes: Inventory, **settings: object) -> int | None:
    return decided(EngineConfig(**settings), nodes).tp  # type: ignore[arg-type]


def gpus(count: int, gib: int) -> Inventory:
    return Inventory(gpus=(gib * GIB,) * count)


def test_the_fewest_gpus_that_hold_the_model(model: str) -> None:
    assert size(gpus(8, 80), model=model) == 1
    assert size(gpus(8, 16), model=model) == 2
    assert size(gpus(8, 8), model=model) == 4
    assert size(Inventory(gpus=(80 * GIB, 16 * GIB)), model=model) == 2, "the smallest GPU decides"


def test_a_size_that_heads_do_not_allow_is_left_out(model: str) -> None:
    assert size(gpus(3, 8), model=model) == 2, "lacks memory, which loading explains"


def test_other_settings_share_the_gpus(model: str) -> None:
    assert size(gpus(4, 16), model=model, dp=2) == 2
    assert size(gpus(4, 16), model=model, pp=2) == 1
    assert size(gpus(4, 16), model=model, tp=4) == 4
    assert size(gpus(4, 24), model=model) == 1
    assert size(gpus(4, 24), model=model, memory_fraction=0.5) == 2


def test_a_longer_context_may_need_more(tmp_path: Path) -> None:
    long = LLAMA_8B | {"max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(long))
    assert size(gpus(8, 24), model=str(tmp_path), max_model_len=8192) == 1
    assert size(gpus(8, 24), model=str(tmp_path)) == 2
    assert size(gpus(8, 32), model=str(tmp_path)) == 2
    assert size(gpus(8, 32), model=str(tmp_path), kv_cache_dtype="fp8") == 1


def test_the_fewest_tpus_that_hold_the_model(model: str) -> None:
    assert size(Inventory(tpus=(16 * GIB,) * 8), model=model) == 2
    assert size(Inventory(tpus=(32 * GIB,) * 4), model=model) == 1


def test_where_devices_may_differ_it_is_one() -> None:
    """The model is not even looked for."""
    none = {"model": "/does/not/exist"}
    assert size(Inventory(), **none) == 1
    assert size(gpus(1, 80), **none) == 1
    assert size(gpus(4, 80), gpus(4, 80), nodes=2, **none) == 1
    assert size(gpus(8, 80), device="cpu", **none) == 1
    with pytest.raises(ModelError, match="/does/not/exist"):
        size(gpus(8, 80), **none)
