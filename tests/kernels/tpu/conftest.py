"""One worker interprets, and one compiles, for all tests of this folder that a process runs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is first used


from weft.kernels.check.tpu.process import Workers


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers


@pytest.fixture(scope="session")
def compiler() -> Iterator[Workers]:
    with Workers() as workers:
        yield workers
