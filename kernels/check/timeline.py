"""Draws how an op hides communication: the activity of each rank's streams and links over time.

The op runs once on all ranks in the interpreter. It records each stream's activity in order:
numbers loaded and stored in the rank's own memory, numbers that go to or come from another rank,
and waits for signals. The interpreter runs one operation at a time, so the streams are then
replayed side by side (a list schedule). A number in own memory takes one unit of time, a number
over a link LINK_COST, and a wait lasts until its signal arrives. Stores to other ranks are posted:
the program continues, and the rank's links carry them in order, as well as the signals after them.
Puts to ranks without an address go over the rank's network, at NETWORK_COST per number.

Moving numbers counts as compute in kernels that multiply, and as copying in others.

The timeline thus shows the protocol's order and its waits. It does not show durations on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import triton
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.races import RaceDetector
from weft.kernels.check.ranks import run
from weft.kernels.interpreter.gpu import Array, Atomic, Kind, Program, RankBuilder
from weft.kernels.symmetric.memory import Home, SymmetricTensor

Activity = Literal["communication", "waiting", "compute", "copying"]
Stream = Literal["main", "beside"]
Lane = Literal["network", "links", "main", "beside"]

LINK_COST = 7
"""Cost of a number over a link, relative to memory: NVLink 4 and HBM3 in an H100."""

NETWORK_COST = 67
"""The same for a 400 Gb/s network card."""

_FOLDER = Path(__file__).parent
_NOT_KERNELS = (
    str(Path(triton.__file__).parent),
    str(_FOLDER),
    str(_FOLDER.with_name("interpreter")),
)

COLORS: dict[Activity, str] = {
    "communication": "#d9822b",
    "waiting": "#d5d8dc",
    "compute": "#2f6f9f",
    "copying": "#9cc3dd",
}


@dataclass(frozen=True, slots=True)
class Span:
    """One activity of a rank's stream, or of its links.

    Attributes:
        rank, lane: the rank, and its stream or links.
        activity: the kind of activity.
        kernel: the kernel that causes it.
        start, end: in units of virtual time.
    """

    rank: int
    lane: Lane
    activity: Activity
    kernel: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in a stream's program: take time, wait for a signal or a stream, or send a signal."""

    kernel: str
    activity: Activity = "compute"
    cost: int = 0
    posted: Lane | None = None  # the lane that does it while the stream continues
    sends: tuple[int, ...] = ()  # addresses of signals
    waits_for: tuple[tuple[int, int], ...] = ()  # (address, number of sends)
    after: tuple[Stream, int] | None = None  # number of steps on another stream of the rank


