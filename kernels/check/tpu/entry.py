"""Is there a barrier before a kernel first touches another device? Read from its jaxpr.

A remote DMA, or a signal to another device's semaphore, is safe only after that device has entered
the kernel. So on every path from the kernel's start there must first be a signal to other devices'
barrier semaphore, and a wait on the own one. A kernel without `collective_id` needs none: Mosaic
puts a barrier of all devices before it.

Order is that of the program; a barrier in one branch of a `cond` counts only behind it if all
branches have it, and what is in a loop's body is taken to run at least once. That the devices of
the barrier are those that are touched is not read here, but asked of the vector clocks when the
kernel is interpreted (interpreter.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core


@dataclass(frozen=True, slots=True)
class _Barrier:
    """What the path to here has: own semaphores, a signal to others, a wait."""

    signalled: bool = False
    waited: bool = False


def missing_barriers(jaxpr: jax.core.ClosedJaxpr) -> list[str]:
    """What the kernels in a traced function touch too early."""
    return [finding for kernel in _kernels(jaxpr.jaxpr) for finding in _check(kernel)]


def _kernels(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            yield eqn
        else:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from _kernels(inner)


def _check(kernel: core.JaxprEqn) -> list[str]:
    if getattr(kernel.params["compiler_params"], "collective_id", None) is None:
        return []
    findings: list[str] = []
    _walk(kernel.params["jaxpr"], {}, _Barrier(), findings)
    name = kernel.params["name"] or "kernel"
    return [f"missing barrier: {name} {finding}" for finding in findings[:1]]


def _walk(
    jaxpr: core.Jaxpr, barriers: dict[core.Var, bool], at: _Barrier, findings: list[str]
) -> _Barrier:
    """What the path has after a jaxpr.

    Args:
        barriers: variables of this jaxpr that are barrier semaphores.
    """
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        is_barrier = any(isinstance(v, core.Var) and v in barriers for v in eqn.invars)
        if name == "get_barrier_semaphore":
            barriers[eqn.outvars[0]] = True
        elif name == "semaphore_signal":
            remote = _target(eqn, 3) is not None
            if is_barrier:
                at = _Barrier(at.signalled or remote, at.waited)
            elif remote and not (at.signalled and at.waited):
                findings.append("signals another device first")
        elif name == "semaphore_wait" and is_barrier:
            at = _Barrier(at.signalled, True)
        elif name == "dma_start":
            if _target(eqn, -1) is not None and not (at.signalled and at.waited):
                findings.append("writes to another device first")
        elif name == "cond":
            operands = eqn.invars[1:]
            ends = [
                _inner(b.jaxpr, operands, barriers, at, findings) for b in eqn.params["branches"]
            ]
            at = _Barrier(all(e.signalled for e in ends), all(e.waited for e in ends))
        else:
            for inner in core.jaxprs_in_params(eqn.params):
                at = _inner(inner, eqn.invars, barriers, at, findings)
    return at


def _inner(
    jaxpr: core.Jaxpr,
    operands: Any,
    barriers: dict[core.Var, bool],
    at: _Barrier,
    findings: list[str],
) -> _Barrier:
    names = {}
    for inner, outer in zip(reversed(jaxpr.invars), reversed(operands), strict=False):
        if isinstance(outer, core.Var) and outer in barriers:
            names[inner] = True
    return _walk(jaxpr, names, at, findings)


def _target(eqn: core.JaxprEqn, place: int) -> Any:
    """The device that a signal or a DMA goes to; None for this one."""
    key = "tree" if "tree" in eqn.params else "args_tree"
    return jax.tree.unflatten(eqn.params[key], eqn.invars)[place]
