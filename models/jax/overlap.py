"""Which collectives of a compiled step run beside products, from XLA's schedule.

In scheduled HLO an asynchronous collective is a start and a done, with what the chip does
meanwhile between them. Its bytes are hidden if a product is among that; those of a collective
without a start are not. What a Pallas kernel sends (its cost estimate says how much) is hidden if
the kernel multiplies meanwhile.
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
"""Kernels that send under their products."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a schedule.

    Attributes:
        kind: such as "all-gather", or a kernel's name.
        bytes: of its result on one chip; that a chip sends, of a kernel.
        products: how many run between its start and its end; of a kernel that overlaps, 1.
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
    """Every collective of a scheduled module, in the order of the text."""
    computations = _computations(hlo)
    with_products: set[str] = set()
    # A fusion counts as a product if there is one in what it calls, at any depth.
    for _ in computations:
        found = {
            name
            for name, body in computations.items()
            if any(_is_product(one, with_products) for one in body)
        }
        if found == with_products:
            break
        with_products = found
    return [one for body in computations.values() for one in _of_computation(body, with_products)]


def mosaic_kernels(hlo: str) -> dict[str, int]:
    """Names of the Mosaic kernels of a module, and how many calls of each there are."""
    names = (_kernel(one) for body in _computations(hlo).values() for one in body)
    return dict(Counter(name for name in names if name))


def hidden_share(found: list[Collective]) -> float:
    """The share of the collectives' bytes beside which a product runs; 1 if there are none."""
    total = sum(one.bytes for one in found)
    return sum(one.bytes for one in found if one.products) / total if total else 1.0


def _computations(hlo: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    body: list[_Instruction] = []
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            body = found.setdefault(match[1], [])
        elif match := _INSTRUCTION.match(line):
            body.append(_Instruction(*match.groups()))
        elif body:  # what a kernel is described by goes over several lines
            body[-1] = replace(body[-1], rest=f"{body[-1].rest}\n{line}")
    return found


def _is_product(one: _Instruction, with_products: set[str]) -> bool:
    called = re.findall(r"(?:calls|body)=%([\w.\-]+)", one.rest)
    return one.op in _PRODUCTS or any(name in with_products for name in called)


def _of_computation(body: list[_Instruction], with_products: set[str]) -> Iterator[Collective]:
    place = {one.name: i for i, one in enumerate(body)}
    for i, one in enumerate(body):
        if (name := _kernel(one)) and (sent := _SENT.search(one.rest)) and int(sent[1]):
            yield Collective(name, int(sent[1]), int(name in OVERLAPPED))
        kind = _kind(one)
        if kind is None:
            continue
        products = 0
        if one.op.endswith("-done") and (start := re.search(r"%([\w.\-]+)", one.rest)):
            between = body[place[start[1]] + 1 : i]
            products = sum(_is_product(other, with_products) for other in between)
            if one.op == "async-done":
                kind = _kind_of_async(body[place[start[1]]]) or kind
        yield Collective(kind, _bytes(one.shape), products)


def _kernel(one: _Instruction) -> str | None:
    """The name of the kernel that an instruction calls, without the number behind it."""
    is_one = one.op == "custom-call" and 'custom_call_target="tpu_custom_call"' in one.rest
    return one.name.rpartition(".")[0] or one.name if is_one else None


def _kind(one: _Instruction) -> str | None:
    """Of a collective's end, or of one that has no start."""
    if match := re.fullmatch(rf"({KINDS})(?:-done)?", one.op):
        return match[1]
    if one.op == "async-done" and re.search(rf"(?:{KINDS})", one.name + one.rest):
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
