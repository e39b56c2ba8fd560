"""Compiles a model's steps with the TPU compiler, for a detached slice.

It compiles the same programs as `JaxRunner.warm_up` would on that slice, from shapes alone, without
reading weights. The compiler reports how much HBM a step needs, and refuses a step that does not
fit.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from weft.errors import ConfigError
from weft.kernels.devices import DEVICES
from weft.models.jax.buckets import Buckets
from weft.models.jax.kernels import Choice
from weft.models.jax.mesh import make_mesh
from weft.models.jax.overlap import Collective, collectives, mosaic_kernels
from weft.models.jax.platform import described_devices
from weft.models.jax.program import Program
from weft.models.spec.layout import Layout
from weft.models.spec.spec import ModelSpec

CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
"""Chips that steps are compiled for."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """The compiler's report on one program; bytes are per chip.

    Attributes:
        name: the program.
        arguments: weights, cache and other buffers that live before and after it.
        temporaries: additional bytes while it runs.
        seconds: compile time.
        collectives: the collectives in its schedule.
        kernels: number of calls of each kernel.
    """

    name: str
    arguments: int
    temporaries: int
    seconds: float
    collectives: list[Collective]
    kernels: dict[str, int]


class DoesNotFitError(ConfigError):
    """The compiler refused a step because it needs too much memory."""


def chip_of(topology: str) -> str:
    """Return the chip in a topology such as v5e:4x4.

    Raises:
        ConfigError: the chip is unknown.
    """
    chip = topology.partition(":")[0]
    if chip not in CHIPS or ":" not in topology:
        raise ConfigError(
            f"--for is {topology!r}; it must be a slice such as v5e:2x4, of {', '.join(CHIPS)}"
        )
    return chip


def hbm_bytes(chip: str) -> int:
    """Return the bytes of HBM that the compiler grants a program on one device."""
    return DEVICES[chip].memory


def compile_model(
    spec: ModelSpec,
    topology: str,
    layout: Layout,
    *,
    dtype: str,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    kernels: Choice,
    progress: Callable[[str, int, int], None],
) -> list[Compiled]:
    """Compile all programs that serving the model needs.

    Args:
        spec: the whole model.
        topology: the slice, such as v5e:2x4.
        layout: tp and ep.
        dtype: compute dtype.
        block_size, num_blocks: the KV cache's shape.
        max_num_seqs: number of slots.
        max_num_batched_tokens: maximum number of tokens in a step.
        max_model_len: maximum number of tokens in a request.
        kernels: --kernels.
        progress: called with the next program's name, the number done, and the total.

    Raises:
        ConfigError: the slice does not exist, or does not have `layout.tp` chips.
        DoesNotFitError: a step needs too much memory; with the compiler's words.
    """
    devices = described_devices(topology)
    if len(devices) != layout.tp:
        raise ConfigError(
            f"--tp is {layout.tp}; {topology} has {len(devices)} devices, so it must be that many"
        )
    mesh = make_mesh(devices, layout.tp, layout.ep)
    buckets = Buckets(
        *(spec, layout, mesh, dtype),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        kernels=kernels,
    )
    program = Program(
        *(spec, layout, mesh),
        dtype=dtype,
        block_size=block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        buckets=buckets.all(),
        kernels=kernels,
    )
    tasks, results = list(program.tasks()), []
    for done, task in enumerate(tasks):
        progress(task.name, done, len(tasks))
        begin = time.perf_counter()
        try:
            compiled = task.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise DoesNotFitError(f"{task.name} does not fit: {_reason(str(error))}") from None
        results.append(_report(task.name, compiled, time.perf_counter() - begin))
    progress("", len(tasks), len(tasks))
    return results


def _report(name: str, compiled: Any, seconds: float) -> Compiled:
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    return Compiled(
        name,
        arguments=memory.argument_size_in_bytes,
        # Outputs that do not reuse an argument's memory need their own.
        temporaries=memory.temp_size_in_bytes
        + max(0, memory.output_size_in_bytes - memory.alias_size_in_bytes),
        seconds=seconds,
        collectives=collectives(hlo),
        kernels=mosaic_kernels(hlo),
    )


def _reason(message: str) -> str:
    """Extract the compiler's sentence about the memory."""
    found = re.search(r"(Used [^.]*\.?\d* of [^.]*\.?\d*\w* \w+\. Exceeded [^.]*\.\d*\w?)", message)
    return found[1] if found else message.splitlines()[0]
