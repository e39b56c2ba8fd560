"""jax takes the numbers that a quantised checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.quantized import EXPERT_FORMATS, FORMATS, Format, quantize, stack_experts

from weft.models.checkpoint.locate import read_spec
from weft.models.jax.mesh import make_mesh
from weft.models.jax.parameters import load
from weft.models.spec.layout import Layout


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("family", "tp", "ep"), [("llama", 2, 1), ("qwen3_moe", 2, 2)])
@pytest.mark.sweep
def test_parameters_are_those_of_the_plain_checkpoint(
    family: str, tp: int, ep: int, form: str, tmp_path: Path
) -> None:
    compare(make_checkpoint(tmp_path / "source", family), FORMATS[form], tp, ep)


@pytest.mark.parametrize("form", EXPERT_FORMATS)
@pytest.mark.parametrize(("tp", "ep"), [(2, 2)])
def test_stacked_experts_are_those_of_the_plain_checkpoint(
    tp: int, ep: int, form: str, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_moe", moe_intermediate_size=96)
    stack_experts(source, transposed=True)
    compare(source, EXPERT_FORMATS[form], tp, ep)


def compare(source: Path, form: Format, tp: int, ep: int) -> None:
    """Compare what jax loads from a quantised and a plain checkpoint."""
    mesh = make_mesh(jax.devices(), tp, ep)
    quantized, plain = (
        load(path, read_spec(path), Layout(tp, ep), mesh, "bfloat16")
        for path in quantize(source, source.parent, form)
    )
    assert jax.tree.leaves(plain)
    jax.tree.map(np.testing.assert_array_equal, quantized, plain)
