"""Checks that a barrier precedes a kernel's first access to another device, from its jaxpr.

A remote DMA, or a signal to another device's semaphore, is safe only after that device has entered
the kernel. So every path from the kernel's start must first signal other devices' barrier
semaphore, and wait on its own. A kernel without `collective_id` needs none, because Mosaic puts a
barrier among all devices before it.

Program order counts. A barrier in one branch of a `cond` counts after it only if all branches have
one. A loop's body is assumed to run at least once. Whether the barrier's devices are the accessed
ones is not checked here: the interpreter's vector clocks check that (kernels/interpreter/tpu.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core


@dataclass(frozen=True, slots=True)
class _Barrier:
    """Barrier state on a path: a signal to others, a wait."""

    signalled: bool = False
    waited: bool = False


def missing_barriers(jaxpr: jax.core.ClosedJaxpr) -> list[str]:
    """List early accesses in a traced function's kernels."""
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
    """Follow a jaxpr and return the barrier state after it.

    Args:
        jaxpr: the code.
        barriers: its barrier semaphores.
        at: the state before it.
        findings: receives early accesses.
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
    """Return a signal's or a DMA's target device; None for this one."""
    key = "tree" if "tree" in eqn.params else "args_tree"
    return jax.tree.unflatten(eqn.params[key], eqn.invars)[place]
