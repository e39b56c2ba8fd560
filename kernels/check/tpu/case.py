"""A TPU op's check: its arguments, its mesh, and its oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Draw = Callable[[np.random.Generator], np.ndarray]

TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "int32": 0.0}
"""Absolute tolerance, and relative to the largest number in the oracle's result."""


@dataclass(frozen=True, slots=True)
class Input:
    """An argument, over all devices together.

    Attributes:
        shape, dtype: its shape and dtype.
        spec: how devices share it.
        draw: makes its numbers; None draws normal numbers.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec
    dtype: Any = jnp.float32
    draw: Draw | None = None

    def make(self, rng: np.random.Generator) -> np.ndarray:
        """Make its numbers."""
        value = rng.standard_normal(self.shape) if self.draw is None else self.draw(rng)
        return np.asarray(jnp.asarray(value, self.dtype))


@dataclass(frozen=True, slots=True)
class Case:
    """An op at one shape on one mesh.

    Attributes:
        op: the op's name.
        axes: the mesh axes and their sizes.
        kernel, oracle: run in `shard_map`, with the same arguments and results.
        inputs: the arguments.
        out_specs: the results' specs.
        cores: cores per device in the interpreter.
        note: tells it from other cases.
        donated: arguments whose memory the result may reuse, when compiled.
    """

    op: str
    axes: Mapping[str, int]
    kernel: Callable[..., Any]
    oracle: Callable[..., Any]
    inputs: Sequence[Input]
    out_specs: Any
    cores: int = 1
    note: str = ""
    donated: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The op, the mesh, and the note."""
        sizes = ",".join(f"{axis}={size}" for axis, size in self.axes.items())
        return " ".join(part for part in (self.op, sizes, self.note) if part)

    @property
    def size(self) -> int:
        """Devices in the mesh."""
        return math.prod(self.axes.values())

    def mapped(
        self, function: Callable[..., Any], mesh: Mesh, donated: tuple[int, ...] = ()
    ) -> Any:
        """Make a function over whole arrays, to run `function` on every device."""
        return jax.jit(
            jax.shard_map(
                function,
                mesh=mesh,
                in_specs=tuple(each.spec for each in self.inputs),
                out_specs=self.out_specs,
                check_vma=False,
            ),
            donate_argnums=donated,
        )

    def compare(self) -> list[str]:
        """Run both on this process's devices; describe how the results differ."""
        devices = np.array(jax.devices()[: self.size]).reshape(tuple(self.axes.values()))
        mesh = Mesh(devices, tuple(self.axes))
        rng = np.random.default_rng(7)
        arrays = [
            jax.device_put(each.make(rng), NamedSharding(mesh, each.spec)) for each in self.inputs
        ]
        got = jax.block_until_ready(self.mapped(self.kernel, mesh)(*arrays))
        want = self.mapped(self.oracle, mesh)(*arrays)
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        return [text for mine, oracle in pairs for text in _differ(mine, oracle)]


def _differ(got: jax.Array, want: jax.Array) -> list[str]:
    if got.shape != want.shape or got.dtype != want.dtype:
        return [f"wrong: {got.dtype}{list(got.shape)}, not {want.dtype}{list(want.shape)}"]
    mine, oracle = (np.asarray(x, np.float64) for x in (got, want))
    finite = np.isfinite(oracle)
    if np.isnan(mine).any():
        return ["wrong: memory that nobody wrote to is in the result"]
    if not np.array_equal(mine[~finite], oracle[~finite]):
        return ["wrong: not infinite where it should be"]
    error = float(np.max(np.abs(mine[finite] - oracle[finite]), initial=0.0))
    scale = 1.0 + float(np.max(np.abs(oracle[finite]), initial=0.0))
    allowed = TOLERANCE[str(got.dtype)] * scale
    return [f"wrong: off by {error:.3g}, {allowed:.3g} is allowed"] if error > allowed else []
