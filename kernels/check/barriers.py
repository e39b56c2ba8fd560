"""Looks for the barriers beside signals and a program's own stores, in assembly and Triton's IR.

One thread releases a signal; the other threads' stores must come before it. One thread acquires it;
the other threads' loads must come after it. A barrier among the program's threads orders both. The
interpreter cannot show that, because its programs have no threads.

A program's threads may also pass numbers to each other through memory. There, a barrier stands
between a store and another thread's use.

In the assembly (PTX, or AMD's), a barrier stands directly before each release, whoever inserted it.
Triton's IR has only the source's barriers; there, all paths through the kernel are followed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from weft.errors import WeftError

State = TypeVar("State")

_BARRIER = re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync\b|\bs_barrier\b")
_STORE = re.compile(r"\bst\.(?!shared|local|async)|\bglobal_store|\bbuffer_store|\bflat_store")
_LABEL = re.compile(r"^(?:\$L__BB|\.LBB)\w+:")  # other labels are for debuggers
# At system scope. PTX: an atomic, reduction or store with release semantics, or a fence. AMD: the
# write-back of the L2 cache that the memory model puts before each of them.
_RELEASE = re.compile(
    r"\b(?:atom|red|st|multimem|fence)\.(?=\S*\bsys\b)\S*(?:release|acq_rel)"
    r"|\bbuffer_wbl2 sc0 sc1\b"
)


_FUNCTION = re.compile(r"\.(?:func|entry)\b|@function")
_JUMP = re.compile(r"\bs_c?branch\w*\s+(\.LBB\w+)|\bbra(?:\.uni)?\s+(\$L__BB\w+)")
_NO_FALL_THROUGH = re.compile(r"^(?:s_branch|s_endpgm|bra(?:\.uni)?|ret)\b")
_TARGET = re.compile(r"\$L__BB\w+")


def count_releases(assembly: str) -> tuple[int, int]:
    """Count releases at system scope, and the releases without a barrier directly before them.

    Directly means that no store to global memory comes between, on any path to the release.
    """
    lines = [line.split("//")[0].split(";;")[0].strip() for line in assembly.splitlines()]
    arriving: dict[str, bool] = {}  # by label: whether all jumps to it come after a barrier
    while True:
        before = dict(arriving)
        found = _follow_jumps(lines, arriving)
        if arriving == before:
            return found


def _follow_jumps(lines: Sequence[str], arriving: dict[str, bool]) -> tuple[int, int]:
    """Go through all lines once, with what is known about jumps, and add to it."""
    releases = unordered = 0
    ordered: bool | None = False  # None where nobody arrives
    for code in lines:
        if label := _LABEL.match(code):
            ways = (ordered, arriving.get(label.group().rstrip(":")))
            known = [way for way in ways if way is not None]
            ordered = all(known) if known else None
        elif _FUNCTION.search(code):
            ordered = False
        elif ".branchtargets" in code:  # a jump by a table may come from anywhere
            arriving.update(dict.fromkeys(_TARGET.findall(code), False))
        elif ordered is None:
            continue
        elif _BARRIER.search(code):
            ordered = True
        elif _RELEASE.search(code):
            releases += 1
            unordered += not ordered
        elif _STORE.search(code):
            ordered = False
        elif jump := _JUMP.search(code):
            target = jump.group(1) or jump.group(2)
            arriving[target] = arriving.get(target, True) and ordered
        if _NO_FALL_THROUGH.match(code):
            ordered = None
    return releases, unordered


# The same in Triton's IR. Like a release, an NVSHMEM put publishes all threads' stores.
_TTIR_BARRIER = re.compile(r"\b(?:ttg|gpu)\.barrier\b")
_TTIR_RELEASE = re.compile(
    r"\btt\.atomic\w* .*\b(?:release|acq_rel), sys\b"
    r"|\btt\.elementwise_inline_asm (?=.*\.sys\b).*\.(?:release|acq_rel)\b"
    r"|\btt\.extern_elementwise .*\bnvshmemx?_put"
)
_TTIR_ACQUIRE = re.compile(
    r"\btt\.atomic\w* .*\b(?:acquire|acq_rel), sys\b"
    r"|\btt\.elementwise_inline_asm (?=.*\.sys\b).*\.(?:acquire|acq_rel)\b"
    r"|\btt\.extern_elementwise .*\bnvshmemx?_(?:signal_|quiet)"
)
_TTIR_STORE = re.compile(
    r"\btt\.(?:store|descriptor_(?:store|reduce|scatter))\b"
    r"|\btt\.elementwise_inline_asm .*\b(?:st|red|atom)\."
)
_TTIR_LOAD = re.compile(
    r"\btt\.(?:load|descriptor_(?:load|gather))\b"
    r"|\btt\.elementwise_inline_asm .*\b(?:ld|ld_reduce)\."
)
_TTIR_LOCATION = re.compile(r"\s*loc\([^()]*(?:\([^()]*\))?\)$")


class _Operation(NamedTuple):
    line: int
    text: str
    regions: list[list[_Operation]]


class _Paths(Generic[State]):
    """All paths through a kernel in Triton's IR; loops are followed twice.

    Args:
        ttir: the IR.
        start: what is known at the beginning.
    """

    def __init__(self, ttir: str, start: State) -> None:
        lines = [_TTIR_LOCATION.sub("", line.strip()) for line in ttir.splitlines()]
        self._lines = [line for line in lines if line and not line.startswith("#")]
        body, end = self._parse(0)
        if end != len(self._lines):
            raise WeftError(f"Triton's IR is not understood: {self._lines[end]!r} ends nothing")
        self._follow(body, start)

    def _parse(self, line: int) -> tuple[list[_Operation], int]:
        """Parse operations from a line on, to the end of their region."""
        operations: list[_Operation] = []
        while line < len(self._lines) and not self._lines[line].startswith("}"):
            first, regions = line, []
            while self._lines[line].endswith("{"):
                region, line = self._parse(line + 1)
                regions.append(region)
            operations.append(_Operation(first, self._lines[first], regions))
            line += 1
        return operations, line

    def _follow(self, operations: Sequence[_Operation], state: State) -> State:
        """Follow a region's operations; return what is known at their end."""
        for operation in operations:
            if operation.regions:
                state = self._follow_regions(operation, state)
            else:
                state = self._visit(operation, state)
        return state

    def _follow_regions(self, operation: _Operation, state: State) -> State:
        ends = [state]
        if "scf.if" in operation.text:
            ends = [self._follow(region, state) for region in operation.regions]
            if len(ends) == 1:
                ends.append(state)
        elif "scf.for" in operation.text or "scf.while" in operation.text:
            for region in 2 * operation.regions:
                ends.append(self._follow(region, ends[-1]))
        else:  # a function, or a reduction's combine
            for region in operation.regions:
                ends = [self._follow(region, ends[-1])]
        return self._join(ends)

    def _visit(self, operation: _Operation, state: State) -> State:
        """Note what an operation does wrong; return what is known after it."""
        raise NotImplementedError

    def _join(self, states: Sequence[State]) -> State:
        """Return what is known where several paths meet."""
        raise NotImplementedError