class _Recorder(RaceDetector):
    """Records each stream's steps; replaces the RaceDetector."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: dict[tuple[int, Stream], list[_Step]] = defaultdict(list)
        self.stream: dict[int, Stream] = defaultdict(lambda: "main")
        self._owners: list[tuple[int, int, int, int]] = []
        self._changes: dict[int, int] = defaultdict(int)
        self._put: dict[int, list[int]] = defaultdict(list)  # by rank: signals

    def watch(self, rank: int, tensor: SymmetricTensor) -> None:
        start = tensor.local.data_ptr()
        local = tensor.local
        self._owners.append((start, start + local.nbytes, rank, local.element_size()))

    def forget(self, rank: int) -> None:
        """Drop a rank's steps so far, because they are not the op's."""
        self.steps[rank, "main"].clear()

    def add(self, rank: int, step: _Step) -> None:
        """Add a step to a rank's current stream."""
        self.steps[rank, self.stream[rank]].append(step)

    def fork(self, rank: int) -> None:
        self.stream[rank] = "beside"
        self._after(rank, "main")

    def unfork(self, rank: int) -> None:
        self.stream[rank] = "main"

    def join(self, rank: int) -> None:
        self._after(rank, "beside")

    def recorded(self, rank: int) -> object:
        stream = self.stream[rank]
        return stream, len(self.steps[rank, stream])

    def waited(self, rank: int, event: Any) -> None:
        self.add(rank, _Step("", "waiting", after=event))

    def _after(self, rank: int, other: Stream) -> None:
        """Let a rank's current stream wait for another stream's steps so far."""
        self.add(rank, _Step("", "waiting", after=(other, len(self.steps[rank, other]))))

    def access(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        if len(addresses):
            remote = self._owner(int(addresses[0])) not in (None, rank)
            self.add(
                rank, _move(len(addresses), remote, posted="links" if kind == "store" else None)
            )

    def atomic(self, rank: int, atomic: Atomic) -> None:
        if atomic.changed:
            self._changes[atomic.address] += 1
            move = _move(1, self._owner(atomic.address) != rank, posted="links")
            self.add(rank, replace(move, sends=(atomic.address,)))
        else:
            self._wait(rank, [atomic.address])

    def words(self, rank: int, kind: Kind, addresses: Array, itemsize: int) -> None:
        """Record words that carry their own signal, as data and signal."""
        words = addresses.tolist()
        if kind == "load":
            self._wait(rank, words)
        elif words:
            for word in words:
                self._changes[word] += 1
            move = _move(len(words), self._owner(words[0]) != rank, posted="links")
            self.add(rank, replace(move, sends=tuple(words)))

    def put(self, rank: int, addresses: Array, signal: int) -> int:
        start = int(addresses[0])
        itemsize = next(size for begin, end, _, size in self._owners if begin <= start < end)
        cost = len(addresses) // itemsize * NETWORK_COST  # addresses are per byte
        sends = (signal,) if signal else ()
        self._put[rank] += sends
        self.add(rank, _Step(_kernel(), "communication", cost, posted="network", sends=sends))
        return 0

    def signalled(self, number: int, atomic: Atomic) -> None:
        self._changes[atomic.address] += 1

    def quiet(self, rank: int) -> None:
        self._wait(rank, self._put[rank])

    def _wait(self, rank: int, addresses: list[int]) -> None:
        """Wait for the signals sent so far: the last poll sees the awaited value."""
        wanted = tuple((address, self._changes[address]) for address in addresses)
        self.add(rank, _Step(_kernel(), "waiting", waits_for=wanted))

    def arrived(self, rank: int) -> None:
        """Ignored: ranks meet before and after the op, not in it. The same holds for the methods
        below.
        """

    def met(self, rank: int) -> None: ...

    def launched(self, rank: int, tensors: Mapping[str, Tensor]) -> None: ...

    def finished(self, rank: int) -> None: ...

    def program(self, rank: int, index: Program) -> None: ...

    def source_read(self, number: int, addresses: Array) -> None: ...

    def data_stored(self, number: int, addresses: Array) -> None: ...

    def _owner(self, address: int) -> int | None:
        return next((rank for start, end, rank, _ in self._owners if start <= address < end), None)


def _move(numbers: int, remote: bool, *, posted: Lane | None) -> _Step:
    """Move numbers in own memory, or over a link."""
    if remote:
        return _Step(_kernel(), "communication", cost=numbers * LINK_COST, posted=posted)
    return _Step(_kernel(), "copying", cost=numbers)


def _kernel() -> str:
    """Return this thread's kernel: the outermost function called by Triton."""
    frame, name = sys._getframe(1), ""
    while frame.f_back is not None:
        called_by = frame.f_back
        inside = (frame.f_code.co_filename.startswith(place) for place in _NOT_KERNELS)
        if called_by.f_code.co_filename.startswith(_NOT_KERNELS[0]) and not any(inside):
            name = frame.f_code.co_name
        frame = called_by
    return name


def record(op: Op, sizes: Sizes, seed: int = 0) -> list[Span]:
    """Record one call of an op, in virtual time.

    Kernels must have been imported with TRITON_INTERPRET=1.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        [torch.randn(shape, generator=generator).to(sizes.dtype) for _ in range(sizes.world)]
        for shape in op.shapes(sizes)
    ]
    recorder = _Recorder()

    def work(home: Home) -> None:
        workspace = op.workspace(home, sizes)
        recorder.forget(home.rank)  # zeros in the buffers
        op.call([tensor[home.rank] for tensor in tensors], workspace, sizes)

    with _multiplying() as products:
        nodes = op.reach(sizes.world)
        # As a GPU starts them.
        run(work, sizes.world, seed=seed, races=recorder, ranks_per_node=nodes, by_number=True)
    spans = _replay(recorder.steps)
    return [
        replace(span, activity="compute")
        if span.activity == "copying" and span.kernel in products
        else span
        for span in spans
    ]


@contextmanager
def _multiplying() -> Iterator[set[str]]:
    """Collect the names of multiplying kernels in a set, within the context."""
    products: set[str] = set()
    create_dot = RankBuilder.create_dot

    def recording_dot(builder: RankBuilder, *args: Any) -> Any:
        products.add(_kernel())
        return create_dot(builder, *args)

    RankBuilder.create_dot = recording_dot  # type: ignore[assignment, method-assign]
    try:
        yield products
    finally:
        RankBuilder.create_dot = create_dot  # type: ignore[method-assign]


def _replay(steps: dict[tuple[int, Stream], list[_Step]]) -> list[Span]:
    """Run all streams side by side: always the step that can begin first."""
    ends: dict[tuple[int, Stream], list[int]] = {key: [] for key in steps}  # when steps ended
    busy: dict[tuple[int, Lane], int] = defaultdict(int)  # by lane: when it becomes free
    sent: dict[int, list[int]] = defaultdict(list)  # by address: send times
    lanes: dict[tuple[int, Lane], list[Span]] = defaultdict(list)

    def begins(key: tuple[int, Stream]) -> int | None:
        """Return the earliest start of the stream's next step; None if it is not known yet."""
        done = ends[key]
        step, times = steps[key][len(done)], done[-1:]
        for address, count in step.waits_for:
            if len(sent[address]) < count:
                return None
            times = times + sent[address][:count]
        if step.after is not None:
            other, count = step.after
            if len(ends[key[0], other]) < count:
                return None
            times = times + ends[key[0], other][:count]
        return max(times, default=0)

    while waiting := [key for key in steps if len(ends[key]) < len(steps[key])]:
        ready = [(start, key) for key in waiting if (start := begins(key)) is not None]
        start, (rank, stream) = min(ready)
        done = ends[rank, stream]
        step, before = steps[rank, stream][len(done)], done[-1] if done else 0
        lane: Lane = step.posted or stream
        if step.posted:
            before = start = max(start, busy[rank, lane])
            busy[rank, lane] = start + step.cost
        end = start + step.cost
        done.append((done[-1] if done else 0) if step.posted else end)
        for address in step.sends:
            sent[address].append(end)
        _append(lanes[rank, lane], Span(rank, lane, step.activity, step.kernel, before, end))
    return [span for key in sorted(lanes) for span in lanes[key]]


def _append(spans: list[Span], span: Span) -> None:
    """Append a span unless it is empty, or extend the last one."""
    if span.start == span.end:
        return
    last = spans[-1] if spans else None
    if (
        last is not None
        and replace(last, start=span.start, end=span.end) == span
        and (last.end == span.start)
    ):
        spans[-1] = replace(last, end=span.end)
    else:
        spans.append(span)


def hidden(spans: Sequence[Span]) -> float:
    """Return the share of communication during which the rank computes."""
    computing: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        if span.activity == "compute":
            last = computing[span.rank][-1] if computing[span.rank] else (0, 0)
            if span.start <= last[1]:
                computing[span.rank][-1:] = [(last[0], max(last[1], span.end))]
            else:
                computing[span.rank].append((span.start, span.end))
    sent = [span for span in spans if span.activity == "communication"]
    covered = sum(
        max(0, min(span.end, end) - max(span.start, start))
        for span in sent
        for start, end in computing[span.rank]
    )
    return covered / max(1, sum(span.end - span.start for span in sent))


def write(spans: Sequence[Span], title: str, path: Path) -> None:
    """Write an SVG, or a trace for Perfetto and chrome://tracing, by the path's suffix.

    Raises:
        ConfigError: the path ends in neither .svg nor .json.
    """
    if path.suffix not in (".svg", ".json"):
        raise ConfigError(f"output is {str(path)!r}; it must end in .svg or .json")
    path.write_text(to_svg(spans, title) if path.suffix == ".svg" else to_trace(spans))


def to_trace(spans: Sequence[Span]) -> str:
    """Convert to Chrome's trace event format: a process for each rank, a thread for each row."""
    lanes = sorted({(span.rank, span.lane) for span in spans}, key=_row)
    threads = {key: number for number, key in enumerate(lanes)}
    names = [
        {"ph": "M", "name": name, "pid": rank, "tid": threads[rank, lane], "args": {"name": text}}
        for rank, lane in lanes
        for name, text in (("process_name", f"rank {rank}"), ("thread_name", lane))
    ]
    events = [
        {
            "ph": "X",
            "name": span.activity,
            "cat": span.activity,
            "pid": span.rank,
            "tid": threads[span.rank, span.lane],
            "ts": span.start,
            "dur": span.end - span.start,
            "args": {"kernel": span.kernel},
        }
        for span in spans
    ]
    return json.dumps({"traceEvents": [*names, *events]}, indent=1)


def _row(row: tuple[int, Lane]) -> tuple[int, int]:
    """Sort rows by rank, links first."""
    return row[0], get_args(Lane).index(row[1])


WIDTH, LEFT, ROW, GAP, TOP = 960, 130, 16, 12, 56
"""Pixels: the picture's width, labels, a row, the gap between ranks, title and legend."""


def to_svg(spans: Sequence[Span], title: str) -> str:
    """Draw a row for each rank's links and streams, from left to right in virtual time."""
    total = max((span.end for span in spans), default=1)
    scale = (WIDTH - LEFT - 20) / total
    drawn, y, tops = [], TOP, {}
    rows = sorted({(span.rank, span.lane) for span in spans}, key=_row)
    for rank, group in groupby(rows, key=lambda row: row[0]):
        drawn.append(f'<text x="10" y="{y + 12}" font-weight="bold">rank {rank}</text>')
        for _, lane in group:
            drawn.append(f'<text x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{lane}</text>')
            tops[rank, lane] = y
            y += ROW + 2
        y += GAP
    for span in spans:
        x, width = LEFT + span.start * scale, (span.end - span.start) * scale
        tooltip = " ".join((span.kernel, f"{span.activity}, {span.start} to {span.end}")).strip()
        drawn.append(
            f'<rect x="{x:.2f}" y="{tops[span.rank, span.lane]}" width="{width:.2f}" '
            f'height="{ROW}" fill="{COLORS[span.activity]}"><title>{escape(tooltip)}</title></rect>'
        )
    for place, activity in enumerate(get_args(Activity)):
        x = LEFT + 140 * place
        drawn.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{COLORS[activity]}"/>')
        drawn.append(f'<text x="{x + 18}" y="44">{activity}</text>')
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" '
            f'viewBox="0 0 {WIDTH} {y}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
            *drawn,
            "</svg>\n",
        )
    )
