"""Tuning of real ops, in the interpreter: what is timed is the op."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from weft.kernels.check.ranks import RankError, run
from weft.kernels.gpu import tune, tuned
from weft.kernels.gpu.costs import PAYLOADS, Config, Problem
from weft.kernels.gpu.tunable import METHODS, prepare_op, tune_op
from weft.kernels.symmetric.memory import Home


@pytest.mark.parametrize("op", sorted(PAYLOADS))
def test_an_op_is_tuned_as_a_whole(op: str, tmp_path: Path) -> None:
    problem = Problem(op, 2, 24, 20, 16 if "matmul" in op else 0, "float32")
    size = {"candidates": 8 if "all_" in op and "matmul" not in op else 2}

    def work(home: Home) -> list[tune.Measured]:
        return tune_op(home, problem, path=tmp_path / "t", repetitions=1, calls=1, **size)

    first, second = run(work, 2)
    assert first == second
    assert all(0 < time < math.inf for one in first for time in one.times)
    (written,) = tuned.load(tmp_path / "t").values()
    assert written.config == first[0].config
    assert written.config.method in METHODS[op]


@pytest.mark.parametrize("op", sorted(PAYLOADS))
def test_what_is_timed_is_the_op(op: str) -> None:
    """Every method's call, on one rank, computes it: with one rank, what it has or x w."""
    problem = Problem(op, 1, 8, 12, 16 if "matmul" in op else 0, "float32")

    def work(home: Home) -> list[tuple[str, tuple[int, ...]]]:
        methods, prepare = prepare_op(home, problem)
        blocks = {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 4, "stages": 2}
        configs = [Config(m, **(blocks if problem.multiplies else {})) for m in methods]
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


def test_rows_that_do_not_divide_are_refused() -> None:
    problem = Problem("all_gather", 2, 7, 4, 0)
    with pytest.raises(RankError, match="all_gather: rows is 7; it must be a multiple of 2 ranks"):
        run(lambda home: prepare_op(home, problem), 2)