_Known = tuple[bool, frozenset[int]]


class Signals(_Paths[_Known]):
    """The barriers beside a kernel's signals, in Triton's IR: as in its source, inlined.

    One thread stores a scalar, so a write by `signals.wait` on giving up needs no barrier before
    it.

    Attributes:
        releases, acquires: their lines.
        bare_releases: releases that a path reaches from a store, or from the beginning, without a
            barrier.
        bare_acquires: acquires from which such a path reaches a load, or a block's store.
    """

    def __init__(self, ttir: str) -> None:
        self.releases: set[int] = set()
        self.acquires: set[int] = set()
        self.bare_releases: set[int] = set()
        self.bare_acquires: set[int] = set()
        super().__init__(ttir, (False, frozenset()))

    def _visit(self, operation: _Operation, state: _Known) -> _Known:
        """Return whether a barrier comes after all stores, and acquires without one after them."""
        ordered, acquired = state
        if _TTIR_BARRIER.search(operation.text):
            ordered, acquired = True, frozenset()
        if _TTIR_RELEASE.search(operation.text):
            self.releases.add(operation.line)
            if not ordered:
                self.bare_releases.add(operation.line)
        stores = _TTIR_STORE.search(operation.text) is not None
        if stores:
            ordered = False
        if _TTIR_LOAD.search(operation.text) or (stores and "tensor<" in operation.text):
            self.bare_acquires |= acquired
        if _TTIR_ACQUIRE.search(operation.text):
            self.acquires.add(operation.line)
            acquired |= {operation.line}
        return ordered, acquired

    def _join(self, states: Sequence[_Known]) -> _Known:
        every = frozenset[int]().union(*(acquired for _, acquired in states))
        return all(ordered for ordered, _ in states), every


