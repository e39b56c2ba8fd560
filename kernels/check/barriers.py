"""Looks for the barriers beside signals, in assembly and in Triton's IR.

One thread releases a signal: the others' stores must come before it. One thread
acquires it: the others' loads must come after. A barrier of the program's threads
orders both, and none shows in the interpreter, where a program has no threads.

In the assembly (PTX, or AMD's) a barrier stands directly before each
release, whoever put it there. Triton's IR has those of the source and no others;
there, all ways through the kernel are followed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from weft.errors import WeftError

_BARRIER = re.compile(r"\b(?:bar|barrier)(?:\.cta)?\.sync\b|\bs_barrier\b")
_STORE = re.compile(r"\bst\.(?!shared|local|async)|\bglobal_store|\bbuffer_store|\bflat_store")
_LABEL = re.compile(r"^(?:\$L__BB|\.LBB)\w+:")  # others are for debuggers
# At system scope. PTX: an atomic, reduction or store with release semantics, or a fence. AMD: what
# the memory model puts before each of them, a write-back of the L2 cache.
_RELEASE = re.compile(
    r"\b(?:atom|red|st|multimem|fence)\.(?=\S*\bsys\b)\S*(?:release|acq_rel)"
    r"|\bbuffer_wbl2 sc0 sc1\b"
)


def count_releases(assembly: str) -> tuple[int, int]:
    """Releases at system scope, and how many have no barrier directly before them.

    Directly: neither a store to global memory nor a place that is jumped to stands between, so
    that there is no way to the release around the barrier.
    """
    releases, unordered, ordered = 0, 0, False
    for line in assembly.splitlines():
        code = line.split("//")[0].split(";;")[0].strip()
        if _BARRIER.search(code):
            ordered = True
        elif _RELEASE.search(code):
            releases += 1
            unordered += not ordered
        elif _STORE.search(code) or _LABEL.match(code):
            ordered = False
    return releases, unordered


# The same in Triton's IR. A put of NVSHMEM's takes what all threads have stored, as a release does.
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


class Signals:
    """The barriers beside the signals of a kernel, in Triton's IR: as in its source, inlined.

    All ways through the kernel are followed, and loops round twice. A scalar is stored by one
    thread, so that what `signals.wait` writes when it gives up needs no barrier before it.

    Attributes:
        releases, acquires: their lines.
        bare_releases: those to which a way leads from a store, or from the beginning, that has no
            barrier on it.
        bare_acquires: those from which such a way leads to a load, or a store of a block.
    """

    def __init__(self, ttir: str) -> None:
        self.releases: set[int] = set()
        self.acquires: set[int] = set()
        self.bare_releases: set[int] = set()
        self.bare_acquires: set[int] = set()
        lines = [_TTIR_LOCATION.sub("", line.strip()) for line in ttir.splitlines()]
        self._lines = [line for line in lines if line and not line.startswith("#")]
        body, end = self._parse(0)
        if end != len(self._lines):
            raise WeftError(f"Triton's IR is not understood: {self._lines[end]!r} ends nothing")
        self._follow(body, False, frozenset())

    def _parse(self, at: int) -> tuple[list[_Operation], int]:
        """The operations from a line on, to the end of their region."""
        operations: list[_Operation] = []
        while at < len(self._lines) and not self._lines[at].startswith("}"):
            first, regions = at, []
            while self._lines[at].endswith("{"):
                region, at = self._parse(at + 1)
                regions.append(region)
            operations.append(_Operation(first, self._lines[first], regions))
            at += 1
        return operations, at

    def _follow(
        self, operations: Sequence[_Operation], ordered: bool, acquired: frozenset[int]
    ) -> tuple[bool, frozenset[int]]:
        """Whether a barrier is behind, and which acquires have had none; at the end, if so before.

        Args:
            ordered: a barrier comes after all stores up to here.
            acquired: no barrier comes after these.
        """
        for one in operations:
            if one.regions:
                ordered, acquired = self._follow_regions(one, ordered, acquired)
                continue
            if _TTIR_BARRIER.search(one.text):
                ordered, acquired = True, frozenset()
            if _TTIR_RELEASE.search(one.text):
                self.releases.add(one.line)
                if not ordered:
                    self.bare_releases.add(one.line)
            stores = _TTIR_STORE.search(one.text) is not None
            if stores:
                ordered = False
            if _TTIR_LOAD.search(one.text) or (stores and "tensor<" in one.text):
                self.bare_acquires |= acquired
            if _TTIR_ACQUIRE.search(one.text):
                self.acquires.add(one.line)
                acquired |= {one.line}
        return ordered, acquired

    def _follow_regions(
        self, one: _Operation, ordered: bool, acquired: frozenset[int]
    ) -> tuple[bool, frozenset[int]]:
        ends = [(ordered, acquired)]
        if "scf.if" in one.text:
            ends = [self._follow(region, ordered, acquired) for region in one.regions]
            if len(ends) == 1:
                ends.append((ordered, acquired))
        elif "scf.for" in one.text or "scf.while" in one.text:
            for region in 2 * one.regions:
                ends.append(self._follow(region, *ends[-1]))
        else:  # of a function, or of what a reduction does with two numbers
            for region in one.regions:
                ends = [self._follow(region, *ends[-1])]
        return all(end[0] for end in ends), frozenset[int]().union(*(end[1] for end in ends))


class _Operation(NamedTuple):
    line: int
    text: str
    regions: list[list[_Operation]]
