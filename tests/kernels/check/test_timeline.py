"""Timelines: an op's activity appears, in an order that its signals allow."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import ConfigError
from weft.kernels.check.ops.op import Op, Sizes
from weft.kernels.check.ops.table import OPS, named
from weft.kernels.check.timeline import (
    LINK_COST,
    NETWORK_COST,
    Activity,
    Lane,
    Span,
    hidden,
    record,
    to_svg,
    write,
)
from weft.kernels.gpu.collectives.all_gather import (
    AllGatherWorkspace,
    all_gather,
    all_gather_workspace,
)
from weft.kernels.gpu.matmul.matmul import matmul

SIZES = Sizes(3, m=32, n=16, k=16, dtype=torch.float32, tile=(16, 16, 16), programs=1)
PUSHED = SIZES.m * SIZES.k * LINK_COST
"""Time that one shard takes to one other rank."""

(GATHER_MATMUL,) = named(["all_gather_matmul"])


def busy(spans: list[Span], activity: str) -> int:
    return sum(span.end - span.start for span in spans if span.activity == activity)


DRAWN = {
    *("all_gather_two_level", "reduce_scatter", "matmul_all_reduce", "all_gather_grouped_matmul"),
    *("distributed_decode_attention", "moe_dispatch_combine"),
}
"""One of each kind; all in the long run."""


@pytest.mark.parametrize(
    "op",
    [pytest.param(op, marks=() if op.name in DRAWN else pytest.mark.slow) for op in OPS],
    ids=lambda op: op.name,
)
def test_each_row_shows_one_thing_at_a_time(op: Op) -> None:
    rows = defaultdict(list)
    for span in record(op, SIZES):
        assert span.start < span.end
        # a kernel's own time includes its fetches from other ranks
        assert span.lane not in ("links", "network") or span.activity == "communication"
        rows[span.rank, span.lane].append(span)
    assert {rank for rank, _ in rows} == {0, 1, 2}
    for spans in rows.values():
        for before, after in pairwise(spans):
            assert before.end <= after.start


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 1000))
def test_what_travels_is_what_the_protocol_says(seed: int) -> None:
    """Each rank sends its shard to both others, in every interleaving."""
    spans = record(GATHER_MATMUL, SIZES, seed)
    chunks = SIZES.m // SIZES.tile[0]
    for rank in range(3):
        mine = [span for span in spans if span.rank == rank]
        assert busy(mine, "communication") == 2 * (PUSHED + chunks * LINK_COST)  # and signals
        assert {span.lane for span in mine if span.activity == "compute"} == {"main"}
        assert {span.lane for span in mine if span.activity == "copying"} == {"beside"}
    assert spans == record(GATHER_MATMUL, SIZES, seed + 1)


def test_heads_are_sent_while_the_next_are_attended() -> None:
    (op,) = named(["distributed_decode_attention"])
    spans = record(op, SIZES)
    for rank in range(3):
        mine = [span for span in spans if span.rank == rank and span.kernel == "attend_and_send"]
        sent = [span for span in mine if span.lane == "links"]
        end = max(span.end for span in mine if span.lane == "main")
        assert min(span.start for span in sent) < end / 2
    assert hidden(spans) > 0.1


def test_a_tile_begins_after_its_rows_were_sent() -> None:
    """The own shard is computed at once; each other shard after its rank has sent it."""
    spans = record(GATHER_MATMUL, SIZES)
    sent = max(span.end for span in spans if span.activity == "communication")
    products = [span for span in spans if span.activity == "compute"]
    assert min(span.start for span in products) < sent < max(span.end for span in products)
    waiting = [span for span in spans if span.activity == "waiting"]
    assert max(span.end for span in waiting) == sent


def test_what_is_hidden_is_what_is_sent_while_the_rank_computes() -> None:
    def span(lane: Lane, activity: Activity, start: int, end: int, rank: int = 0) -> Span:
        return Span(rank, lane, activity, "kernel", start, end)

    spans = [
        span("links", "communication", 0, 10),
        span("main", "waiting", 0, 4),
        span("main", "compute", 4, 7),
        span("beside", "compute", 6, 7),
        span("main", "compute", 9, 20),
        span("beside", "copying", 0, 10),
        span("main", "compute", 0, 10, rank=1),
    ]
    assert hidden(spans) == 0.4
    assert hidden([]) == 0.0


def gather_then_multiply(x: Tensor, w: Tensor, workspace: AllGatherWorkspace) -> Tensor:
    """Compute the same product without overlap."""
    return matmul(all_gather(x, workspace), w, blocks=(16, 16, 16), programs=1)


def test_an_overlapped_product_hides_what_a_plain_one_does_not() -> None:
    plain = replace(
        GATHER_MATMUL,
        function=gather_then_multiply,
        workspace=lambda home, s: all_gather_workspace(home, s.m * s.k, s.dtype),
        tiled=False,
    )
    overlapped, apart = (record(op, SIZES) for op in (GATHER_MATMUL, plain))
    assert hidden(overlapped) > 0.1
    assert hidden(apart) < 0.05
    assert {span.activity for span in apart} == set(get_args(Activity))


FAR = ["reduce_scatter_two_level_far"]


@pytest.mark.parametrize("seed", [0, 1])
def test_what_crosses_nodes_overlaps_the_scatter_and_the_sums_of_the_next(seed: int) -> None:
    """Three nodes of two ranks: one node's part crosses while the next one is computed."""
    spans = record(named(FAR)[0], Sizes(6, m=8, n=16, k=64, dtype=torch.float32), seed)
    part = 8 * 64
    for rank in range(6):
        mine = [span for span in spans if span.rank == rank]
        (crossing,) = [span for span in mine if span.lane == "network"]
        assert crossing.end - crossing.start == 2 * part * NETWORK_COST  # to each other node once
        first = (crossing.start, crossing.start + part * NETWORK_COST)
        assert shared(mine, "scatter_local", "links", first) > part
        assert shared(mine, "reduce_local", "main", first) > part
        # and the sums are computed while parts are still scattered
        scattered = [s for s in mine if s.kernel == "scatter_local" and s.lane == "links"]
        assert shared(mine, "reduce_local", "main", (0, scattered[-1].end)) > part


