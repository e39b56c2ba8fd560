"""The parts with attention and experts: their logic in the interpreter, and equal results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.kernels.check.ranks import run as on_ranks
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.attention.mla import mla_decode_attention
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul
from weft.kernels.symmetric.memory import Home

PARTS = ("decode", "prefill", "latents", "sequence", "experts", "exchange", "rows")

Rows = Callable[..., list[dict[str, Any]]]


def test_every_part_for_one_gpu_runs_and_is_written(rows_of: Rows) -> None:
    rows = rows_of(*PARTS)
    movers = [row for row in rows if row["figure"]["goal"] == "at most 1.2"]
    names = {"rms_norm", "silu_multiply", "quantize", "rotate_into_cache"}
    assert {row["case"].split()[0] for row in movers} == names
    # times of the interpreter mean nothing
    assert {row["figure"]["good"] for row in rows} == {None}


@pytest.mark.slow
def test_processes_exchange_in_step(rows_of: Rows) -> None:
    """As over NCCL, with gloo; each rank in a process."""
    (row,) = rows_of("nccl")
    assert set(row["figure"]["details"]) == {"us ours", "us NCCL's"}


def test_torch_attends_to_the_same(module: Callable[[str], Any]) -> None:
    """Decodes, whole prompts, and a chunk at the end of a context."""
    attention, tiny = module("layers.attention"), module("layers.scale").TINY
    for op, batch in (
        (decode_attention, tiny.decodes[0]),
        *((paged_attention, batch) for batch in tiny.prefills),
    ):
        q, keys, values, paged = attention.operands(tiny, batch)
        theirs = attention.torch_attention(batch, q, keys, values, paged)()
        ours = op(q, keys, values, paged, scale=batch.head_dim**-0.5)
        torch.testing.assert_close(ours, theirs.transpose(1, 2).flatten(0, 1))


def test_torch_attends_to_the_same_latents(module: Callable[[str], Any]) -> None:
    attention, tiny = module("layers.attention"), module("layers.scale").TINY
    batch = tiny.latents[0]
    q, keys, _, paged = attention.operands(tiny, batch)
    theirs = attention.torch_attention(batch, q, keys, keys[..., :16], paged)()
    how = {"kv_lora_rank": 16, "scale": batch.head_dim**-0.5}
    ours = mla_decode_attention(q, keys[:, 0], paged, **how)
    torch.testing.assert_close(ours, theirs.transpose(1, 2).flatten(0, 1))


def test_operations_are_those_of_what_is_seen(module: Callable[[str], Any]) -> None:
    attention, scale = module("layers.attention"), module("layers.scale")
    batch = scale.Batch("", 6, 2, 16, requests=3, queries=5, context=11)
    seen = torch.ones(5, 11, dtype=torch.bool).tril(11 - 5)
    assert attention.count_operations(batch) == 3 * 6 * int(seen.sum()) * 2 * (2 * 16)


def test_torch_multiplies_the_same_groups(module: Callable[[str], Any]) -> None:
    experts, tiny = module("layers.experts"), module("layers.scale").TINY
    for product in tiny.products:
        x, w = tiny.random(product.rows, product.k), tiny.random(3, product.n, product.k).mT
        offsets = experts.offsets_of(product)
        rows = offsets.diff().tolist()
        assert rows == ([8, 8, 8] if product.even else [0, 24, 0])
        theirs = torch._grouped_mm(x, w, offs=offsets[1:])
        torch.testing.assert_close(grouped_matmul(x, w, offsets), theirs, atol=1e-4, rtol=1e-4)


def test_a_rank_alone_exchanges_what_it_would_among_all(module: Callable[[str], Any]) -> None:
    """It gets as many rows, and the bytes are counted by them."""
    exchange, ranks = module("layers.exchange"), module("harness.ranks")
    scale = module("layers.scale")
    tiny, of = scale.TINY, scale.Exchange("", 5, 16, 4, 3)
    ids = [exchange.chosen(of, rank) for rank in range(2)]
    make = partial(exchange._workspace, of, tiny)

    def rows_for(home: Home, workspace: Any) -> list[int]:
        sent = exchange.moe_dispatch(tiny.random(of.tokens, of.width), ids[home.rank], workspace)
        offsets: list[int] = sent.offsets.tolist()
        return offsets

    def alone(home: Home, workspaces: list[Any]) -> list[int]:
        exchange.receive(workspaces[0], ids)
        first, second = (rows_for(home, workspaces[0]) for _ in range(2))
        assert first == second
        return first

    def together(home: Home) -> list[int]:
        workspace = make(home)
        home.barrier()
        return rows_for(home, workspace)

    offsets = on_ranks(together, 2)[0]
    assert ranks.alone(alone, [make], 2, 2, tiny=True) == offsets
    placed = [int((each < 2).sum()) for each in ids]  # rank 0 has experts 0 and 1
    assert offsets[-1] == sum(placed)
    to = [len({(token, int(e) // 2) for token, es in enumerate(ids[0]) for e in es if e // 2 == r})
          for r in range(2)]  # fmt: skip
    row = 16 * 4
    expected = (to[1] + placed[1]) * row, (2 * sum(to) + 4 * offsets[-1] + 5 * 4) * row
    assert exchange.count_bytes(tiny, of, ids) == expected


def test_times_of_ranks_in_step_are_the_slowest_ones(
    module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    timing = module("harness.timing")
    monkeypatch.setattr(timing, "host_clock", lambda call, calls: float(call() * calls))

    def work(home: Home) -> dict[str, tuple[float, ...]]:
        calls = {"a": lambda: 1 + home.rank, "b": lambda: 9 - home.rank}
        times = timing.in_step(home, calls, 2, 3, tiny=True)
        return {name: each.values for name, each in times.items()}

    assert on_ranks(work, 3) == [{"a": (9.0, 9.0), "b": (27.0, 27.0)}] * 3


def test_a_copy_moves_as_many_bytes(module: Callable[[str], Any]) -> None:
    copy: Callable[[], Tensor] = module("harness.timing").copying(100, "cpu")
    target = copy()
    assert 2 * target.nbytes == 100
    target.zero_()
    assert torch.equal(copy(), target)
    assert target.any()


COMPILE = """
import json
import sys
from dataclasses import replace
from functools import partial

