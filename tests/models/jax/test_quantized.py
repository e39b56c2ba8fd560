"""jax takes the numbers that a quantised checkpoint stands for."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from support.checkpoints import make_checkpoint
from support.quantized import FORMATS, quantize

from weft.models.checkpoint.locate import read_spec
from weft.models.jax.mesh import make_mesh
from weft.models.jax.parameters import load
from weft.models.spec.layout import Layout


@pytest.mark.parametrize("form", ["fp8, blocks", "int4, groups, zero points", "awq", "nvfp4"])
@pytest.mark.parametrize(("family", "tp", "ep"), [("llama", 2, 1), ("qwen3_moe", 2, 2)])
def test_parameters_are_those_of_the_plain_checkpoint(
    family: str, tp: int, ep: int, form: str, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", family)
    mesh = make_mesh(jax.devices(), tp, ep)
    quantized, plain = (
        load(path, read_spec(path), Layout(tp, ep), mesh, "bfloat16")
        for path in quantize(source, tmp_path, FORMATS[form])
    )
    assert jax.tree.leaves(plain)
    jax.tree.map(np.testing.assert_array_equal, quantized, plain)
