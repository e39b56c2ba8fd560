"""Tests run where plugins are missing, and of sweeps a sample without gaps."""

import subprocess
import sys
from itertools import compress, product
from pathlib import Path

import pytest
from support.sweeps import sample

ROOT = Path(__file__).parent.parent
MISSING = ("asyncio", "timeout", "randomly", "xdist")


def test_tests_run_without_plugins() -> None:
    without = [part for plugin in MISSING for part in ("-p", f"no:{plugin}")]
    command = [sys.executable, "-m", "pytest", "-q", *without, "tests/models/plan/test_batch.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("sizes", [(26, 5), (5, 26), (2, 20, 2), (4, 4), (40, 8)])
def test_a_sample_has_each_value_of_the_largest_parameter(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    named = [dict(enumerate(case)) for case in cases]
    taken = list(compress(cases, sample(named)))
    assert abs(len(taken) - len(cases) / 4) < max(sizes)
    largest = sizes.index(max(sizes))
    assert {case[largest] for case in taken} == set(range(max(sizes)))
    others = product(*(range(size) for i, size in enumerate(sizes) if i != largest))
    assert {case[:largest] + case[largest + 1 :] for case in taken} == set(others)
    assert sample([case | {"other": case[0]} for case in named]) == sample(named)


def test_a_sample_of_one_parameter_is_every_fourth() -> None:
    assert sample([{"x": i} for i in range(9)]) == [i % 4 == 0 for i in range(9)]
