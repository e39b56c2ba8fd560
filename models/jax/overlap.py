"""Finds collectives beside products, in a compiled step's schedule.

In scheduled HLO, an asynchronous collective is a start and a done; the chip works on the
instructions between them. Its bytes are hidden if a product is among these. A collective without a
start hides nothing. A Pallas kernel's sent bytes (from its cost estimate) are hidden if the kernel
multiplies meanwhile.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

KINDS = "all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all"
ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\S.*?) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_SENT = re.compile(r'"remote_bytes_transferred":"(\d+)"')
_PRODUCTS = {"dot", "convolution"}

OVERLAPPED = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_reduce_scatter_torus"}
"""Kernels that send during their products."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective in a schedule.

    Attributes:
        kind: such as "all-gather", or a kernel's name.
        bytes: its result's bytes on one chip; for a kernel, the bytes that a chip sends.
        products: products between its start and its end; 1 for an overlapping kernel.
    """

    kind: str
    bytes: int
    products: int


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    shape: str
    op: str
    rest: str


def collectives(hlo: str) -> list[Collective]:
    """List every collective in a scheduled module, in textual order."""
    computations = _computations(hlo)
    with_products: set[str] = set()
    # A fusion counts as a product if it calls one, at any depth.
    for _ in computations:
        found = {
            name
            for name, body in computations.items()
            if any(_is_product(instruction, with_products) for instruction in body)
        }
        if found == with_products:
            break
        with_products = found
    return [
        instruction
        for body in computations.values()
        for instruction in _of_computation(body, with_products)
    ]


def mosaic_kernels(hlo: str) -> dict[str, int]:
    """Count a module's calls to each Mosaic kernel."""
    names = (_kernel(instruction) for body in _computations(hlo).values() for instruction in body)
    return dict(Counter(name for name in names if name))


def hidden_share(found: list[Collective]) -> float:
    """Return the share of collective bytes with a product beside them; 1 without collectives."""
    total = sum(instruction.bytes for instruction in found)
    return (
        sum(instruction.bytes for instruction in found if instruction.products) / total
        if total
        else 1.0
    )


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            body = found.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            body.append(_Instruction(*match.groups()))
        elif body:  # a kernel's description spans several lines
            body[-1] = replace(body[-1], rest=f"{body[-1].rest}\n{line}")
    return found


def _is_product(instruction: _Instruction, with_products: set[str]) -> bool:
    called = re.findall(r"(?:calls|body)=%([\w.\-]+)", instruction.rest)
    return instruction.op in _PRODUCTS or any(name in with_products for name in called)


def _of_computation(body: list[_Instruction], with_products: set[str]) -> Iterator[Collective]:
    index = {instruction.name: i for i, instruction in enumerate(body)}
    for i, instruction in enumerate(body):
        if (
            (name := _kernel(instruction))
            and (sent := _SENT.search(instruction.rest))
            and int(sent[1])
        ):
            yield Collective(name, int(sent[1]), int(name in OVERLAPPED))
        kind = _kind(instruction)
        if kind is None:
            continue
        products = 0
        if instruction.op.endswith("-done") and (
            start := re.search(r"%([\w.\-]+)", instruction.rest)
        ):
            between = body[index[start[1]] + 1 : i]
            products = sum(_is_product(other, with_products) for other in between)
            if instruction.op == "async-done":
                kind = _kind_of_async(body[index[start[1]]]) or kind
        yield Collective(kind, _bytes(instruction.shape), products)


def _kernel(instruction: _Instruction) -> str | None:
    """Return the name of an instruction's kernel, without its number."""
    is_one = (
        instruction.op == "custom-call"
        and 'custom_call_target="tpu_custom_call"' in instruction.rest
    )
    return instruction.name.rpartition(".")[0] or instruction.name if is_one else None


def _kind(instruction: _Instruction) -> str | None:
    """Return the kind if this ends a collective, or is one without a start."""
    if match := re.fullmatch(rf"({KINDS})(?:-done)?", instruction.op):
        return match[1]
    if instruction.op == "async-done" and re.search(
        rf"(?:{KINDS})", instruction.name + instruction.rest
    ):
        return "async"
    return None


def _kind_of_async(start: _Instruction) -> str | None:
    match = re.search(rf"({KINDS})", start.name + start.rest)
    return match[1] if match else None


def _bytes(shape: str) -> int:
    return sum(
        ITEM_BYTES.get(kind, 0) * math.prod(int(size) for size in sizes.split(",") if size)
        for kind, sizes in _SHAPE.findall(shape)
    )