import torch

sys.path.insert(0, sys.argv[1])
from layers.attention import operands
from layers.scale import Batch, TINY, full
from weft.kernels.check import aot
from weft.kernels.gpu.attention.paged import paged_attention
from weft.kernels.gpu.attention.decode import decode_attention
from weft.kernels.gpu.experts.grouped_matmul import grouped_matmul

large = full()
scale = replace(TINY, dtype=torch.bfloat16, page=large.page)
with aot.compiling("sm_90") as launches:
    for op, queries, tiles in (
        (partial(decode_attention, splits=2), 1, large.decode_tiles),
        (paged_attention, 300, large.prefill_tiles),
    ):
        tensors = operands(scale, Batch("", 8, 2, 128, 1, queries, 512))
        for m, n, warps, stages in tiles:
            op(*tensors, scale=1.0, blocks=(m, n), warps=warps, stages=stages)
    x, w = scale.random(256, 256), scale.random(2, 256, 256).mT
    for blocks, warps, stages in large.blocks:
        offsets = torch.tensor([0, 128, 256], dtype=torch.int32)
        grouped_matmul(x, w, offsets, blocks=blocks, warps=warps, stages=stages)
for launch in launches:
    row = aot.describe("", "sm_90", launch)
    print(json.dumps([row.kernel, row.error, row.tensor_core_instructions]))
"""


@pytest.mark.slow
def test_what_is_tried_compiles(script: Path, tmp_path: Path) -> None:
    code = tmp_path / "compile.py"
    code.write_text(COMPILE)
    done = subprocess.run(
        [sys.executable, str(code), str(script.parent)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {kernel for kernel, *_ in rows} == {"attend", "merge_splits", "multiply_groups"}
    for kernel, error, tensor_cores in rows:
        assert not error
        assert (tensor_cores == 0) == (kernel == "merge_splits")
