"""Tuning of real ops, in the interpreter: what is timed is the op."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from weft.kernels import reference
from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu.tuning import search as tune
from weft.kernels.gpu.tuning import table as tuned
from weft.kernels.gpu.tuning.costs import PAYLOADS, Config, Problem
from weft.kernels.gpu.tuning.ops import METHODS, prepare_op, tune_op
from weft.kernels.symmetric.memory import Home


def problem_of(op: str, world_size: int, rows: int, n: int) -> Problem:
    k = 16 if "matmul" in op or "attention" in op else 0
    groups = world_size if op == "moe_dispatch" else 1
    return Problem(op, world_size, rows, n, k, "float32", groups=groups)


@pytest.mark.sweep
@pytest.mark.parametrize("op", sorted(PAYLOADS))
def test_an_op_is_tuned_as_a_whole(op: str, tmp_path: Path) -> None:
    problem = problem_of(op, 2, 24, 20)
    size = {"candidates": 8 if "all_" in op and "matmul" not in op else 2}

    def work(home: Home) -> list[tune.Measured]:
        return tune_op(home, problem, path=tmp_path / "t", repetitions=1, calls=1, **size)

    first, second = run(work, 2)
    assert first == second
    assert all(0 < time < math.inf for one in first for time in one.times)
    (written,) = tuned.load(tmp_path / "t").values()
    assert written.config == first[0].config
    assert written.config.method in METHODS[op]


@pytest.mark.parametrize("op", sorted(op for op in PAYLOADS if "attention" not in op))
def test_what_is_timed_is_the_op(op: str) -> None:
    """Every method's call, on one rank, computes it: with one rank, what it has or x w."""
    problem = problem_of(op, 1, 8, 12)

    def work(home: Home) -> list[tuple[str, tuple[int, ...]]]:
        methods, prepare = prepare_op(home, problem)
        chunk = {"block_m": 4} if op == "moe_dispatch" else {}
        blocks = {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 4, "stages": 2}
        configs = [Config(m, **(blocks if problem.multiplies else chunk)) for m in methods]
        calls = [(config.method, prepare(config)) for config in configs]
        results = []
        for method, call in calls:
            assert isinstance(call, partial)
            x, *rest = call.args
            expected = (x @ rest[0]).reshape(8, 12) if problem.multiplies else x
            result = call()
            torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)
            results.append((method, tuple(result.shape)))
        return results

    (results,) = run(work, 1)
    assert {method for method, _ in results} <= set(METHODS[op])
    assert {shape for _, shape in results} == {(8, 12)}


@pytest.mark.parametrize(("op", "rows"), [("decode_attention", 3), ("paged_attention", 7)])
def test_what_is_timed_is_attention(op: str, rows: int) -> None:
    """Of as many decodes, or of one prefill, with every number of splits."""
    problem = Problem(op, 1, rows, 40, 16, "float32", groups=2, top_k=2)

    def work(home: Home) -> None:
        (method,), prepare = prepare_op(home, problem)
        for splits in (1, 2) if op == "decode_attention" else (0,):
            call = prepare(Config(method, 16, 16, stages=2, warps=4, splits=splits))
            assert isinstance(call, partial)
            q, keys, values, batch = call.args
            step = (batch.query_start, batch.context_len, batch.block_table)
            lists = (part.tolist() for part in step)
            expected = reference.paged_attention(q, keys, values, *lists, scale=0.25)
            assert batch.context_len.tolist() == [40] * (3 if op == "decode_attention" else 1)
            torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4)

    run(work, 1)


def test_what_is_timed_is_attention_to_latents() -> None:
    problem = Problem("mla_decode_attention", 1, 3, 40, 24, "float32", groups=1, top_k=5)

    def work(home: Home) -> None:
        (method,), prepare = prepare_op(home, problem)
        for splits in (1, 2):
            call = prepare(Config(method, 16, 16, stages=2, warps=4, splits=splits))
            assert isinstance(call, partial)
            q, latents, batch = call.args
            step = (batch.query_start, batch.context_len, batch.block_table)
            lists = (part.tolist() for part in step)
            how = {"kv_lora_rank": 16, "scale": 24**-0.5}
            expected = reference.mla_decode_attention(q, latents, *lists, **how)
            assert (q.shape, batch.context_len.tolist()) == ((3, 5, 24), [40] * 3)
            torch.testing.assert_close(call(), expected, atol=1e-4, rtol=1e-4)

    run(work, 1)


@pytest.mark.parametrize("rows", [10, 12])
def test_what_is_timed_is_attention_over_ranks(rows: int) -> None:
    """Of one sequence, by zigzag where it can be."""
    op = "sequence_parallel_attention"
    problem = Problem(op, 2, rows, rows, 16, "float32", groups=2, top_k=2)

    def work(home: Home) -> tuple[list[torch.Tensor], torch.Tensor, bool]:
        (method,), prepare = prepare_op(home, problem)
        call = prepare(Config(method, 16, 16, stages=2, warps=4, senders=1))
        assert isinstance(call, partial)
        return list(call.args[:3]), call(), call.keywords["zigzag"]

    operands, results, zigzag = zip(*run(work, 2), strict=True)
    assert zigzag == ((rows // 2) % 2 == 0,) * 2
    expected = reference.sequence_parallel_attention(
        *zip(*operands, strict=True), scale=0.25, zigzag=zigzag[0]
    )
    for mine, oracle in zip(results, expected, strict=True):
        torch.testing.assert_close(mine, oracle, atol=1e-4, rtol=1e-4)


def test_rows_that_do_not_divide_are_refused() -> None:
    problem = Problem("all_gather", 2, 7, 4, 0)
    with pytest.raises(RankError, match="all_gather: rows is 7; it must be a multiple of 2 ranks"):
        run(lambda home: prepare_op(home, problem), 2)