_TTIR_MULTICAST = re.compile(r"\btt\.elementwise_inline_asm .*\bmultimem\.(st|ld_reduce)\.")
_TTIR_FENCE = re.compile(r"\btt\.elementwise_inline_asm .*\bfence\.proxy\.alias\b")


class Fences(_Paths[tuple[bool, bool]]):
    """The fences beside accesses to multicast addresses, which PTX orders by no other means.

    Attributes:
        bare: lines of releases that a path reaches from a multicast store without a fence, and of
            multicast accesses that it reaches from an acquire.
    """

    def __init__(self, ttir: str) -> None:
        self.bare: set[int] = set()
        super().__init__(ttir, (False, False))

    def _visit(self, operation: _Operation, state: tuple[bool, bool]) -> tuple[bool, bool]:
        """Return whether a multicast store, and an acquire, has no fence after it."""
        stored, acquired = state
        if _TTIR_FENCE.search(operation.text):
            return False, False
        multicast = _TTIR_MULTICAST.search(operation.text)
        if (multicast and acquired) or (stored and _TTIR_RELEASE.search(operation.text)):
            self.bare.add(operation.line)
        return (
            stored or (multicast is not None and multicast[1] == "st"),
            acquired or _TTIR_ACQUIRE.search(operation.text) is not None,
        )

    def _join(self, states: Sequence[tuple[bool, bool]]) -> tuple[bool, bool]:
        return any(stored for stored, _ in states), any(acquired for _, acquired in states)


# How a kernel's own stores reach its other threads.
_TTIR_POINTER = re.compile(
    r"(%\w+) = tt\.(?:addptr|splat|broadcast|bitcast|expand_dims|reshape) (%\w+)"
)
_TTIR_ACCESS = re.compile(r"\btt\.(load|store|atomic)\w* [^%]*(%\w+).*tensor<")


class _Write(NamedTuple):
    memory: str
    line: int
    kind: str


class OwnStores(_Paths[frozenset[_Write]]):
    """Memory that a kernel's threads store, and other threads of the program use without a barrier.

    Two accesses share memory if their addresses begin with the same argument. A load may not follow
    a write by an earlier line, and an atomic may not follow a store; a loop's next turn uses other
    numbers. Where a kernel has barriers, no write may follow another one: the order matters there.

    Attributes:
        bare: lines of the second accesses.
    """

    def __init__(self, ttir: str) -> None:
        self.bare: set[int] = set()
        self._bases: dict[str, str] = {}
        self._has_barriers = _TTIR_BARRIER.search(ttir) is not None
        super().__init__(ttir, frozenset())

    def _visit(self, operation: _Operation, state: frozenset[_Write]) -> frozenset[_Write]:
        """Return the writes without a barrier after them."""
        if _TTIR_BARRIER.search(operation.text):
            return frozenset()
        if pointer := _TTIR_POINTER.search(operation.text):
            name, source = pointer.groups()
            self._bases[name] = self._bases.get(source, source)
        if not (access := _TTIR_ACCESS.search(operation.text)):
            return state
        kind, name = access.groups()
        memory = self._bases.get(name, name)
        before = [w.kind for w in state if w.memory == memory and w.line < operation.line]
        ordered = kind == "load" or (kind == "atomic" and "store" in before)
        if before and (ordered or self._has_barriers):
            self.bare.add(operation.line)
        return state if kind == "load" else state | {_Write(memory, operation.line, kind)}

    def _join(self, states: Sequence[frozenset[_Write]]) -> frozenset[_Write]:
        return frozenset[_Write]().union(*states)