def shared(spans: list[Span], kernel: str, lane: Lane, time: tuple[int, int]) -> int:
    """Return how long a kernel moves numbers in a lane within this time."""
    return sum(
        max(0, min(span.end, time[1]) - max(span.start, time[0]))
        for span in spans
        if span.kernel == kernel and span.lane == lane and span.activity != "waiting"
    )


def test_files_hold_every_span(tmp_path: Path) -> None:
    spans = record(GATHER_MATMUL, SIZES)
    write(spans, "a < b", tmp_path / "overlap.json")
    events = json.loads((tmp_path / "overlap.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert [(e["pid"], e["name"], e["ts"], e["ts"] + e["dur"]) for e in drawn] == [
        (s.rank, s.activity, s.start, s.end) for s in spans
    ]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"rank 0", "rank 1", "rank 2", "links", "main", "beside"}

    write(spans, "a < b", tmp_path / "overlap.svg")
    svg = ElementTree.fromstring((tmp_path / "overlap.svg").read_text())
    rects = svg.findall("{*}rect/{*}title")
    assert len(rects) == len(spans)
    assert rects[0].text is not None
    assert "a < b" in [text.text for text in svg.findall("{*}text")]
    with pytest.raises(ConfigError, match=r"output is '.*overlap.png'; it must end in .svg or"):
        write(spans, "a < b", tmp_path / "overlap.png")


def test_an_empty_timeline_is_a_picture() -> None:
    assert ElementTree.fromstring(to_svg([], "nothing")).tag.endswith("svg")
